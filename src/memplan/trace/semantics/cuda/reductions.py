"""What a reduction on CUDA stages where it splits one result over several blocks: Reduce.cuh, set up per launch.

Large where the reduced dimension is not the fastest one (a bias's gradient, a loss over turned logits): the buffer has
a slot for every thread of a block and every element of its vector although each result needs only one, so it can
exceed the operand itself: 329,252,864 bytes for the maximum over 10,000 of 1024 x 10,000 floats (39 MiB) on an H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch

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
    """A dimension of the loop, strides in elements; ``result`` is 0 where it is reduced."""

    size: int
    result: int
    operand: int


def staging(x: torch.Tensor, dims: Sequence[int], accumulator: int, arch: Arch) -> tuple[int, ...]:
    """Return the bytes of the buffer and of the semaphores that reducing ``x`` over ``dims`` takes; () where no block
    shares.

    ``accumulator``: bytes of what is carried along for one result.
    """
    loop = _loop(x, dims)
    results = prod(d.size for d in loop if d.result or not d.size)
    if not x.numel() or x.numel() == results:
        return ()
    inputs = x.numel() // results
    reduced = sum(not d.result for d in loop)
    along = reduced == len(loop) or loop[0].operand < loop[reduced].operand
    width, height = (inputs, results) if along else (results, inputs)
    vector = 1
    if (loop[0] if along else loop[reduced]).operand == 1:
        if along and width >= 128 and reduced == 1:
            width //= _VECTOR
        elif not along:
            vector = _vector(x, loop, reduced)
            width //= vector
    across, down = _block(width, height, _THREADS // vector)
    step_in, step_out = (across, 1) if along else (1, across)
    if -(-inputs // step_in) < min(down * 16, _MOST_VALUES):
        return ()  # every warp has a result of its own
    step_in *= down
    values = -(-inputs // step_in)
    grid = -(-(results // vector) // step_out)
    target = arch.multiprocessors * (arch.threads // (across * down))
    if values < _MOST_VALUES or grid > target:
        return ()
    blocks = _clamped(-(-target // grid), -(-values // _MOST_VALUES), -(-values // _LEAST_VALUES))
    if blocks <= 1:
        return ()
    slots = 1 if along else across * vector
    return accumulator * results * blocks * slots, _SEMAPHORE * grid


def _clamped(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


def _power(n: int) -> int:
    """Return the largest power of two up to ``n``."""
    return 1 << (max(1, n).bit_length() - 1)


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    wide, high = (min(_power(n), threads) for n in (width, height))
    down = min(high, threads // min(wide, _WARP))
    return min(wide, threads // down), down


def _vector(x: torch.Tensor, loop: Sequence[_Dim], first: int) -> int:
    """Elements that a thread loads at once: as many as divide the start, the size and every other stride."""
    found = _VECTOR
    strides = [d.operand for i, d in enumerate(loop) if i != first]
    for number in (x.storage_offset(), loop[first].size, *strides):
        while number % found:
            found //= 2
    return found


def _loop(x: torch.Tensor, dims: Sequence[int]) -> list[_Dim]:
    """Return the dimensions as TensorIterator orders them, reduced ones first and fast ones first, and merges them."""
    over = {d % max(1, x.dim()) for d in dims} if dims else set(range(x.dim()))
    step, found = 1, list[_Dim]()
    for i in reversed(range(x.dim())):
        found.append(_Dim(x.shape[i], 0 if i in over else step, x.stride(i) if x.shape[i] != 1 else 0))
        step *= 1 if i in over else x.shape[i]
    for i in range(1, len(found)):  # an insertion sort, as there: the comparison is no total order
        at = i
        for j in reversed(range(i)):
            order = _compare(found[j], found[at])
            if order > 0:
                found[j], found[at] = found[at], found[j]
                at = j
            elif order < 0:
                break
    return _merged(found)


def _compare(a: _Dim, b: _Dim) -> int:
    if (a.result == 0) != (b.result == 0):
        return 1 if b.result == 0 else -1
    for s, t in ((a.result, b.result), (a.operand, b.operand)):
        if s and t:
            if s != t:
                return 1 if s > t else -1
            if a.size > b.size:
                return 1
    return 0


def _merged(loop: list[_Dim]) -> list[_Dim]:
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


def _wide(x: torch.Tensor) -> int:
    return max(4, x.element_size())


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> list[int]:
    given = args[position] if len(args) > position else kwargs.get("dim")
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def reduction(position: int, accumulator: int | None = None) -> Any:
    """Return a formula for an op whose dimensions are the argument at ``position``; none where it is beyond all."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        x = args[0]
        return staging(x, _dims(args, kwargs, position), accumulator or _wide(x), arch)

    return formula


FORMULAS = {
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
