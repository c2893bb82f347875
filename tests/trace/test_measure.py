"""A measured trace is the allocator's own account, joined to ops and causes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocator import measured_peak
from steps import STEPS, mlp, plain

import memplan

NAMES = ["in_place", "checkpoint_of_a_function", "frozen_and_tied", "convolutions_3d", "optimizer_adamw_foreach",
         "custom_function", "double_backward", "autocast"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_peak_equals_a_plain_run_under_the_profiler(name: str) -> None:
    build = STEPS[name]
    torch.manual_seed(0)
    # the dispatch mode that names the ops must not change what is allocated
    assert memplan.simulate(memplan.measure(build)).peak_allocated == pytest.approx(measured_peak(build), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_causes_agree_with_the_recording(name: str) -> None:
    build = STEPS[name]
    totals = []
    for trace in (memplan.record(build), memplan.measure(build)):
        total: dict[str, int] = {}
        for storage in trace.storages:
            total[storage.cause] = total.get(storage.cause, 0) + storage.bytes
        totals.append(total)
    recorded, measured = totals
    for cause in ("weight", "optimizer_state", "parameter_gradient", "saved"):
        assert measured.get(cause, 0) == pytest.approx(recorded.get(cause, 0), rel=0.01), cause


def test_ops_and_layers_are_those_of_the_recording() -> None:
    build = STEPS["accumulation_and_two_losses"]
    recorded, measured = memplan.record(build, steps=1), memplan.measure(build, steps=1)
    # making parameters is an op where it really happens: only the step is compared
    pick = lambda trace: [(op.name, op.layer, op.phase) for op in trace.ops if op.step == 0]  # noqa: E731
    assert pick(measured) == pick(recorded)


def test_what_cannot_be_joined_gets_a_line() -> None:
    held: list[Any] = []

    def build() -> Any:
        model, x = mlp(64), torch.randn(8, 64)

        def step() -> None:
            model.zero_grad()
            held.append(torch.get_rng_state())  # allocated in C++, out of sight of every dispatch mode
            model(x).sum().backward()

        return step

    trace = memplan.measure(build)
    assert any("could not be joined" in note for note in trace.notes)


def test_memory_from_before_is_not_counted() -> None:
    kept = [torch.ones(1 << 20)]

    def build() -> Any:
        model, x = mlp(64), torch.randn(8, 64)

        def step() -> None:
            kept.clear()  # releases 4 MiB that were there before
            plain(model, x)()

        return step

    events = memplan.simulate(memplan.measure(build)).events
    assert min(allocated for _, allocated, _ in events) >= 0


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.max(1).values,
        lambda x: x[torch.arange(0, 64, 2)],
        lambda x: x.gather(1, torch.zeros(64, 5, dtype=torch.long)),
        lambda x: x.topk(3).values,
        lambda x: x.index_select(0, torch.arange(3)),
        lambda x: x.sort(1).values,
        lambda x: x.cummax(0).values,
    ],
)
def test_gradients_that_are_written_into_zeros_are_one_tensor(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A dispatch mode makes torch write them into a copy of the zeros; the plain profiler shows that it does not."""

    def build() -> Callable[[], None]:
        x = torch.randn(64, 4096, requires_grad=True)

        def step() -> None:
            made(x).sum().backward()
            x.grad = None

        return step

    plain = measured_peak(build)
    assert memplan.simulate(memplan.measure(build)).peak_allocated == plain
    assert memplan.simulate(memplan.record(build)).peak_allocated == pytest.approx(plain, rel=0.01)


QUIET = """
import os, torch, memplan
model = torch.nn.Linear(4, 4)
memplan.measure(lambda: lambda: model(torch.ones(2, 4)).sum().backward())
assert os.environ.get("KINETO_LOG_LEVEL") is None, "what the user's own processes are told is as it was"
"""


def test_the_profiler_says_nothing() -> None:
    """In a process of its own: how much it says is settled once."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", QUIET], capture_output=True, text=True, check=True)
    assert "profiler" not in ran.stderr
