"""Temporaries of the native normalization kernels on CUDA: layer, RMS, group and batch norm, and softmax."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from memplan._torch import torch_version
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.cudnn import uses_batch_norm
from memplan.trace.semantics.cuda.formula import Formula, nonzero
from memplan.trace.semantics.cuda.reductions import floor_power_of_two
from memplan.trace.semantics.layout import bytes_of, copied, copied_to, like_channels_last, suggests_channels_last

_WARP = 32
_LARGE = 64 << 10
_TALLEST_GRID = 32 << 10
_BLOCK = 512
_PER_THREAD = 16
_TILE = 32
_HIGHEST = 128


def _accumulated(dtype: torch.dtype) -> int:
    """Bytes of an element of the accumulation dtype."""
    return 8 if dtype is torch.float64 else 4


def _partial_rows(rows: int, columns: int, arch: Arch) -> int:
    """Return the rows of partial sums for the gradient of a norm's weight; 0 if it is computed in a single pass.

    Source: native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: partial sums for over 65,536 rows with
    columns that fill less than half of the card.
    """
    if rows <= _LARGE or columns // _WARP >= arch.multiprocessors // 2:
        return 0
    return min(_TALLEST_GRID // -(-columns // _WARP), -(-rows // _WARP))


def layer_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (layer_norm_kernel.cu, layer_norm_backward_cuda): contiguous operands, and partial sums for weight
    and bias.

    The partial sums have the dtype of the weight.
    """
    gradient, x, shape, mask = args[0], args[1], args[2], args[7]
    weight = args[5]
    columns = prod(shape)
    rows = _partial_rows(x.numel() // max(1, columns), columns, arch)
    size = rows * columns * (x if weight is None else weight).element_size()
    return nonzero(copied(gradient), copied(x), size * bool(mask[1]), size * bool(mask[2]))


def rms_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (layer_norm_kernel.cu, _fused_rms_norm_backward_cuda): like `layer_norm_backward`, without a bias."""
    gradient, x, shape, weight, mask = args[0], args[1], args[2], args[4], args[5]
    columns = prod(shape)
    rows = _partial_rows(x.numel() // max(1, columns), columns, arch)
    size = rows * columns * (x if weight is None else weight).element_size()
    return nonzero(copied(gradient), copied(x), size * bool(mask[1]))


def copies_of(*positions: int) -> Formula:
    """Formula for kernels whose only temporaries are contiguous copies of these operands."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        return nonzero(*(copied(args[i]) for i in positions))

    return formula


def group_norm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (group_norm_kernel.cu): a scale and an offset per channel and sample."""
    x, batch, channels, size = args[0], args[3], args[4], args[5]
    if size == 1 or (args[1] is None and args[2] is None):
        return ()
    per_channel = batch * channels * _accumulated(x.dtype)
    return nonzero(per_channel, per_channel)


def group_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (group_norm_kernel.cu): two sums per channel and sample, a scale with a weight, and two values per
    group.

    From torch 2.14 on, group_norm.cpp makes the copies of the derivative formula: observed on the CPU only.
    """
    copies = _copies_of_group_norm(args[0], args[1])
    x, weight, batch, channels, size, groups, mask = args[1], args[4], *args[5:9], args[9]
    itemsize = _accumulated(x.dtype)
    per_channel, per_group = batch * channels * itemsize, batch * groups * itemsize
    if size == 1:
        return nonzero(*copies, per_channel, per_channel, *((per_group, per_group) if mask[0] else ()))
    inner = (per_channel if weight is not None else 0, per_group, per_group) if mask[0] else ()
    return nonzero(*copies, per_channel, per_channel, *inner)


def _copies_of_group_norm(gradient: torch.Tensor, x: torch.Tensor) -> tuple[int, ...]:
    """Bytes of the copies of gradient and input that group_norm.cpp makes from torch 2.14 on."""
    version = torch_version()
    last = version >= (2, 15) and suggests_channels_last(x)
    return (copied_to(gradient, last), copied_to(x, last)) if version >= (2, 14) else ()


def _grid_rows(rows: int, channels: int) -> int:
    """Number of blocks that share a channel's sum in channels last: Normalization.cuh, flexible_launch_configs."""
    width = min(floor_power_of_two(channels), _TILE)
    height = min(floor_power_of_two(-(-rows // _PER_THREAD)), _BLOCK // width)
    blocks = min(-(-rows // (height * _PER_THREAD)), _HIGHEST)
    return blocks if blocks >= 8 else 1


def _uses_channels_last(x: torch.Tensor) -> bool:
    """Normalization.cu, batch_norm_use_channels_last_kernels: also for 2d inputs and inputs with one channel."""
    if x.is_contiguous():
        return x.dim() == 2 or x.stride(1) == 1
    return like_channels_last(x.shape, x.stride()) and x.dim() in (4, 5)


def _staging(x: torch.Tensor, sums: int) -> int:
    """Bytes of the partial sums of a grid of blocks, in channels last."""
    channels = x.shape[1]
    blocks = _grid_rows(x.numel() // max(1, channels), channels)
    return sums * channels * blocks * _accumulated(x.dtype) if blocks > 1 else 0


def batch_norm(training: int) -> Formula:
    """Formula of batch norm (Normalization.cuh, batch_norm_stats_channels_last_cuda_template): staging of means and
    variances.

    ``training`` is the position of that argument. Contiguous inputs need nothing, and cuDNN has a workspace instead.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        x = args[0]
        running = (args[3], args[4]) if training == 5 else (None, None)
        if uses_batch_norm(x, args[1], args[2], *running, args[training], args[-1]).cudnn:
            return ()
        return nonzero(_staging(x, 4)) if args[training] and _uses_channels_last(x) else ()

    return formula


def _flatten_copy_bytes(x: torch.Tensor) -> int:
    """Return the bytes of the copy of reshaping to (batch, channels, -1); 0 if that is a view."""
    if x.is_contiguous() or x.dim() <= 3:
        return 0
    step = x.stride(-1)
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size != 1 and stride != step:
            return bytes_of(x)
        step *= size
    return 0


def batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (Normalization.cu, batch_norm_backward_cuda): one kernel on flattened operands, or sums and an
    elementwise kernel.

    In channels last, the sums of the blocks are staged, and two sums per channel live until the end. cuDNN, which runs
    if the training forward used it, wants the gradient in the input's memory format (cudnn/BatchNorm.cpp).
    """
    gradient, x, train, mask = args[0], args[1], args[7], args[9]
    if train and uses_batch_norm(x, args[2], args[2], args[3], args[4], train, args[8]).cudnn:
        return nonzero(copied_to(gradient, suggests_channels_last(x)))
    sums = x.shape[1] * _accumulated(x.dtype)
    if not _uses_channels_last(x):
        return nonzero(_flatten_copy_bytes(gradient), _flatten_copy_bytes(x)) if mask[0] else nonzero(sums, sums)
    if not (train or mask[1] or mask[2]):
        return ()
    if not _uses_channels_last(gradient):
        return nonzero(sums, sums, _flatten_copy_bytes(gradient), _flatten_copy_bytes(x))
    return nonzero(sums, sums, _staging(x, 2))


def softmax_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (SoftMax.cu, softmax_backward_cuda_out): gradient times output, and a contiguous copy of the
    output."""
    gradient, output = args[:2]
    return nonzero(bytes_of(gradient), copied(output))


def safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (native/transformers/attention.cpp, _safe_softmax): masks of masked entries and of rows that are
    fully masked."""
    x, dim = args[0], args[1]
    return nonzero(x.numel(), x.numel() // max(1, x.shape[dim]))


FORMULAS: dict[str, Formula] = {
    "aten._softmax.default": copies_of(0),
    "aten._log_softmax.default": copies_of(0),
    "aten._safe_softmax.default": safe_softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax_backward_data.default": copies_of(0, 1),
    "aten.native_layer_norm.default": copies_of(0),
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": copies_of(0),
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.native_batch_norm.default": batch_norm(5),
    "aten._native_batch_norm_legit.default": batch_norm(5),
    "aten._native_batch_norm_legit.no_stats": batch_norm(3),
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}
"""Overload name -> bytes of the allocations that are live at the kernel's peak."""
