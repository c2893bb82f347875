"""Slices whose steps are values: taken as small as can be, which selects most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.records import loud

STEPPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by a number": lambda x, drawn: x[:, :: drawn.item() + 1],
    "by a tensor": lambda x, drawn: x[:, :: drawn + 1],
    "from a number by a number": lambda x, drawn: x[:, drawn.item() :: drawn.item() + 1],
    "from a number to one beside it": lambda x, drawn: x[:, drawn.item() : drawn.item() + 8 : drawn.item() + 1],
    "by the largest but a number": lambda x, drawn: x[:, :: 4 - drawn.item()],
}


def by_value(name: str, low: int, high: int) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        x = torch.ones(32, 600)

        def step() -> None:
            STEPPED[name](x, torch.randint(low, high, ())).exp()

        return step

    return build


@pytest.mark.parametrize("name", STEPPED)
def test_a_slice_is_taken_by_its_smallest_step(name: str) -> None:
    trace = memplan.record(by_value(name, 0, 3))
    assert memplan.simulate(trace).peak_allocated == max(
        measured_peak(by_value(name, one, one + 1)) for one in range(3)
    )
    assert loud(trace.assumptions)
