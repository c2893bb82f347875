"""Measure a step on a CUDA card by torch's caching allocator: its peak, and the memory that is left."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memplan import _torch


@dataclass
class CardPeak:
    """Bytes at the peak of a step, known when `watched` is left."""

    growth: int = 0
    """Allocated above what was allocated before."""
    reserved: int = 0
    """Held by the allocator from the card."""


def allocated(place: str) -> int:
    """Return the allocated bytes, without the workspaces of cuBLAS, which are freed."""
    gc.collect()
    torch.cuda.synchronize(place)
    _torch.clear_cublas_workspaces()
    return torch.cuda.memory_allocated(place)


@contextmanager
def watched(place: str) -> Iterator[CardPeak]:
    """Measure the peak of a step.

    Before it begins, all unused memory is returned to the card, with the workspaces of cuBLAS, so that the step takes
    its own.

    Args:
        place: the card's name in torch.
    """
    peak, before = CardPeak(), allocated(place)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(place)
    yield peak
    torch.cuda.synchronize(place)
    peak.growth = torch.cuda.max_memory_allocated(place) - before
    peak.reserved = torch.cuda.max_memory_reserved(place)


def free(place: str) -> int:
    """Return the bytes that are free on the card, or held by the allocator and not allocated."""
    on_card, _ = torch.cuda.mem_get_info(place)
    return on_card + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
