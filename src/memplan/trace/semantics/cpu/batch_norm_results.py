"""Fake-tensor results of batch norms, without torch's decomposition.

torch runs the decomposition of some thirty ops to infer the results, which is a third of the time to trace a network of
many norms. Source: torch/_decomp/decompositions.py (`native_batch_norm_helper`, `native_batch_norm_backward`), which
still runs where more than one dtype or layout meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def _training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of ``native_batch_norm`` in training: output, mean and inverse standard deviation."""
    x, *others, training, _, _ = args
    if kwargs or not training or not _is_plain(x, *others):
        return NotImplemented
    return x.new_empty_strided(x.shape, x.stride()), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of ``_native_batch_norm_legit_functional``: as `_training`, and the new running mean and variance."""
    running = args[3:5]
    results = NotImplemented if any(statistic is None for statistic in running) else _training(args, kwargs)
    return results if results is NotImplemented else (*results, *map(torch.empty_like, running))


def _backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of ``native_batch_norm_backward``: gradients of input, weight and bias."""
    gradient, x, *others, _, _, mask = args
    if kwargs or gradient.shape != x.shape or gradient.stride() != x.stride() or not _is_plain(gradient, x, *others):
        return NotImplemented
    parameters = (x.new_empty(x.shape[1]) if needed else None for needed in mask[1:])
    return x.new_empty_strided(x.shape, x.stride()), *parameters


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether the results simply follow the first tensor: all are float32 or all float64, without symbolic
    sizes, and the first is contiguous or unambiguously channels last (no dimension of size 1)."""
    present = [tensor for tensor in tensors if tensor is not None]
    first, dtypes = present[0], {tensor.dtype for tensor in present}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return False
    if not all(type(size) is int for size in (*first.shape, *first.stride())) or not first.numel():
        return False
    in_order = list(range(first.dim()))
    return _is_dense_in_order(first, in_order) or (
        min(first.shape) > 1 and _is_dense_in_order(first, [0, *in_order[2:], 1])
    )


def _is_dense_in_order(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Return whether the dimensions, from the outermost to the innermost, lie in memory without gaps."""
    sizes = [tensor.shape[dim] for dim in order]
    return all(tensor.stride(dim) == math.prod(sizes[at + 1 :]) for at, dim in enumerate(order))


AT_ONCE: Mapping[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "aten.native_batch_norm.default": _training,
    "aten._native_batch_norm_legit_functional.default": _functional,
    "aten.native_batch_norm_backward.default": _backward,
}
"""Overload name -> (args, kwargs) -> the results, or NotImplemented to let torch infer them."""
