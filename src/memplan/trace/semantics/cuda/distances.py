"""Temporaries of distances and bilinear forms on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, Formula
from memplan.trace.semantics.cuda.reductions import staging_buffer
from memplan.trace.semantics.kinds import Arguments, Keywords, Temporary
from memplan.trace.semantics.layout import bytes_of


def _buffer_and_sum(like: torch.Tensor, shape: tuple[int, ...], dim: int, arch: Arch) -> AllocationBytes:
    """Bytes of a buffer of this shape, with the dtype of ``like``, that is summed over ``dim``, and of the staging
    buffer of that sum."""
    buffer = like.new_empty(shape)
    if not buffer.numel():
        return ()
    return bytes_of(buffer), *staging_buffer(buffer, [dim], max(4, buffer.element_size()), arch)


def pdist_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (DistanceKernel.cu, pdist_backward_kernel_impl): the gradient contribution of every point to every
    other.

    The gradient of the 0-norm is zero: no buffer.
    """
    x, p = args[1:3]
    points, width = x.shape
    return _buffer_and_sum(x, (points - 1, points, width), dim=0, arch=arch) if p else ()


def cdist_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (DistanceKernel.cu, cdist_backward_kernel_impl): the contribution of every point of the second
    operand to the gradient of every point of the first.

    The gradient of the 0-norm is zero: no buffer.
    """
    x, y, p = args[1:4]
    if not p:
        return ()
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    leading = (batch.numel(),) if batch else ()
    return _buffer_and_sum(x, (*leading, y.shape[-2], x.shape[-2], x.shape[-1]), len(leading), arch)


def euclidean_dist(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> tuple[Temporary, ...]:
    """Temporaries (Distance.cpp, _euclidean_dist): copies of both operands with two more columns.

    One matrix product of the copies yields the squared distances. So they are allocated before the result.
    """
    sizes = [x.numel() // x.shape[-1] * (x.shape[-1] + 2) * x.element_size() for x in args[:2] if x.shape[-1]]
    return tuple(Temporary(size, first=True) for size in sizes if size)


def trilinear(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Linear.cpp, _trilinear): two intermediate products at each position of the unrolled dimension.

    The first is of the first two operands, summed where the third has size 1; the second is its product with the third.
    """
    operands, expanded_dims, summed_dims = args[:3], args[3:6], args[6]
    unrolled_dim = args[7] if len(args) > 7 else kwargs.get("unroll_dim", 1)
    if not result.numel() or not all(operand.numel() for operand in operands):
        return ()
    shapes = [_with_unit_dims(operand, dims) for operand, dims in zip(operands, expanded_dims, strict=True)]
    first, second = operands[0].element_size(), operands[0].element_size()
    for dim, (left, middle, right) in enumerate(zip(*shapes, strict=True)):
        if dim != unrolled_dim and (dim not in summed_dims or right != 1):
            first *= max(left, middle)
        if dim != unrolled_dim and dim not in summed_dims:
            second *= max(left, middle, right)
    return first, second


def _with_unit_dims(x: torch.Tensor, dims: list[int]) -> list[int]:
    """Return the sizes of ``x`` with a dimension of size 1 inserted at each of ``dims``."""
    sizes = list(x.shape)
    for dim in dims:
        sizes.insert(dim, 1)
    return sizes


FORMULAS: dict[str, Formula] = {
    "aten._pdist_backward.default": pdist_backward,
    "aten._cdist_backward.default": cdist_backward,
    "aten._euclidean_dist.default": euclidean_dist,
    "aten._trilinear.default": trilinear,
}
"""Overload name -> bytes of the allocations that are live at the kernel's peak."""
