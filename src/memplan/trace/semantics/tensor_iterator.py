"""Strides of the results whose layout TensorIterator and `empty_like` choose.

The strides of dimensions of size 1 matter, too: kernels infer the memory format from them. Of two tensors with the same
bytes in the same order, a convolution may treat one as channels last and the other not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memplan.trace.semantics.layout import is_dense

Strides = tuple[int, ...]
Sizes = Sequence[int]


def elementwise_strides(operands: Sequence[torch.Tensor], shape: Sizes, *, with_scalar: bool = False) -> Strides:
    """Return the strides of the result of an elementwise kernel.

    Source: aten/src/ATen/TensorIterator.cpp, `fast_set_up`, `compute_strides`, `allocate_or_resize_outputs`.

    Args:
        operands: in the kernel's order.
        shape: of the result, to which they are broadcast.
        with_scalar: whether the kernel has a wrapped number (a 0-dim tensor) as one more operand.
    """
    if not with_scalar and all(operand.shape == shape for operand in operands):
        if all(operand.is_contiguous() for operand in operands):
            return contiguous_strides(shape)
        if len(shape) == 4 and all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands):
            return channels_last_strides(shape)
        common_strides = operands[-1].stride()
        if all(operand.stride() == common_strides and is_dense(operand) for operand in operands):
            return common_strides
    broadcast_strides = [_expanded_strides(operand, shape) for operand in operands]
    return _dense_strides(shape, _dims_inner_to_outer(shape, broadcast_strides))


def preserved_strides(tensor: torch.Tensor) -> Strides:
    """Return the strides of ``torch.empty_like(tensor)``: those of the tensor if it is dense, else the same order
    without gaps.

    Source: aten/src/ATen/native/TensorFactories.cpp, `empty_like`; aten/src/ATen/ExpandUtils.cpp,
    `infer_dense_strides`.
    """
    if is_dense(tensor):
        return tensor.stride()
    return _dense_strides(tensor.shape, _dims_inner_to_outer(tensor.shape, [tensor.stride()]))


def contiguous_strides(shape: Sizes) -> Strides:
    """Return the strides of ``torch.empty(shape)``."""
    return _dense_strides(shape, range(len(shape) - 1, -1, -1))


def channels_last_strides(shape: Sizes) -> Strides:
    """Return the channels-last strides of a shape with four or five dimensions."""
    return _dense_strides(shape, (1, *range(len(shape) - 1, 1, -1), 0))


def _dense_strides(shape: Sizes, inner_to_outer: Sequence[int]) -> Strides:
    """Return strides without gaps for a shape. ``inner_to_outer``: its dimensions, that of the smallest stride
    first."""
    strides, step = [1] * len(shape), 1
    for dim in inner_to_outer:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _expanded_strides(operand: torch.Tensor, shape: Sizes) -> Strides:
    """Return an operand's strides after broadcasting to a shape: 0 in expanded dimensions."""
    missing = len(shape) - operand.dim()
    dims = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return (0,) * missing + tuple(0 if size == 1 and target != 1 else stride for size, stride, target in dims)


def _dims_inner_to_outer(shape: Sizes, operand_strides: Sequence[Strides]) -> list[int]:
    """Sort the dimensions of a shape from the innermost to the outermost, by the strides of each operand.

    This is the insertion sort of `TensorIteratorBase::reorder_dimensions`; other sorts differ where two dimensions do
    not compare.
    """
    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        position = start
        for before in range(start - 1, -1, -1):
            comparison = _compare_dims(order[before], order[position], shape, operand_strides)
            if comparison > 0:
                order[before], order[position] = order[position], order[before]
                position = before
            elif comparison < 0:
                break
    return order


def _compare_dims(first: int, second: int, shape: Sizes, operand_strides: Sequence[Strides]) -> int:
    """Return -1 if the first of two dimensions is inner, 1 if the second is, 0 if their strides do not compare."""
    for strides in operand_strides:
        first_stride, second_stride = strides[first], strides[second]
        if first_stride == 0 or second_stride == 0:
            continue
        if first_stride != second_stride:
            return -1 if first_stride < second_stride else 1
        if shape[first] > shape[second]:
            return 1
    return 0
