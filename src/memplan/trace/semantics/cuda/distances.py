"""Temporaries of distances and bilinear forms on CUDA."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import Formula
from memplan.trace.semantics.cuda.reductions import staging_buffer
from memplan.trace.semantics.kinds import Temporary


def _buffer_and_sum(like: torch.Tensor, shape: tuple[int, ...], dim: int, arch: Arch) -> tuple[int, ...]:
    """Bytes of a buffer that is summed over a dimension, and of the staging of that sum."""
    buffer = like.new_empty(shape)
    size = buffer.numel() * buffer.element_size()
    return (size, *staging_buffer(buffer, [dim], max(4, buffer.element_size()), arch)) if size else ()


def pdist_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (DistanceKernel.cu, pdist_backward_kernel_impl): the gradient contribution of every point to every
    other.

    The gradient of the 0-norm is zero: no buffer.
    """
    if not args[2]:
        return ()
    points, width = args[1].shape
    return _buffer_and_sum(args[1], (points - 1, points, width), 0, arch)


def cdist_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (DistanceKernel.cu, cdist_backward_kernel_impl): like `pdist_backward`, for the gradient of the first
    operand."""
    if not args[3]:
        return ()
    x, y = args[1:3]
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    batched = (batch.numel(),) if batch else ()
    return _buffer_and_sum(x, (*batched, y.shape[-2], x.shape[-2], x.shape[-1]), len(batched), arch)


def euclidean_dist(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[Temporary, ...]:
    """Temporaries (Distance.cpp, _euclidean_dist): copies of both operands with two more columns.

    One matrix product of the copies yields the squared distances. So they are allocated before the result.
    """
    sizes = [x.numel() // x.shape[-1] * (x.shape[-1] + 2) * x.element_size() for x in args[:2] if x.shape[-1]]
    return tuple(Temporary(size, first=True) for size in sizes if size)


def trilinear(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (Linear.cpp, _trilinear): two intermediate products at each position of the unrolled dimension.

    The first is of the first two operands, summed where the third has size 1; the second is its product with the third.
    """
    operands, summed = [_with_unit_dims(x, dims) for x, dims in zip(args[:3], args[3:6], strict=True)], args[6]
    unrolled: int = [*args[7:8], kwargs.get("unroll_dim", 1)][0]
    first, second = list[int](), list[int]()
    for at, sizes in enumerate(zip(*operands, strict=True)):
        size = 1 if at == unrolled else max(sizes[:2])
        first.append(1 if at in summed and sizes[2] == 1 else size)
        second.append(1 if at in summed or at == unrolled else max(sizes))
    itemsize = args[0].element_size()
    nonempty = result.numel() and all(x.numel() for x in args[:3])
    return (prod(first) * itemsize, prod(second) * itemsize) if nonempty else ()


def _with_unit_dims(x: torch.Tensor, dims: list[int]) -> list[int]:
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
