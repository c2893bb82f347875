"""Temporaries of convolutions that oneDNN does not run: PyTorch's own im2col kernels.

ATen/native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp, NaiveConvolutionTranspose2d.cpp,
NaiveConvolutionTranspose3d.cpp. Convolution.cpp calls them once per group, except the 3-d kernel, which handles all
groups in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from memplan.trace.semantics.layout import bytes_of, copy_bytes, space, suggests_channels_last


def _columns(channels: int, weight: torch.Tensor, positions: int, itemsize: int) -> int:
    return channels * prod(weight.shape[2:]) * positions * itemsize


def _contiguous_copies(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> int:
    """Return the bytes of the copies of tensors that are not in the memory format that input and weight determine
    (``thnn_conv_use_channels_last``, ConvUtils.h)."""
    channels_last = x.dim() == 4 and (suggests_channels_last(x) or suggests_channels_last(weight))
    return sum(copy_bytes(t, channels_last) for t in (x, weight, *others))


def _skips_columns(
    weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Return whether a 1x1 kernel reads its input in place, without im2col."""
    return prod(weight.shape[2:]) == 1 and max(*stride, *dilation) == 1 and not any(padding)


def _handles_groups(x: torch.Tensor, transposed: bool, dilation: Sequence[int]) -> bool:
    """Return whether a single call computes all groups: ConvolutionMM3d.cpp, ``slow_conv3d_forward_out_cpu``."""
    return x.dim() == 5 and not transposed and max(dilation) == 1


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    has_bias: bool,
    groups: int,
    transposed: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> int:
    """Return the temporary bytes of a forward: the columns, and with groups the slices of input and output, which are
    concatenated at the end; the slices of a single image are views."""
    batch, itemsize = x.shape[0], x.element_size()
    if _handles_groups(x, transposed, dilation):
        groups = 1
    copies = _contiguous_copies(x, weight)
    if transposed:
        columns = _columns(y.shape[1] // groups, weight, space(x.shape), itemsize)
        if x.dim() < 5:  # of all images at once
            columns *= batch
        elif has_bias:
            columns += space(y.shape) * itemsize  # a tensor of ones, multiplied by the bias
    elif _skips_columns(weight, stride, padding, dilation):
        columns = 0
    else:
        columns = _columns(x.shape[1] // groups, weight, space(y.shape), itemsize)
        if max(dilation) == 1:  # of all images at once
            columns *= batch
    if groups == 1:
        return copies + columns
    input_slice = bytes_of(x) // groups if batch > 1 else 0
    return copies + max(input_slice + columns, bytes_of(y))


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
    groups, each result is first computed in slices.

    ``mask``: which gradients are computed, of input, weight and bias.
    """
    needs_input, needs_weight, needs_bias = mask
    batch, itemsize = x.shape[0], x.element_size()
    if _handles_groups(x, transposed, dilation):
        groups = 1
    copies = _contiguous_copies(x, weight, gradient)
    volume_copy = copy_bytes(x) if x.dim() == 5 else 0  # 3-d only, and only for the weight's gradient
    copies -= volume_copy
    dilated = max(dilation) > 1
    if transposed:
        data_columns = weight_columns = _columns(gradient.shape[1] // groups, weight, space(x.shape), itemsize)
    else:
        columns = _columns(x.shape[1] // groups, weight, space(gradient.shape), itemsize)
        if not dilated:  # of all images at once
            columns *= batch
        skips = _skips_columns(weight, stride, padding, dilation)
        weight_columns = 0 if skips else columns
        data_columns = columns if x.dim() == 5 or (dilated and not skips) else 0
    grad_weight = bytes_of(weight) if needs_weight else 0
    grad_bias = gradient.shape[1] * itemsize if needs_bias else 0
    peaks = [0]
    if needs_input:
        allocated_later = grad_weight // groups + (grad_bias if x.dim() == 5 else 0)
        peaks.append(data_columns - allocated_later)
    if needs_weight:
        peaks.append(weight_columns + volume_copy + (grad_bias if dilated and not transposed else 0))
    if groups == 1:
        return copies + max(peaks)
    # Each group's slices of gradient and input, then all groups' results and their concatenation.
    slices = bytes_of(gradient) // groups + bytes_of(x) // groups if batch > 1 else 0
    results = grad_weight + (bytes_of(x) if needs_input else 0)
    return copies + max(slices + max(peaks), results if needs_weight else bytes_of(x))
