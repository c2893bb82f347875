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

from memplan.trace.semantics.kinds import Arguments, Keywords


def _training(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``native_batch_norm`` in training: output, mean and inverse standard deviation."""
    x, weight, bias, running_mean, running_variance, training, _, _ = args
    if kwargs or not training or not _is_plain(x, weight, bias, running_mean, running_variance):
        return NotImplemented
    return x.new_empty_strided(x.shape, x.stride()), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _functional(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``_native_batch_norm_legit_functional``: as `_training`, and the new running mean and variance."""
    running_mean, running_variance = args[3:5]
    if running_mean is None or running_variance is None:
        return NotImplemented
    results = _training(args, kwargs)
    if results is NotImplemented:
        return NotImplemented
    return *results, torch.empty_like(running_mean), torch.empty_like(running_variance)


def _backward(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``native_batch_norm_backward``: gradients of input, weight and bias."""
    gradient, x, *others, _, _, (_, needs_weight, needs_bias) = args
    if kwargs or gradient.shape != x.shape or gradient.stride() != x.stride() or not _is_plain(gradient, x, *others):
        return NotImplemented
    channels = x.shape[1]
    grad_weight = x.new_empty(channels) if needs_weight else None
    grad_bias = x.new_empty(channels) if needs_bias else None
    return x.new_empty_strided(x.shape, x.stride()), grad_weight, grad_bias


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether the layout of a norm's results follows from the first tensor alone.

    All tensors are float32 or all are float64, without symbolic sizes, and the first is contiguous or unambiguously
    channels last (no dimension of size 1).
    """
    present = [tensor for tensor in tensors if tensor is not None]
    first, dtypes = present[0], {tensor.dtype for tensor in present}
    if dtypes not in ({torch.float32}, {torch.float64}):
        return False
    if not all(type(size) is int for size in (*first.shape, *first.stride())) or not first.numel():
        return False
    dims = list(range(first.dim()))
    channels_last = [0, *dims[2:], 1]
    return _is_dense_in_order(first, dims) or (min(first.shape) > 1 and _is_dense_in_order(first, channels_last))


def _is_dense_in_order(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Return whether a tensor has no gaps in memory. ``order``: its dimensions, from the outermost to the innermost."""
    sizes = [tensor.shape[dim] for dim in order]
    return all(tensor.stride(dim) == math.prod(sizes[at + 1 :]) for at, dim in enumerate(order))


AT_ONCE: Mapping[str, Callable[[Arguments, Keywords], Any]] = {
    "aten.native_batch_norm.default": _training,
    "aten._native_batch_norm_legit_functional.default": _functional,
    "aten.native_batch_norm_backward.default": _backward,
}
"""Overload name -> (args, kwargs) -> the results, or NotImplemented to let torch infer them."""
