"""Ops that run in place without a dispatch mode: additions in autograd's engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan

SIZE = 1 << 16


def read(count: int) -> Callable[[], Callable[[], None]]:
    """A step that reads a result ``count`` times: so many gradients are added in the engine's buffer."""

    def build() -> Callable[[], None]:
        x = torch.ones(SIZE, requires_grad=True)

        def step() -> None:
            y = x * 2
            results: list[Tensor] = [torch.sin(y) for _ in range(count)]
            torch.autograd.backward(results, [torch.ones(SIZE) for _ in results])
            x.grad = None

        return step

    return build


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_are_added_in_place_in_the_engines_buffer(count: int) -> None:
    trace = memplan.record(read(count), device="cpu", steps=1)
    additions = [op.name for op in trace.ops if "add" in op.name]
    assert additions == ["aten.add_.Tensor"] * (count - 1)
    assert memplan.simulate(trace).peak_allocated == measured_peak(read(count))
