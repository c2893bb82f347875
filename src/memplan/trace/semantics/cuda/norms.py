"""Temporaries of the native normalization kernels on CUDA: layer, RMS, group and batch norm, and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from memplan._torch import torch_version
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.cudnn import uses_batch_norm
from memplan.trace.semantics.cuda.formula import AllocationBytes, Formula, nonzero
from memplan.trace.semantics.cuda.reductions import floor_power_of_two
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of, ceil_div, copy_bytes, like_channels_last, suggests_channels_last

_WARP = 32
_LARGE = 64 << 10
_TALLEST_GRID = 32 << 10
_BLOCK = 512
_PER_THREAD = 16
_TILE = 32
_HIGHEST = 128


def _accumulated(dtype: torch.dtype) -> int:
    return 8 if dtype is torch.float64 else 4


def _weight_sums(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, arch: Arch) -> int:
    """Bytes of the partial sums for the gradient of a norm's weight; 0 if it is computed in a single pass.

    Source: native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: partial sums for over 65,536 rows with
    columns that fill less than half of the card, in the dtype of the weight. ``shape``: of the normalized dimensions.
    """
    columns = prod(shape)
    rows = x.numel() // max(1, columns)
    if rows <= _LARGE or columns // _WARP >= arch.multiprocessors // 2:
        return 0
    partial_rows = min(_TALLEST_GRID // ceil_div(columns, _WARP), ceil_div(rows, _WARP))
    return partial_rows * columns * (x if weight is None else weight).element_size()


def layer_norm_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (layer_norm_kernel.cu, layer_norm_backward_cuda): contiguous operands, and partial sums for weight
    and bias."""
    gradient, x, shape, _, _, weight, _, (_, needs_weight, needs_bias) = args[:8]
    sums = _weight_sums(x, shape, weight, arch)
    return nonzero(copy_bytes(gradient), copy_bytes(x), sums if needs_weight else 0, sums if needs_bias else 0)


def rms_norm_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (layer_norm_kernel.cu, _fused_rms_norm_backward_cuda): contiguous operands, and partial sums for the
    weight."""
    gradient, x, shape, _, weight, (_, needs_weight) = args[:6]
    sums = _weight_sums(x, shape, weight, arch) if needs_weight else 0
    return nonzero(copy_bytes(gradient), copy_bytes(x), sums)


def copies_of(*positions: int) -> Formula:
    """Formula for kernels whose only temporaries are contiguous copies of these operands."""

    def formula(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
        return nonzero(*(copy_bytes(args[i]) for i in positions))

    return formula


def group_norm(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (group_norm_kernel.cu): a scale and an offset per channel and sample."""
    x, weight, bias, batch, channels, positions = args[:6]
    if positions == 1 or (weight is None and bias is None):
        return ()
    per_channel = batch * channels * _accumulated(x.dtype)
    return nonzero(per_channel, per_channel)


