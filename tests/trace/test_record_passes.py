"""What a recording notes besides ops and storages: backward passes with their flags, collections, optimized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan


def test_flags_of_backward_passes() -> None:
    def build() -> Any:
        x = torch.randn(8, requires_grad=True)

        def step() -> None:
            y = (x * x).sum()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            grad.sum().backward(retain_graph=True)
            grad.sum().backward()

        return step

    trace = memplan.record(build, device="cpu", steps=1)
    assert [(one.keeps, one.nested, one.step) for one in trace.passes] == [
        ("create_graph", False, 0), ("retain_graph", False, 0), ("", False, 0),
    ]  # fmt: skip
    assert all(one.where and "test_record_passes.py:" in one.where for one in trace.passes)
    # the first gradient is made before the engine is called
    backward = [op for op in trace.ops if op.phase == "backward" and op.name != "aten.ones_like.default"]
    inside = [any(one.start <= op.start and op.end <= one.end for one in trace.passes) for op in backward]
    assert backward
    assert all(inside)


def test_a_reentrant_checkpoint_runs_a_pass_within_one() -> None:
    def build() -> Any:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

        def step() -> None:
            out: Any = checkpoint(layer, x, use_reentrant=True)
            out.sum().backward()

        return step

    inner, outer = memplan.record(build, device="cpu", steps=1).passes
    assert (inner.nested, outer.nested) == (True, False)
    assert outer.start <= inner.start <= inner.end <= outer.end


def test_optimized_parameters_and_those_without_a_gradient() -> None:
    def build() -> Any:
        used, unused, frozen = nn.Linear(4, 4), nn.Linear(3, 3), nn.Linear(2, 2).requires_grad_(False)
        optimizer = torch.optim.SGD([*used.parameters(), *unused.parameters(), *frozen.parameters()], 0.1)
        x = torch.randn(2, 4)

        def step() -> None:
            optimizer.zero_grad()
            used(x).sum().backward()
            optimizer.step()

        return step

    trace = memplan.record(build, device="cpu")
    shapes = lambda numbers: sorted(trace.storages[n].shape for n in numbers)  # noqa: E731
    assert shapes(trace.optimized) == [(3,), (3, 3), (4,), (4, 4)]
    assert shapes(trace.ungraded) == [(3,), (3, 3)]


@pytest.mark.parametrize("count", [1, 4])
def test_cycles_that_autograd_links_are_collected_after_each_step(count: int) -> None:
    """Each checkpoint's output hangs in a cycle with its node, and holds the node before it."""

    def build() -> Any:
        layer, x = nn.Linear(64, 64), torch.randn(256, 64, requires_grad=True)

        def step() -> None:
            h: Any = x
            for _ in range(count):
                seen: list[Any] = []

                def run(given: Any, seen: list[Any]) -> Any:
                    seen.append(layer(given))
                    return seen[-1]

                h = checkpoint(run, h, seen, use_reentrant=True)
            h.sum().backward()

        return step

    recorded, measured = memplan.record(build, device="cpu", steps=3), memplan.measure(build, steps=3)
    for trace in (recorded, measured):
        begin, end = trace.steps[1], trace.steps[2]
        rows = [s for s in trace.storages if begin < s.born <= end and s.shape == (256, 64)]
        assert rows
        assert all(s.died is not None and s.died <= end for s in rows)
    peaks = [memplan.simulate(trace).peak_allocated for trace in (recorded, measured)]
    assert peaks[0] == peaks[1]
    outputs = 2 * count * 256 * 64 * 4
    begin, end = recorded.collected[2], recorded.steps[2]
    freed = sum(s.bytes for s in recorded.storages if s.died is not None and begin < s.died <= end)
    assert freed >= outputs
