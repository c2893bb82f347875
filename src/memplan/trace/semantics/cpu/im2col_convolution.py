"""Temporaries of convolutions that oneDNN does not take: PyTorch's own im2col kernels.

ATen/native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp,
NaiveConvolutionTranspose2d.cpp, NaiveConvolutionTranspose3d.cpp; Convolution.cpp calls them once a group, save that of
volumes, which takes all groups at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from memplan.trace.semantics.layout import bytes_of, copied_to, space, suggests_channels_last


def _columns(channels: int, weight: torch.Tensor, positions: int, itemsize: int) -> int:
    return channels * prod(weight.shape[2:]) * positions * itemsize


def _copied(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> int:
    """Images in channels last stay so (``thnn_conv_use_channels_last`` in ATen/native/ConvUtils.h)."""
    last = x.dim() == 4 and (suggests_channels_last(x) or suggests_channels_last(weight))
    return sum(copied_to(one, last) for one in (x, weight, *others))


def _skips_columns(
    weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Return whether there is no copy: a 1x1 kernel reads its input in place."""
    steps = (*stride, *dilation)
    return prod(weight.shape[2:]) == 1 and all(s == 1 for s in steps) and not any(padding)


def _takes_groups(x: torch.Tensor, transposed: bool, dilation: Sequence[int]) -> bool:
    """Return whether one call has the columns of all groups: ConvolutionMM3d.cpp, ``slow_conv3d_forward_out_cpu``."""
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
    """Return the columns; with groups also the slices of input and output, which are put together at the end; those of
    one image are views."""
    batch, size = x.shape[0], x.element_size()
    if _takes_groups(x, transposed, dilation):
        groups = 1
    copies = _copied(x, weight)
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
    """Return the bytes of columns, which are live while the last result is computed; the results of a group are
    slices first."""
    batch, size = x.shape[0], x.element_size()
    if _takes_groups(x, transposed, dilation):
        groups = 1
    copies = _copied(x, weight, gradient)
    turned = copied_to(x, False) if x.dim() == 5 else 0  # of volumes, and for the weight's gradient alone
    copies -= turned
    data = weights = 0
    if transposed:
        data = weights = _columns(gradient.shape[1] // groups, weight, space(x.shape), size)
    else:
        image = _columns(x.shape[1] // groups, weight, space(gradient.shape), size)
        dilated = any(d != 1 for d in dilation)
        every = image if dilated else image * batch
        skips = _skips_columns(weight, stride, padding, dilation)
        weights = 0 if skips else every
        data = every if x.dim() == 5 or (dilated and not skips) else 0
    w, into = bytes_of(weight) // groups, bytes_of(x) // groups
    moments = [0]
    if mask[0]:
        bias = gradient.shape[1] * size if mask[2] and x.dim() == 5 else 0
        moments.append(data - (w if mask[1] else 0) - bias)
    if mask[1]:
        summed = gradient.shape[1] * size if mask[2] and not transposed and any(d != 1 for d in dilation) else 0
        moments.append(weights + turned + summed)
    extra = max(moments)
    if groups == 1:
        return copies + extra
    # Each group's slices of gradient and input, then all groups' results beside their concatenation.
    slices = bytes_of(gradient) // groups + into if batch > 1 else 0
    results = (bytes_of(x) if mask[0] else 0) + (bytes_of(weight) if mask[1] else 0)
    return copies + max(slices + extra, results if mask[1] else bytes_of(x))