def group_norm_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (group_norm_kernel.cu): two sums per channel and sample, a scale with a weight, and two values per
    group.

    From torch 2.14 on, group_norm.cpp makes the copies of the derivative formula: observed on the CPU only.
    """
    gradient, x, _, _, weight, batch, channels, positions, groups, (needs_input, *_) = args
    sizes = list[int]()
    if torch_version() >= (2, 14):
        channels_last = torch_version() >= (2, 15) and suggests_channels_last(x)
        sizes += copy_bytes(gradient, channels_last), copy_bytes(x, channels_last)
    per_channel, per_group = (batch * count * _accumulated(x.dtype) for count in (channels, groups))
    sizes += per_channel, per_channel
    if needs_input:
        if weight is not None and positions != 1:
            sizes.append(per_channel)
        sizes += per_group, per_group
    return nonzero(*sizes)


def _grid_rows(rows: int, channels: int) -> int:
    """Number of blocks that share a channel's sum in channels last: Normalization.cuh, flexible_launch_configs.

    ``rows``: elements of each channel.
    """
    width = min(floor_power_of_two(channels), _TILE)
    height = min(floor_power_of_two(ceil_div(rows, _PER_THREAD)), _BLOCK // width)
    blocks = min(ceil_div(rows, height * _PER_THREAD), _HIGHEST)
    return blocks if blocks >= 8 else 1


def _uses_channels_last(x: torch.Tensor) -> bool:
    """Return whether the kernels for channels last run: also for 2d inputs and inputs with one channel.

    Source: Normalization.cu, batch_norm_use_channels_last_kernels.
    """
    if x.is_contiguous():
        return x.dim() == 2 or x.stride(1) == 1
    return like_channels_last(x.shape, x.stride()) and x.dim() in (4, 5)


def _staging(x: torch.Tensor, sums: int) -> int:
    """Bytes of the partial sums of a grid of blocks, in channels last. ``sums``: the number of sums of each channel."""
    channels = x.shape[1]
    blocks = _grid_rows(x.numel() // max(1, channels), channels)
    return sums * channels * blocks * _accumulated(x.dtype) if blocks > 1 else 0


def batch_norm(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Normalization.cuh, batch_norm_stats_channels_last_cuda_template): staging of means and variances.

    Contiguous inputs need nothing, and cuDNN has a workspace instead.
    """
    x, weight, bias, mean, variance, training, _, epsilon = args[:8]
    if not training or uses_batch_norm(x, weight, bias, mean, variance, training, epsilon).cudnn:
        return ()
    return nonzero(_staging(x, sums=4)) if _uses_channels_last(x) else ()


def batch_norm_without_statistics(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries of batch norm without running statistics: as of `batch_norm`."""
    return batch_norm((*args[:3], None, None, *args[3:]), kwargs, result, arch)


def _flatten_copy_bytes(x: torch.Tensor) -> int:
    """Return the bytes of the copy of reshaping to (batch, channels, -1); 0 if that is a view."""
    if x.is_contiguous() or x.dim() <= 3:
        return 0
    mergeable_stride = x.stride(-1)
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size != 1 and stride != mergeable_stride:
            return bytes_of(x)
        mergeable_stride *= size
    return 0


def batch_norm_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Normalization.cu, batch_norm_backward_cuda): one kernel on flattened operands, or sums and an
    elementwise kernel.

    In channels last, the sums of the blocks are staged, and two sums per channel live until the end. cuDNN, which runs
    if the training forward used it, wants the gradient in the input's memory format (cudnn/BatchNorm.cpp).
    """
    gradient, x, weight, mean, variance, _, _, train, epsilon, (needs_input, needs_weight, needs_bias) = args
    # the derivative gets no bias: the layer has one if it has a weight
    if (
        train
        and uses_batch_norm(
            x, weight, bias=weight, running_mean=mean, running_var=variance, training=train, epsilon=epsilon
        ).cudnn
    ):
        return nonzero(copy_bytes(gradient, suggests_channels_last(x)))
    sums = x.shape[1] * _accumulated(x.dtype)
    flattened = (_flatten_copy_bytes(gradient), _flatten_copy_bytes(x))
    if not _uses_channels_last(x):
        return nonzero(*flattened) if needs_input else nonzero(sums, sums)
    if not (train or needs_weight or needs_bias):
        return ()
    if not _uses_channels_last(gradient):
        return nonzero(sums, sums, *flattened)
    return nonzero(sums, sums, _staging(x, sums=2))


def softmax_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (SoftMax.cu, softmax_backward_cuda_out): gradient times output, and a contiguous copy of the
    output."""
    gradient, output = args[:2]
    return nonzero(bytes_of(gradient), copy_bytes(output))


def safe_softmax(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
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
    "aten.native_batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm_without_statistics,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}
"""Overload name -> bytes of the allocations that are live at the kernel's peak."""
