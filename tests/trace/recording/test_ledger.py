"""Storages of a recording are freed in the same order every time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import memplan


def test_casts_that_autocast_drops_are_freed_in_the_order_of_their_allocation() -> None:
    """torch keeps them in a hash table of addresses, so their order differs between runs."""
    frees: set[tuple[int | None, ...]] = set()
    for number in range(16):

        def build(batch: int = 4 + number) -> Callable[[], None]:
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            data = torch.randn(batch, 8)

            def step() -> None:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    model(data)

            return step

        trace = memplan.record(build, device="cpu")
        frees.add(tuple(storage.died for storage in trace.storages))
    assert len(frees) == 1
