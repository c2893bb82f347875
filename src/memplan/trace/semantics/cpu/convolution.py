"""Temporaries of ``aten.convolution`` and its backward.

With oneDNN, ATen/native/mkldnn/Conv.cpp requests the preferred layout ("any"), reorders input and weight into it,
computes, and reorders the result back; `onednn` computes these buffers. Without oneDNN see `im2col_convolution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu import im2col_convolution, onednn
from memplan.trace.semantics.cpu.onednn import Shape, Work
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes, has_amx, simd, suggests_channels_last


def _channels_last_bytes(shape: Shape, scratch: int = 0) -> int:
    """Return the temporary bytes of a convolution of channels-last tensors: the reordered weight and the scratchpad.

    oneDNN reads and writes the other tensors in place. ``scratch``: bytes of the scratchpad.
    """
    return (shape.weight_bytes(1, simd()) if shape.groups == 1 or shape.depthwise else shape.weight_bytes()) + scratch


def _shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Shape:
    """Return the `Shape` of a convolution. ``y``: the shape of its output, also if it is transposed."""
    inputs, outputs = (tuple(y), tuple(x.shape)) if transposed else (tuple(x.shape), tuple(y))
    kernel = tuple(weight.shape[2:])
    height = (1,) if len(kernel) == 1 else ()  # a 1-d convolution is computed in 2-d (view1d_as_2d)
    dims = len(height) + len(kernel)
    return Shape(
        x.shape[0], inputs[1], outputs[1],
        input_space=height + inputs[2:], output_space=height + outputs[2:], kernel=height + kernel, groups=groups,
        stride=(*(1,) * (dims - len(stride)), *stride),
        padding=(*(0,) * (dims - len(padding)), *padding),
        dilated=max(dilation) > 1 and prod(kernel) > 1,
        itemsize=x.element_size(), tiled=x.dtype is torch.bfloat16 and has_amx(),
    )  # fmt: skip


def _peak_with_reorder(work: Work, result: int, before: int = 0) -> int:
    """Return the peak bytes of a oneDNN call whose result is then reordered to a plain tensor (``mkldnn_to_dense``).

    Args:
        work: the call's buffers.
        result: bytes of the plain tensor.
        before: bytes of a further temporary while the call runs.
    """
    running = work.source + work.other + work.weight + work.result + work.scratch + before
    return max(running, work.result + result * (2 if work.channels_last else 1))


def resized_transposed_result(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Return the result of a 3-d transposed convolution without oneDNN, in a storage of the input's size: the kernel
    allocates the result in that size, then resizes it, which frees nothing.

    Source: aten/src/ATen/native/NaiveConvolutionTranspose3d.cpp, `slow_conv_transpose3d_cpu`.
    """
    x, weight, _, stride, _, dilation, transposed, outpad, groups = args[:9]
    if not transposed or groups > 1 or x.dim() != 5 or x.numel() <= result.numel():
        return result
    if uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return result
    return result.new_empty(x.numel()).as_strided(result.shape, result.stride())


def transient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the bytes that ``aten.convolution.default`` allocates at its peak beyond the result."""
    x, weight, bias, stride, padding, dilation, transposed, outpad, groups = args[:9]
    if not x.numel():  # torch's backend for empty inputs only allocates the result
        return 0
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        has_bias = bias is not None
        return im2col_convolution.forward(x, weight, result, has_bias, groups, transposed, stride, padding, dilation)
    channels_last = _works_channels_last(x, weight)
    copies = copy_bytes(x, channels_last and x.dim() > 3) + copy_bytes(weight, channels_last)
    shape = _shape(x, weight, result.shape, stride, padding, dilation, transposed, groups)
    work = onednn.data_gradient(shape) if transposed else onednn.forward(shape)
    if channels_last:
        return copies + _channels_last_bytes(shape, work.scratch)
    float32_result = 0
    if transposed and bias is not None and not work.channels_last:  # the bias is added after the product, in float32
        float32_result = work.result // shape.itemsize * 4
    return copies + _peak_with_reorder(work, bytes_of(result), float32_result) - bytes_of(result)


def transient_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the bytes that ``aten.convolution_backward.default`` allocates at its peak beyond the results."""
    gradient, x, weight, _, stride, padding, dilation, transposed, outpad, groups, mask = args[:11]
    if not x.numel():
        return 0
    if not uses_onednn(x, weight, stride, dilation, transposed, outpad, groups):
        return im2col_convolution.backward(gradient, x, weight, mask, groups, transposed, stride, padding, dilation)
    needs_input, needs_weight, needs_bias = mask
    channels_last = _works_channels_last(x, weight)
    copies = sum(copy_bytes(t, channels_last) for t in (gradient, x, weight))
    shape = _shape(x, weight, gradient.shape, stride, padding, dilation, transposed, groups)
    grad_input = bytes_of(x) if needs_input else 0
    grad_weight = bytes_of(weight)  # computed for the bias, too
    grad_bias = gradient.shape[1] * shape.itemsize if needs_bias else 0
    peaks = [0]
    if needs_input:
        work = onednn.forward(shape) if transposed else onednn.data_gradient(shape)
        if channels_last:
            peaks.append(_channels_last_bytes(shape, work.scratch) + grad_input)
        else:
            peaks.append(_peak_with_reorder(work, grad_input))
    if needs_weight or needs_bias:
        work = onednn.channels_last_weight_gradient(shape) if channels_last else onednn.weight_gradient(shape)
        peaks.append(grad_input + work.source + work.other + work.weight + work.scratch + grad_bias)
        peaks.append(grad_input + work.weight + grad_weight * (2 if channels_last else 1) + 2 * grad_bias)
    results = grad_input + (grad_weight if needs_weight else 0) + grad_bias
    return copies + max(0, max(peaks) - results)


def _works_channels_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether oneDNN computes in channels last: ``mkldnn_conv_use_channels_last`` (ConvUtils.h). A 1-d
    convolution makes its input contiguous first."""
    return x.dim() > 3 and (suggests_channels_last(x) or suggests_channels_last(weight))


def uses_onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    outpad: Sequence[int],
    groups: int,
) -> bool:
    """Return whether oneDNN runs a convolution: ``ConvParams::use_mkldnn`` (ATen/native/Convolution.cpp)."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if transposed and any(p >= shape for p, shape in zip(outpad, stride, strict=True)):
        return False
    if not _torch.onednn_computes_in(x.dtype):
        return False
    if x.dtype is not torch.float32:
        return True
    # the limits below are those of use_mkldnn
    kernel = weight.shape[-2:] if weight.dim() > 3 else (1, weight.shape[-1])
    batch, per_image = x.shape[0], prod(x.shape[1:4])
    strided_or_dilated = any(v > 1 for v in stride) or any(v > 1 for v in dilation)
    worthwhile = strided_or_dilated or batch >= 16 or any(k != 1 for k in kernel) or torch.get_num_threads() > 1
    return worthwhile and (groups > 1 or min(kernel) > 3 or batch > 1 or batch * per_image > 20480)
