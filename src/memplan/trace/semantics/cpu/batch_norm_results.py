"""What batch norms make of fake tensors, said at once.

Without data torch takes such an op apart into some thirty others to find out what it makes, which is a third of the
time that tracing a net of many norms takes. Source: torch/_decomp/decompositions.py (`native_batch_norm_helper`,
`native_batch_norm_backward`), which stands wherever more than one dtype or layout meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def _training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``native_batch_norm``: result, mean, and deviation."""
    x, *others, training, _, _ = args
    if kwargs or not training or not _is_plain(x, *others):
        return NotImplemented
    return x.new_empty_strided(x.shape, x.stride()), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_native_batch_norm_legit_functional``: the same, and both running statistics."""
    made = NotImplemented if any(one is None for one in args[3:5]) else _training(args, kwargs)
    return made if made is NotImplemented else (*made, *(torch.empty_like(one) for one in args[3:5]))


def _backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``native_batch_norm_backward``: the gradients of the input, the weight and the bias."""
    gradient, x, *others, _, _, mask = args
    if kwargs or gradient.shape != x.shape or gradient.stride() != x.stride() or not _is_plain(gradient, x, *others):
        return NotImplemented
    parameters = (x.new_empty(x.shape[1]) if wanted else None for wanted in mask[1:])
    return x.new_empty_strided(x.shape, x.stride()), *parameters


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether all are of one dtype that nothing is computed wider for, and the first is laid out in one of the
    usual ways (of which dimensions of size 1 leave open which it is), without a size that is a symbol."""
    there = [one for one in tensors if one is not None]
    first, dtypes = there[0], {one.dtype for one in there}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return False
    if not all(type(size) is int for size in (*first.shape, *first.stride())) or not first.numel():
        return False
    in_order = list(range(first.dim()))
    return _follow(first, in_order) or (min(first.shape) > 1 and _follow(first, [0, *in_order[2:], 1]))


def _follow(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Return whether the dimensions follow one another in memory so, without gaps."""
    sizes = [tensor.shape[dim] for dim in order]
    return all(tensor.stride(dim) == math.prod(sizes[at + 1 :]) for at, dim in enumerate(order))


AT_ONCE: Mapping[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "aten.native_batch_norm.default": _training,
    "aten._native_batch_norm_legit_functional.default": _functional,
    "aten.native_batch_norm_backward.default": _backward,
}
"""Overload name -> (args, kwargs) -> the results; NotImplemented where only torch knows."""
