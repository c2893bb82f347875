"""Temporaries of convolutions that oneDNN does not run: PyTorch's own im2col kernels.

ATen/native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp, NaiveConvolutionTranspose2d.cpp,
NaiveConvolutionTranspose3d.cpp. Convolution.cpp calls them once per group, except the 3-d kernel, which handles all
groups in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from memplan.trace.semantics.layout import bytes_of, copied_to, space, suggests_channels_last


def _columns(channels: int, weight: torch.Tensor, positions: int, itemsize: int) -> int:
    """Return the bytes of the columns that im2col makes: for each position the values under the kernel."""
    return channels * prod(weight.shape[2:]) * positions * itemsize


def _contiguous_copies(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> int:
    """Return the bytes of the copies of tensors that are not in the common memory format
    (``thnn_conv_use_channels_last``, ConvUtils.h)."""
    last = x.dim() == 4 and (suggests_channels_last(x) or suggests_channels_last(weight))
    return sum(copied_to(t, last) for t in (x, weight, *others))


def _skips_columns(
    weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Return whether a 1x1 kernel reads its input in place, without im2col."""
    steps = (*stride, *dilation)
    return prod(weight.shape[2:]) == 1 and all(s == 1 for s in steps) and not any(padding)


def _handles_groups(x: torch.Tensor, transposed: bool, dilation: Sequence[int]) -> bool:
    """Return whether a single call computes all groups: ConvolutionMM3d.cpp, ``slow_conv3d_forward_out_cpu``."""
    return x.dim() == 5 and not transposed and all(d == 1 for d in dilation)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    biased: bool,
    groups: int,
    transposed: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> int:
    """Return the temporary bytes of a forward: the columns, and with groups the slices of input and output, which are
    concatenated at the end; the slices of a single image are views."""
    batch, size = x.shape[0], x.element_size()
    if _handles_groups(x, transposed, dilation):
        groups = 1
    copies = _contiguous_copies(x, weight)
    if transposed:
        columns = _columns(y.shape[1] // groups, weight, space(x.shape), size)
        if x.dim() < 5:
            columns *= batch
        elif biased:
            columns += space(y.shape) * size  # ones
    elif _skips_columns(weight, stride, padding, dilation):
        columns = 0
    else:
        columns = _columns(x.shape[1] // groups, weight, space(y.shape), size)
        if all(d == 1 for d in dilation):
            columns *= batch
    if groups == 1:
        return copies + columns
    return copies + max((bytes_of(x) // groups if batch > 1 else 0) + columns, bytes_of(y))


def backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: Sequence[bool],
    groups: int,
    transposed: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> int:
    """Return the temporary bytes of a backward: the columns, which are live while the last result is computed; with
    groups, each result is first computed in slices."""
    batch, size = x.shape[0], x.element_size()
    if _handles_groups(x, transposed, dilation):
        groups = 1
    copies = _contiguous_copies(x, weight, gradient)
    volume_copy = copied_to(x, False) if x.dim() == 5 else 0  # 3-d only, and only for the weight's gradient
    copies -= volume_copy
    data_columns = weight_columns = 0
    if transposed:
        data_columns = weight_columns = _columns(gradient.shape[1] // groups, weight, space(x.shape), size)
    else:
        image = _columns(x.shape[1] // groups, weight, space(gradient.shape), size)
        dilated = any(d != 1 for d in dilation)
        all_columns = image if dilated else image * batch
        skips = _skips_columns(weight, stride, padding, dilation)
        weight_columns = 0 if skips else all_columns
        data_columns = all_columns if x.dim() == 5 or (dilated and not skips) else 0
    grad_weight, input_slice = bytes_of(weight) // groups, bytes_of(x) // groups
    peaks = [0]
    if mask[0]:
        bias = gradient.shape[1] * size if mask[2] and x.dim() == 5 else 0
        peaks.append(data_columns - (grad_weight if mask[1] else 0) - bias)
    if mask[1]:
        bias_sums = gradient.shape[1] * size if mask[2] and not transposed and any(d != 1 for d in dilation) else 0
        peaks.append(weight_columns + volume_copy + bias_sums)
    extra = max(peaks)
    if groups == 1:
        return copies + extra
    # Each group's slices of gradient and input, then all groups' results and their concatenation.
    slices = bytes_of(gradient) // groups + input_slice if batch > 1 else 0
    results = (bytes_of(x) if mask[0] else 0) + (bytes_of(weight) if mask[1] else 0)
    return copies + max(slices + extra, results if mask[1] else bytes_of(x))
