"""Measure peak and free memory of a CUDA card by torch's caching allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memplan import _torch


@dataclass
class CardPeak:
    """Bytes at the peak of a step, set when `measuring_peak` exits."""

    growth: int = 0
    """Allocated, less what was allocated before."""
    reserved: int = 0
    """Reserved by the allocator."""


def allocated(device: str) -> int:
    """Free garbage and the workspaces of cuBLAS, and return the bytes that torch has allocated on a card."""
    gc.collect()
    torch.cuda.synchronize(device)
    _torch.clear_cublas_workspaces()
    return torch.cuda.memory_allocated(device)


@contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Within this context garbage collections skip the objects that exist now: torch's alone take 0.2 s each time."""
    may_freeze = not gc.get_freeze_count()  # unfreezing would also thaw what the user froze
    if may_freeze:
        gc.freeze()
    try:
        yield
    finally:
        if may_freeze:
            gc.unfreeze()


@contextmanager
def measuring_peak(device: str) -> Iterator[CardPeak]:
    """Measure the peak of the step that runs within this context.

    First the allocator's cache and the workspaces of cuBLAS are freed, so that the step reserves all that it needs.
    """
    peak, before = CardPeak(), allocated(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    torch.cuda.synchronize(device)
    peak.growth = torch.cuda.max_memory_allocated(device) - before
    peak.reserved = torch.cuda.max_memory_reserved(device)


def free_bytes(device: str) -> int:
    """Return the bytes that are free on the card or cached by the allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
