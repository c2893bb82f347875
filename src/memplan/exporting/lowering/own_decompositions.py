"""Decompositions of ops for which torch has none, or one into ops without kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.op_schema import overload


def _var(x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """``aten.var``; degrees of freedom below 0 count as 0."""
    dims = [d % x.dim() for d in dim] if dim else list(range(x.dim()))
    degrees_of_freedom = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    difference = x - x.mean(dims, keepdim=True)
    return (difference * difference).sum(dims, keepdim=keepdim) / max(degrees_of_freedom, 0)


def _std(x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """``aten.logsumexp``, relative to the largest element, so that no exponential overflows."""
    largest = x.amax(dim, keepdim=True)
    largest = torch.where(largest.abs() == torch.inf, 0.0, largest)  # inf - inf would be NaN
    total = (x - largest).exp().sum(dim, keepdim=True).log() + largest
    return total if keepdim else total.squeeze([d % x.dim() for d in dim])


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """``aten.roll`` by joining two slices of each dimension; without dimensions, of all elements in a row."""
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        first = -shift % x.shape[dim]  # index of the element that comes to index 0
        x = torch.cat([x.narrow(dim, first, x.shape[dim] - first), x.narrow(dim, 0, first)], dim) if first else x
    return x.clone()  # never the operand itself


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten.copy``: what ``x.copy_(source)`` makes of x."""
    return source.expand(x.shape).to(x.dtype).clone()


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """``aten.slice_scatter`` of a contiguous slice: the source between the parts of x before and behind it."""
    if step != 1:
        return NotImplemented
    size = x.shape[dim]
    first, stop, _ = slice(start, end).indices(size)
    stop = max(first, stop)  # an end before the start is an empty slice
    parts = [x.narrow(dim, 0, first), source, x.narrow(dim, stop, size - stop)]
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def _mv(a: Tensor, v: Tensor) -> Tensor:
    return torch.mm(a, v.unsqueeze(1)).squeeze(1)


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand_a: Sequence[int], expand_b: Sequence[int], expand_c: Sequence[int],
    summed: Sequence[int], unroll: int = 1,
) -> Tensor:  # fmt: skip
    """Insert dimensions of size 1 into each operand, and return their product, summed over the dimensions `summed`."""
    for dim in expand_a:
        a = a.unsqueeze(dim)
    for dim in expand_b:
        b = b.unsqueeze(dim)
    for dim in expand_c:
        c = c.unsqueeze(dim)
    return (a * b * c).sum(list(summed)) if summed else a * b * c


def _weight_norm_backward(g: Tensor, v: Tensor, scale: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and of scale for w = scale * v / norms, given w's (Salimans, Kingma, 2016, eq. 3)."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    scale_gradient = (g * v).sum(others, keepdim=True) / norms
    return scale / norms * (g - v * (scale_gradient / norms)), scale_gradient


def _cumsum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``aten.cumsum`` as a chain of additions."""
    x = x if dtype is None else x.to(dtype)
    sums = [x.narrow(dim, 0, 1)]
    for k in range(1, x.shape[dim]):
        sums.append(sums[-1] + x.narrow(dim, k, 1))
    return torch.cat(sums, dim)


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """``aten.repeat``; more repeats than dimensions of x repeat it along new ones before them."""
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    # a dimension of size 1 before each dimension is expanded to the number of repeats, and both are then merged
    pairs = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    expanded = x.reshape([size for length in shape for size in (1, length)]).expand(pairs)
    return expanded.clone(memory_format=torch.contiguous_format).view(
        [r * s for r, s in zip(repeats, shape, strict=True)]
    )


def own_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return by op a function that computes it, from the op's own arguments, by other ops. A function may return
    NotImplemented for arguments that it does not cover."""
    functions: dict[str, Callable[..., Any]] = {
        "var.correction": _var, "std.correction": _std, "logsumexp.default": _logsumexp, "roll.default": _roll,
        "copy.default": _copy, "slice_scatter.default": _slice_scatter, "mv.default": _mv,
        "_trilinear.default": _trilinear, "_weight_norm_interface_backward.default": _weight_norm_backward,
        "cumsum.default": _cumsum, "repeat.default": _repeat,
    }  # fmt: skip
    return {overload(f"aten.{name}"): function for name, function in functions.items()}
