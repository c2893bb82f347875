"""What torch's CPU allocator says of one rank with real tensors, in the fake process group of a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truth.cpu_allocator import collecting, measured_peak

from memplan import _torch


def measured_peak_of_rank(build: Callable[[], Callable[[], Any]], world: int, rank: int = 0) -> int:
    """Bytes at the peak of build and steps; garbage goes after each step, as in a recording."""

    with _torch.one_rank_of(world, rank):
        return measured_peak(collecting(build))
