"""Temporaries of the CPU's flash attention: cpu/FlashAttentionKernel.cpp."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.layout import bytes_of, copied, has_amx

_REDUCED = (torch.bfloat16, torch.float16)


def _rows(length: int) -> int:
    """Queries in a block."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return bytes of scores, sums and an output block in float32 a thread; packed keys and values in reduced
    precision."""
    q, k, v = args[:3]
    threads, head = torch.get_num_threads(), q.shape[-1]
    rows, columns = _rows(q.shape[2]), min(512, k.shape[2])
    wide = 8 if q.dtype is torch.float64 else 4
    taken = threads * (rows * columns + 2 * rows + rows * head) * wide
    if q.dtype not in _REDUCED:
        return taken
    taken += threads * rows * columns * 2
    if has_amx() and q.shape[2] // threads >= 4 and k.shape[2] >= 64:
        taken += bytes_of(k) + bytes_of(v) + threads * columns * head * 2
    return taken


def backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return bytes of scores and their gradient a thread, sums of rows; the output's gradient where its heads are not
    inside its rows."""
    gradient, q, k = args[:3]
    threads = torch.get_num_threads()
    rows, columns = _rows(q.shape[2]), min(512, k.shape[2])
    wide = 8 if q.dtype is torch.float64 else 4
    taken = (threads * 2 * rows * columns + rows) * wide
    if q.dtype in _REDUCED:
        taken += threads * 2 * rows * columns * 2
    return taken + copied(gradient.transpose(1, 2))
