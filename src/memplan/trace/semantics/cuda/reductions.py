"""The staging buffer of a CUDA reduction that splits each result over several blocks: Reduce.cuh, set up per launch.

It is large if the reduced dimension is not the fastest one (a bias gradient, a loss over transposed logits): it has
a slot for every thread of a block and every element of its vector, although each result needs only one. So it can
exceed the operand itself: 329,252,864 bytes for the maximum over 10,000 of 1024 x 10,000 floats (39 MiB) on an H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import Formula

_WARP = 32
_THREADS = 512
_VECTOR = 4
_LEAST_VALUES = 16
_MOST_VALUES = 256
_SEMAPHORE = 4
_WITH_INDEX = 16
"""Bytes of a value of at most 8 bytes next to a 64-bit index."""


@dataclass(slots=True)
class _Dim:
    """A dimension of the loop, strides in elements. ``result`` is the stride of the result: 0 if reduced."""

    size: int
    result: int
    operand: int


def staging_buffer(x: torch.Tensor, dims: Sequence[int], accumulator: int, arch: Arch) -> tuple[int, ...]:
    """Bytes of the staging buffer and of the semaphores of reducing ``x`` over ``dims``; () if no two blocks share a
    result.

    Follows Reduce.cuh, setReduceConfig: how many threads of a block reduce one result, and how many blocks.
    ``accumulator``: bytes of the accumulator of one result.
    """
    loop = _loop_dims(x, dims)
    results = prod(d.size for d in loop if d.result or not d.size)
    if not x.numel() or x.numel() == results:
        return ()
    inputs = x.numel() // results
    reduced = sum(not d.result for d in loop)
    innermost = reduced == len(loop) or loop[0].operand < loop[reduced].operand
    width, height = (inputs, results) if innermost else (results, inputs)
    vector = 1
    if (loop[0] if innermost else loop[reduced]).operand == 1:
        if innermost and width >= 128 and reduced == 1:
            width //= _VECTOR
        elif not innermost:
            vector = _vector_width(x, loop, reduced)
            width //= vector
    across, down = _block_shape(width, height, _THREADS // vector)
    step_in, step_out = (across, 1) if innermost else (1, across)
    if -(-inputs // step_in) < min(down * 16, _MOST_VALUES):
        return ()  # each warp computes its own result
    step_in *= down
    values = -(-inputs // step_in)
    grid = -(-(results // vector) // step_out)
    target = arch.multiprocessors * (arch.threads // (across * down))
    if values < _MOST_VALUES or grid > target:
        return ()
    blocks = max(-(-values // _MOST_VALUES), min(-(-target // grid), -(-values // _LEAST_VALUES)))
    if blocks <= 1:
        return ()
    slots = 1 if innermost else across * vector
    return accumulator * results * blocks * slots, _SEMAPHORE * grid


def floor_power_of_two(n: int) -> int:
    """The largest power of two up to ``n`` (1 for ``n`` below 1)."""
    return 1 << (max(1, n).bit_length() - 1)


def _block_shape(width: int, height: int, threads: int) -> tuple[int, int]:
    """Threads of a block in the fast dimension and in the other, at most ``threads`` together."""
    wide, high = (min(floor_power_of_two(n), threads) for n in (width, height))
    down = min(high, threads // min(wide, _WARP))
    return min(wide, threads // down), down


def _vector_width(x: torch.Tensor, loop: Sequence[_Dim], first: int) -> int:
    """Elements per vectorized load: the largest power of two, up to 4, that divides offset, size and other strides."""
    width = _VECTOR
    strides = [d.operand for i, d in enumerate(loop) if i != first]
    for number in (x.storage_offset(), loop[first].size, *strides):
        while number % width:
            width //= 2
    return width


def _loop_dims(x: torch.Tensor, dims: Sequence[int]) -> list[_Dim]:
    """The dimensions as TensorIterator orders and merges them: reduced ones first, then by stride."""
    reduced = {d % max(1, x.dim()) for d in dims} if dims else set(range(x.dim()))
    stride, loop = 1, list[_Dim]()
    for i in reversed(range(x.dim())):
        loop.append(_Dim(x.shape[i], 0 if i in reduced else stride, x.stride(i) if x.shape[i] != 1 else 0))
        stride *= 1 if i in reduced else x.shape[i]
    for i in range(1, len(loop)):  # an insertion sort like TensorIterator's: the comparison is no total order
        at = i
        for j in reversed(range(i)):
            order = _compare_dims(loop[j], loop[at])
            if order > 0:
                loop[j], loop[at] = loop[at], loop[j]
                at = j
            elif order < 0:
                break
    return _merge_dims(loop)


def _compare_dims(a: _Dim, b: _Dim) -> int:
    """Compare like TensorIterator: 1 if ``b`` has to come before ``a`` in the loop, -1 if after, 0 if undecided.

    Reduced dimensions come first, then smaller strides (of the result, else of the operand); with equal strides the
    smaller size. Strides of 0 are not compared.
    """
    if (a.result == 0) != (b.result == 0):
        return 1 if b.result == 0 else -1
    for s, t in ((a.result, b.result), (a.operand, b.operand)):
        if s and t:
            if s != t:
                return 1 if s > t else -1
            if a.size > b.size:
                return 1
    return 0


def _merge_dims(loop: list[_Dim]) -> list[_Dim]:
    """Merge adjacent dimensions that one stride steps through, as TensorIterator does."""
    merged = loop[:1]
    for d in loop[1:]:
        last = merged[-1]
        fits = last.size * last.result == d.result and last.size * last.operand == d.operand
        if not (last.size == 1 or d.size == 1 or fits):
            merged.append(d)
            continue
        if last.size == 1:
            last.result, last.operand = d.result, d.operand
        last.size *= d.size
    return merged


def reduction(position: int, accumulator: int | None = None) -> Formula:
    """Formula for an op whose dimensions are argument ``position``; without that argument it reduces all of them."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        x = args[0]
        dim = args[position] if len(args) > position else kwargs.get("dim")
        dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
        return staging_buffer(x, dims, accumulator or max(4, x.element_size()), arch)

    return formula


FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}": reduction(1) for name in ("sum.dim_IntList", "mean.dim", "prod.dim_int", "nansum.default")},
    **{f"aten.{name}.default": reduction(99) for name in ("sum", "mean", "prod")},
    "aten.linalg_vector_norm.default": reduction(2),
    **{f"aten.{name}.default": reduction(1) for name in ("amax", "amin")},
    **{f"aten.{name}.dim": reduction(1, _WITH_INDEX) for name in ("max", "min")},
    **{f"aten.{name}.default": reduction(1, _WITH_INDEX) for name in ("argmax", "argmin")},
    "aten.var.correction": reduction(1, 16),
    "aten.var_mean.correction": reduction(1, 16),
    "aten.std.correction": reduction(1, 16),
}
