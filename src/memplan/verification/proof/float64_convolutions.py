"""Convolutions of a step in float64, in parts that fit the caches.

On the CPU torch unfolds the operand of a convolution in float64: it copies each window, for the whole batch at once
(aten/src/ATen/native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp). That takes longer than the product, and for a 3 x 3 x 3
kernel 27 times the operand's memory. In parts of a few rows of a sample, or of a few small samples, it takes half as
long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from memplan import _torch
from memplan.planning.ops.custom_ops import kernel_of

_PART_BYTES = 1 << 22
"""Bytes of a part's unfolded windows at most, unless a single row or the weight has more: about what the caches of a
core hold. Each part adds up a whole gradient of the weight, which takes longer than a part that is smaller."""
_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def float64_convolutions(narrow: set[torch.dtype] | None = None) -> AbstractContextManager[Any]:
    """Return a context in which convolutions in float64 on the CPU, and their derivatives, run in parts.

    So do those in the kernels of memplan's own ops, such as a segment that runs piece by piece, which differentiates.
    Results are those of the whole but for the order in which the parts of a weight's gradient are added up, in float64.
    ``narrow``: floating-point dtypes other than float64 of the ops' results are added to it.
    """
    return _torch.GuestMode(_run if narrow is None else functools.partial(_observed, narrow))


def _observed(
    narrow: set[torch.dtype], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[Any], Any]
) -> Any:
    """Run an op as `_run`, and add the dtypes of its results to ``narrow``."""
    result = _run(op, args, kwargs, call)
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
            narrow.add(tensor.dtype)
    return result


def _run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[Any], Any]) -> Any:
    """Run an op, in parts where it is such a convolution. ``call`` calls an op with these arguments."""
    if not kwargs and op is _CONVOLUTION and (parts := _parts(*args[:2], *args[3:])):
        return _convolution(parts, *args)
    if not kwargs and op is _BACKWARD and (parts := _parts(*args[1:3], *args[4:10])):
        return _backward(parts, *args)
    kernel = kernel_of(op)
    if kernel is None:
        return call(op)
    with _torch.recording_autograd(), float64_convolutions():
        return kernel(*args, **kwargs)


class _Part(NamedTuple):
    """Some rows of the result of a sample, or all of several samples: rows are the first dimension of space."""

    samples: tuple[int, int]
    """Range of samples."""
    result: tuple[int, int]
    """Range of rows of the result."""
    operand: tuple[int, int]
    """Range of rows of the operand that they read."""
    padding: tuple[int, int]
    """Rows of padding that they read before and after these."""

    def of_result(self, tensor: Tensor) -> Tensor:
        """Return this part of the result, or of its gradient, as a view."""
        return tensor[slice(*self.samples), :, slice(*self.result)]

    def of_operand(self, tensor: Tensor) -> Tensor:
        """Return the rows that this part reads, as a view without the padding."""
        return tensor[slice(*self.samples), :, slice(*self.operand)]

    def padded(self, x: Tensor) -> Tensor:
        """Return the rows of the operand with their padding."""
        rows = self.of_operand(x)
        return F.pad(rows, [0, 0] * (x.dim() - 3) + [*self.padding]) if any(self.padding) else rows


def _parts(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> list[_Part]:  # fmt: skip
    """Return the parts of a convolution; none if it has a single one, or is not to be split."""
    is_plain = x.dim() in (4, 5) and not transposed and x.is_contiguous() and weight.is_contiguous()
    options = [list(option) for option in (stride, padding, dilation)]
    if (
        not is_plain
        or x.dtype != torch.float64
        or x.device.type != "cpu"
        or any(len(o) != x.dim() - 2 for o in options)
    ):
        return []
    spans = [spacing * (kernel - 1) + 1 for kernel, spacing in zip(weight.shape[2:], options[2], strict=True)]
    sizes = [
        (size + 2 * pad - span) // step + 1
        for size, step, pad, span in zip(x.shape[2:], *options[:2], spans, strict=True)
    ]
    row_bytes = x.element_size() * math.prod(weight.shape[1:]) * math.prod(sizes[1:])
    if min(sizes) < 1 or not row_bytes:
        return []
    part_rows = max(1, max(_PART_BYTES, weight.nbytes) // row_bytes)
    rows, samples = min(sizes[0], part_rows), max(1, part_rows // sizes[0])
    geometry = x.shape[2], spans[0], options[0][0], options[1][0]
    parts = [
        _part((sample, min(sample + samples, x.shape[0])), begin, min(begin + rows, sizes[0]), *geometry)
        for sample in range(0, x.shape[0], samples)
        for begin in range(0, sizes[0], rows)
    ]
    return parts if len(parts) > 1 else []


def _part(
    samples: tuple[int, int], begin: int, end: int, size: int, span: int, stride: int, padding: int
) -> _Part:  # fmt: skip
    """Return the part of these samples with rows ``begin`` to ``end`` of the result. ``size``: rows of the operand;
    ``span``: of a window."""
    first, last = begin * stride - padding, (end - 1) * stride - padding + span  # in the padded operand
    low = min(max(first, 0), size)
    high = min(max(last, low), size)
    before = min(max(-first, 0), last - first)
    return _Part(samples, (begin, end), (low, high), (before, last - first - before - (high - low)))


def _convolution(
    parts: Sequence[_Part], x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], *options: Any,
) -> Tensor:  # fmt: skip
    """Return a convolution's result. ``options``: dilation to groups, as of ``aten::convolution``."""

    def run(part: _Part) -> Tensor:
        return _CONVOLUTION(part.padded(x), weight, bias, stride, [0, *padding[1:]], *options)

    first, rows = run(parts[0]), parts[-1].result[1]
    result = first.new_empty([x.shape[0], first.shape[1], rows, *first.shape[3:]])
    parts[0].of_result(result).copy_(first)
    del first  # before the next part takes its memory
    for part in parts[1:]:
        part.of_result(result).copy_(run(part))
    return result


def _backward(
    parts: Sequence[_Part], dy: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of operand, weight and bias, None for those that ``mask`` leaves out."""
    of_x = torch.zeros_like(x) if mask[0] else None
    of_weight = torch.zeros_like(weight) if mask[1] else None
    of_bias = dy.sum([0, *range(2, dy.dim())]) if mask[2] else None
    options = stride, [0, *padding[1:]], dilation, transposed, output_padding, groups, [*mask[:2], False]
    for part in parts if any(mask[:2]) else ():
        gradient, of_part, _ = _BACKWARD(part.of_result(dy), part.padded(x), weight, None, *options)
        if of_x is not None:
            part.of_operand(of_x).add_(gradient.narrow(2, part.padding[0], part.operand[1] - part.operand[0]))
        if of_weight is not None:
            of_weight.add_(of_part)
    return of_x, of_weight, of_bias
