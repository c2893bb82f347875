"""Temporaries of the native normalization kernels on CUDA: layer, RMS, group and batch norm, and softmax."""

from __future__ import annotations

from typing import Any

import torch

from memplan._torch import torch_version
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.cudnn import uses_batch_norm
from memplan.trace.semantics.cuda.formula import Formula, nonzero
from memplan.trace.semantics.layout import bytes_of, copied, copied_to, like_channels_last, suggests_channels_last


def copies_of(*positions: int) -> Formula:
    """Formula for kernels whose only temporaries are contiguous copies of these operands."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        return nonzero(*(copied(args[i]) for i in positions))

    return formula


def group_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (group_norm.cpp): from torch 2.14 on the copies of gradient and input that the derivative formula
    made before, as observed on the CPU."""
    version = torch_version()
    last = version >= (2, 15) and suggests_channels_last(args[1])
    return nonzero(copied_to(args[0], last), copied_to(args[1], last)) if version >= (2, 14) else ()


def _uses_channels_last(x: torch.Tensor) -> bool:
    """Normalization.cu, batch_norm_use_channels_last_kernels: also for 2d inputs and inputs with one channel."""
    if x.is_contiguous():
        return x.dim() == 2 or x.stride(1) == 1
    return like_channels_last(x.shape, x.stride()) and x.dim() in (4, 5)


def _uses_cudnn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    epsilon: float,
) -> bool:
    """Whether cuDNN runs a batch norm under the current settings."""
    enabled = torch.backends.cudnn.enabled
    return uses_batch_norm(x, weight, bias, mean, variance, training, epsilon, enabled).cudnn


def _flatten_copy_bytes(x: torch.Tensor) -> int:
    """Bytes of the copy made by reshaping to (batch, channels, -1); 0 if that is a view."""
    if x.is_contiguous() or x.dim() <= 3:
        return 0
    step = x.stride(-1)
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size != 1 and stride != step:
            return bytes_of(x)
        step *= size
    return 0


def batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (Normalization.cu, batch_norm_backward_cuda): flattened copies of gradient and input.

    cuDNN, which runs if the training forward used it, wants the gradient in the input's memory format
    (cudnn/BatchNorm.cpp).
    """
    gradient, x, train, mask = args[0], args[1], args[7], args[9]
    if train and _uses_cudnn(x, args[2], args[2], args[3], args[4], train, args[8]):
        return nonzero(copied_to(gradient, suggests_channels_last(x)))
    if mask[0] and not (_uses_channels_last(x) and _uses_channels_last(gradient)):
        return nonzero(_flatten_copy_bytes(gradient), _flatten_copy_bytes(x))
    return ()


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
    "aten.native_layer_norm_backward.default": copies_of(0, 1),
    "aten._fused_rms_norm.default": copies_of(0),
    "aten._fused_rms_norm_backward.default": copies_of(0, 1),
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}
"""Overload name -> bytes of the allocations that are live at the kernel's peak."""
