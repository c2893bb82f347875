"""Convolutions of torch on the CPU, called by themselves: the bytes that each holds beyond its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from truth.cpu_allocator import allocations, peak_of

from memplan.trace.semantics.cpu.table import transient_bytes

aten = torch.ops.aten
only_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="AVX2 has rules of its own (test_onednn_avx2.py)"
)


def beyond_results(op: Any, *args: Any) -> tuple[int, int]:
    """Bytes that a call holds at its peak beyond its results: predicted, and seen."""
    op(*args)  # torch keeps what it makes of a shape the first time
    kept: list[Any] = []
    sizes = allocations(lambda: kept.append(op(*args)))
    return transient_bytes(str(op), args, {}, kept[0]), peak_of(sizes) - sum(sizes)


def gradient(
    size: Sequence[int],
    weight: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    last: bool = False,
    of: str = "input",
) -> tuple[int, int]:
    """`beyond_results` of a convolution's gradient of its input, or of its weight."""
    x, w, steps = _made(size, weight, (stride, padding), dtype, last)
    settings = (*steps, [1] * (len(size) - 2), False, [0] * (len(size) - 2), groups)
    made = torch.randn_like(aten.convolution(x, w, None, *settings))
    mask = [of == "input", of == "weight", False]
    return beyond_results(aten.convolution_backward.default, made, x, w, None, *settings, mask)


def forward(
    size: Sequence[int],
    weight: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    last: bool = False,
    transposed: bool = False,
) -> tuple[int, int]:
    """`beyond_results` of a convolution."""
    x, w, steps = _made(size, weight, (stride, padding), dtype, last)
    settings = (*steps, [1] * (len(size) - 2), transposed, [0] * (len(size) - 2), groups)
    return beyond_results(aten.convolution.default, x, w, None, *settings)


def _made(
    size: Sequence[int], weight: Sequence[int], steps: tuple[int | Sequence[int], ...], dtype: torch.dtype, last: bool
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    dims = len(size) - 2
    layouts = {True: torch.channels_last if dims == 2 else torch.channels_last_3d, False: torch.contiguous_format}
    x, w = (torch.randn(one).to(dtype).contiguous(memory_format=layouts[last]) for one in (size, weight))
    return x, w, [[step] * dims if isinstance(step, int) else list(step) for step in steps]
