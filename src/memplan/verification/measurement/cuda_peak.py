"""Peak and room on a CUDA card, by what torch's caching allocator says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memplan import _torch


@dataclass
class CardPeak:
    """Bytes, while `watched` is left."""

    reserved: int = 0
    """The most that the allocator held from the card, less what of it was allocated for others."""


def allocated(place: str) -> int:
    """Bytes that the allocator has given out, but for the workspaces of cuBLAS, which go back to it."""
    gc.collect()
    torch.cuda.synchronize(place)
    _torch.clear_cublas_workspaces()
    return torch.cuda.memory_allocated(place)


@contextmanager
def watched(place: str, others: int) -> Iterator[CardPeak]:
    """What the allocator holds from the card for a step, at the most.

    Before it begins, all that is unused goes back to the card, and the workspaces of cuBLAS with it, so that the step
    takes its own.

    Args:
        place: as torch calls the card.
        others: bytes that are allocated for something else, all the time.
    """
    found = CardPeak()
    allocated(place)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(place)
    yield found
    torch.cuda.synchronize(place)
    found.reserved = torch.cuda.max_memory_reserved(place) - others


def growth(step: Callable[[], object], place: str) -> int:
    """Bytes that a step allocates at its peak above what was allocated when it began."""
    before = allocated(place)
    torch.cuda.reset_peak_memory_stats(place)
    step()
    torch.cuda.synchronize(place)
    return torch.cuda.max_memory_allocated(place) - before


_SHARE = 0.9
"""Of what is free. The rest is what the allocator holds in pieces, beyond what is predicted."""


def available(place: str) -> int:
    """Bytes that the card can still give: most of what is free on it, or held by the allocator and given to nobody."""
    free, _ = torch.cuda.mem_get_info(place)
    return int(_SHARE * (free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)))


@contextmanager
def same_kernels_each_time() -> Iterator[None]:
    """cuDNN takes kernels that add in the same order in each run, and does not choose among them by the clock."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
