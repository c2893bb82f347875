"""Temporaries of the CPU's flash attention: cpu/FlashAttentionKernel.cpp."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.layout import bytes_of, copied, has_amx

_REDUCED = (torch.bfloat16, torch.float16)


def _rows(length: int) -> int:
    """Return the number of queries in a block."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes of the blocks of all threads: scores, row sums and an output block in float32; in reduced
    precision also packed keys and values."""
    q, k, v = args[:3]
    threads, head = torch.get_num_threads(), q.shape[-1]
    rows, columns = _rows(q.shape[2]), min(512, k.shape[2])
    accumulator = 8 if q.dtype is torch.float64 else 4
    scratch = threads * (rows * columns + 2 * rows + rows * head) * accumulator
    if q.dtype not in _REDUCED:
        return scratch
    scratch += threads * rows * columns * 2
    if has_amx() and q.shape[2] // threads >= 4 and k.shape[2] >= 64:
        scratch += bytes_of(k) + bytes_of(v) + threads * columns * head * 2
    return scratch


def backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes of the blocks of all threads (scores and their gradient), of row sums, and of a copy of the
    output's gradient unless its heads lie within its rows."""
    gradient, q, k = args[:3]
    threads = torch.get_num_threads()
    rows, columns = _rows(q.shape[2]), min(512, k.shape[2])
    accumulator = 8 if q.dtype is torch.float64 else 4
    scratch = (threads * 2 * rows * columns + rows) * accumulator
    if q.dtype in _REDUCED:
        scratch += threads * 2 * rows * columns * 2
    return scratch + copied(gradient.transpose(1, 2))
