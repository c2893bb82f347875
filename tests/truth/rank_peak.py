"""What torch's CPU allocator says of one rank with real tensors, in the fake process group of a recording."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from truth.cpu_allocator import measured_peak

from memplan import _torch


def measured_peak_of_rank(build: Callable[[], Callable[[], Any]], world: int, rank: int = 0) -> int:
    """Bytes at the peak of build and steps; garbage goes after each step, as in a recording."""

    def collected() -> Callable[[], None]:
        step = build()

        def run() -> None:
            step()
            gc.collect()

        return run

    with _torch.one_rank_of(world, rank):
        return measured_peak(collected)
