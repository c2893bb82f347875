"""The staging buffer of a CUDA reduction that splits each result over several blocks: Reduce.cuh, set up per launch.

It is large if the reduced dimension is not the fastest one (a bias gradient, a loss over transposed logits): it has
a slot for every thread of a block and every element of its vector, although each result needs only one. So it can
exceed the operand itself: 329,252,864 bytes for the maximum over 10,000 of 1024 x 10,000 floats (39 MiB) on an H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, Formula
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import ceil_div

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
    """A dimension of the loop, strides in elements. ``result_stride`` is 0 if the dimension is reduced."""

    size: int
    result_stride: int
    operand_stride: int


def staging_buffer(x: torch.Tensor, dims: Sequence[int], accumulator: int, arch: Arch) -> AllocationBytes:
    """Bytes of the staging buffer and of the semaphores of reducing ``x`` over ``dims`` (none: over all).

    () if no two blocks share a result. Follows Reduce.cuh, setReduceConfig, with its limits: how many threads of a
    block reduce one result, and how many blocks. ``accumulator``: bytes of the accumulator of a result.
    """
    loop = _loop_dims(x, dims)
    results = prod(dim.size for dim in loop if dim.result_stride or not dim.size)
    if not x.numel() or x.numel() == results:
        return ()
    inputs = x.numel() // results  # elements that are reduced to a result
    reduced_dims = sum(not dim.result_stride for dim in loop)  # they come first
    innermost = reduced_dims == len(loop) or loop[0].operand_stride < loop[reduced_dims].operand_stride
    fastest = 0 if innermost else reduced_dims
    width, height = (inputs, results) if innermost else (results, inputs)
    results_per_thread = 1
    if loop[fastest].operand_stride == 1:
        if not innermost:
            results_per_thread = _vector_width(x, loop, fastest)
            width //= results_per_thread
        elif width >= 128 and reduced_dims == 1:
            width //= _VECTOR  # vectorized loads
    across, down = _block_shape(width, height, _THREADS // results_per_thread)
    threads_per_result, results_per_block = (across, 1) if innermost else (1, across)
    if ceil_div(inputs, threads_per_result) < min(down * 16, _MOST_VALUES):
        return ()  # each warp computes its own result
    threads_per_result *= down
    values = ceil_div(inputs, threads_per_result)  # per thread
    grid = ceil_div(results // results_per_thread, results_per_block)
    resident_blocks = arch.multiprocessors * (arch.threads // (across * down))
    if values < _MOST_VALUES or grid > resident_blocks:
        return ()
    to_fill_the_card = min(ceil_div(resident_blocks, grid), ceil_div(values, _LEAST_VALUES))
    blocks_per_result = max(ceil_div(values, _MOST_VALUES), to_fill_the_card)
    if blocks_per_result <= 1:
        return ()
    # threads across a block that each have results of their own stage them apart (global_memory_size)
    staged = 1 if innermost else across * results_per_thread
    return accumulator * results * blocks_per_result * staged, _SEMAPHORE * grid


def floor_power_of_two(n: int) -> int:
    """The largest power of two up to ``n`` (1 for ``n`` below 1)."""
    return 1 << (max(1, n).bit_length() - 1)


def _block_shape(width: int, height: int, threads: int) -> tuple[int, int]:
    """Threads of a block in the fast dimension and in the other, at most ``threads`` together."""
    wide, high = (min(floor_power_of_two(n), threads) for n in (width, height))
    down = min(high, threads // min(wide, _WARP))
    return min(wide, threads // down), down


def _vector_width(x: torch.Tensor, loop: Sequence[_Dim], fastest: int) -> int:
    """Elements per vectorized load along dimension ``fastest``: the largest power of two, up to 4, that divides the
    offset of ``x``, the dimension's size and the other strides."""
    width = _VECTOR
    other_strides = [dim.operand_stride for i, dim in enumerate(loop) if i != fastest]
    for number in (x.storage_offset(), loop[fastest].size, *other_strides):
        while number % width:
            width //= 2
    return width


