"""Temporaries of the CPU's flash attention: cpu/FlashAttentionKernel.cpp."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes, has_amx

_REDUCED = (torch.bfloat16, torch.float16)


def _block_rows(length: int) -> int:
    """Return the number of queries in a block, for queries of this length."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def forward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the bytes of the blocks of all threads: scores, row sums and an output block in float32; in reduced
    precision also packed keys and values.

    Source of the limits: cpu/FlashAttentionKernel.cpp, cpu_flash_attention, with blocks of 512 keys.
    """
    query, key, value = args[:3]
    threads, head_size = torch.get_num_threads(), query.shape[-1]
    rows, columns = _block_rows(query.shape[2]), min(512, key.shape[2])
    accumulator = 8 if query.dtype is torch.float64 else 4
    scratch = threads * (rows * columns + 2 * rows + rows * head_size) * accumulator
    if query.dtype not in _REDUCED:
        return scratch
    scratch += threads * rows * columns * query.element_size()
    if has_amx() and query.shape[2] // threads >= 4 and key.shape[2] >= 64:
        scratch += bytes_of(key) + bytes_of(value) + threads * columns * head_size * query.element_size()
    return scratch


def backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the bytes of the blocks of all threads (scores and their gradient), of row sums, and of a copy of the
    output's gradient unless its heads lie within its rows."""
    gradient, query, key = args[:3]
    threads = torch.get_num_threads()
    rows, columns = _block_rows(query.shape[2]), min(512, key.shape[2])
    accumulator = 8 if query.dtype is torch.float64 else 4
    blocks = 2 * threads * rows * columns  # elements
    scratch = (blocks + rows) * accumulator
    if query.dtype in _REDUCED:
        scratch += blocks * query.element_size()
    return scratch + copy_bytes(gradient.transpose(1, 2))
