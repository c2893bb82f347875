"""Strides that torch's kernels give a result whose layout they choose.

Dimensions of size 1 have strides, too, and kernels look at them to tell which layout is meant: of two tensors with the
same bytes in the same order, a convolution may take one for channels last and the other not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memplan.trace.semantics.layout import is_dense

Strides = tuple[int, ...]
Sizes = Sequence[int]


def elementwise_strides(operands: Sequence[torch.Tensor], shape: Sizes, *, beside_number: bool = False) -> Strides:
    """Return the strides of the result of an elementwise kernel.

    Source: aten/src/ATen/TensorIterator.cpp, `fast_set_up`, `compute_strides`, `allocate_or_resize_outputs`.

    Args:
        operands: in the kernel's order.
        shape: of the result, to which they are broadcast.
        beside_number: whether the kernel takes a number as one more operand, a tensor without dimensions.
    """
    if not beside_number and all(operand.shape == shape for operand in operands):
        if all(operand.is_contiguous() for operand in operands):
            return contiguous_strides(shape)
        if len(shape) == 4 and all(one.is_contiguous(memory_format=torch.channels_last) for one in operands):
            return channels_last_strides(shape)
        strides = operands[-1].stride()
        if all(one.stride() == strides and is_dense(one) for one in operands):
            return strides
    return _without_gaps(shape, _inner_to_outer(shape, [_broadcast(operand, shape) for operand in operands]))


def preserved_strides(tensor: torch.Tensor) -> Strides:
    """Return the strides of ``torch.empty_like(tensor)``: its own, if it is dense.

    Source: aten/src/ATen/native/TensorFactories.cpp, `empty_like`; aten/src/ATen/ExpandUtils.cpp,
    `infer_dense_strides`.
    """
    if is_dense(tensor):
        return tensor.stride()
    return _without_gaps(tensor.shape, _inner_to_outer(tensor.shape, [tensor.stride()]))


def contiguous_strides(shape: Sizes) -> Strides:
    """Return the strides of ``torch.empty(shape)``."""
    return _without_gaps(shape, range(len(shape) - 1, -1, -1))


def channels_last_strides(shape: Sizes) -> Strides:
    """Return the strides in channels last, of four or five dimensions."""
    return _without_gaps(shape, (1, *range(len(shape) - 1, 1, -1), 0))


def _without_gaps(shape: Sizes, inner_to_outer: Sequence[int]) -> Strides:
    strides, step = [1] * len(shape), 1
    for dim in inner_to_outer:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _broadcast(operand: torch.Tensor, shape: Sizes) -> Strides:
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return (0,) * missing + tuple(0 if size == 1 and wanted != 1 else stride for size, stride, wanted in own)


def _inner_to_outer(shape: Sizes, operands: Sequence[Strides]) -> list[int]:
    """Sort dimensions as `TensorIteratorBase::reorder_dimensions` does: by insertion, since not all compare."""
    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        at = start
        for before in range(start - 1, -1, -1):
            comparison = _compare(order[before], order[at], shape, operands)
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    return order


def _compare(first: int, second: int, shape: Sizes, operands: Sequence[Strides]) -> int:
    """Return -1 if the first of two dimensions is the inner one, 1 if the second is, 0 if no operand says."""
    for strides in operands:
        one, other = strides[first], strides[second]
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if shape[first] > shape[second]:
            return 1
    return 0