def _loop_dims(x: torch.Tensor, dims: Sequence[int]) -> list[_Dim]:
    """The dimensions as TensorIterator orders and merges them: reduced ones first, then by stride.

    ``dims``: the reduced dimensions of ``x``; none: all.
    """
    reduced = {dim % max(1, x.dim()) for dim in dims} if dims else set(range(x.dim()))
    result_stride, loop = 1, list[_Dim]()
    for i in reversed(range(x.dim())):
        operand_stride = x.stride(i) if x.shape[i] != 1 else 0
        loop.append(_Dim(x.shape[i], 0 if i in reduced else result_stride, operand_stride))
        if i not in reduced:
            result_stride *= x.shape[i]
    for i in range(1, len(loop)):  # an insertion sort like TensorIterator's: the comparison is no total order
        position = i
        for before in reversed(range(i)):
            order = _compare_dims(loop[before], loop[position])
            if order > 0:
                loop[before], loop[position] = loop[position], loop[before]
                position = before
            elif order < 0:
                break
    return _merge_dims(loop)


def _compare_dims(a: _Dim, b: _Dim) -> int:
    """Compare like TensorIterator: 1 if ``b`` has to come before ``a`` in the loop, -1 if after, 0 if undecided.

    Reduced dimensions come first, then smaller strides (of the result, else of the operand); with equal strides the
    smaller size. Strides of 0 are not compared.
    """
    if (a.result_stride == 0) != (b.result_stride == 0):
        return 1 if b.result_stride == 0 else -1
    for a_stride, b_stride in ((a.result_stride, b.result_stride), (a.operand_stride, b.operand_stride)):
        if a_stride and b_stride:
            if a_stride != b_stride:
                return 1 if a_stride > b_stride else -1
            if a.size > b.size:
                return 1
    return 0


def _merge_dims(loop: list[_Dim]) -> list[_Dim]:
    """Merge each dimension into its predecessor if a single stride steps through both, as TensorIterator does."""
    merged = loop[:1]
    for dim in loop[1:]:
        last = merged[-1]
        continues_last = (last.size * last.result_stride, last.size * last.operand_stride) == (
            dim.result_stride,
            dim.operand_stride,
        )
        if 1 not in (last.size, dim.size) and not continues_last:
            merged.append(dim)
            continue
        if last.size == 1:
            last.result_stride, last.operand_stride = dim.result_stride, dim.operand_stride
        last.size *= dim.size
    return merged


def reduction(
    args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, position: int | None, accumulator: int | None = None
) -> AllocationBytes:
    """Temporaries of an op that reduces the dimensions of argument ``position``, or ``dim`` by name; without it, all.

    ``accumulator``: bytes of the accumulator of a result; None: those of an element, at least 4.
    """
    x = args[0]
    dim = args[position] if position is not None and len(args) > position else kwargs.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return staging_buffer(x, dims, accumulator or max(4, x.element_size()), arch)


FORMULAS: dict[str, Formula] = {
    **{
        f"aten.{name}": partial(reduction, position=1)
        for name in ("sum.dim_IntList", "mean.dim", "prod.dim_int", "nansum.default")
    },
    **{f"aten.{name}.default": partial(reduction, position=None) for name in ("sum", "mean", "prod")},
    "aten.linalg_vector_norm.default": partial(reduction, position=2),
    **{f"aten.{name}.default": partial(reduction, position=1) for name in ("amax", "amin")},
    **{f"aten.{name}.dim": partial(reduction, position=1, accumulator=_WITH_INDEX) for name in ("max", "min")},
    **{
        f"aten.{name}.default": partial(reduction, position=1, accumulator=_WITH_INDEX) for name in ("argmax", "argmin")
    },
    "aten.var.correction": partial(reduction, position=1, accumulator=16),
    "aten.var_mean.correction": partial(reduction, position=1, accumulator=16),
    "aten.std.correction": partial(reduction, position=1, accumulator=16),
}
