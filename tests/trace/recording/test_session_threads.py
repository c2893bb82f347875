"""Recordings in several threads, and beside threads that train: what each gives, and torch afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from truth.fresh_process import run_fresh
from truth.torch_state import kept

import memplan
from memplan.trace.recording import session


def build() -> Callable[[], None]:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


def peak() -> int:
    return memplan.simulate(memplan.record(build, device="cpu")).peak_allocated


def at_once(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is waited for without a warning, which would be an error."""
    monkeypatch.setattr(session, "_WARN_AFTER", 600.0)


@pytest.mark.usefixtures("patient")
def test_recordings_at_once_are_as_one_alone_and_leave_torch_as_it_was() -> None:
    alone, found = peak(), list[int]()
    with kept():
        at_once(*[lambda: found.extend(peak() for _ in range(2))] * 3)
    assert found == [alone] * 6


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_fits_checks_and_measures_at_once_are_as_each_alone() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh()) for _ in range(2)]
    x = torch.randn(64, 8)

    def fitted(net: nn.Module) -> int:
        try:
            memplan.fit(net, x, loss=torch.sum, budget=1, pairs=0)
        except memplan.BudgetError as error:
            one = memplan.fit(net, x, loss=torch.sum, budget=error.smallest_budget, pairs=0)
            one.undo()
            return one.plan.peak
        raise AssertionError("one byte is too little")

    calls: dict[str, Callable[[], Any]] = {
        "a": lambda: fitted(nets[0]),
        "b": lambda: fitted(nets[1]),
        "plan": lambda: memplan.plan(nets[0], x, loss=torch.sum, budget="1 GiB", costs="roofline").peak,
        "check": lambda: memplan.check(nets[0], x, device="cpu"),
        "measure": lambda: memplan.simulate(memplan.measure(build)).peak_allocated,
    }
    alone = {name: call() for name, call in calls.items()}
    found: dict[str, Any] = {}
    with kept():
        at_once(*[lambda name=name, call=call: found.update({name: call()}) for name, call in calls.items()])
    assert found == alone


def test_one_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told, said, found = threading.Event(), list[str](), list[int]()

    def warn(text: str, **_: Any) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(session, "_WARN_AFTER", 0.01)
    monkeypatch.setattr(session.warnings, "warn", warn)
    thread = threading.Thread(target=lambda: found.append(peak()))
    with session.undisturbed():
        thread.start()
        assert told.wait(60)
        assert not found
    thread.join()
    assert found == [peak()]
    assert "another thread of this process is recording or planning" in said[0]


BESIDE = """
import threading, torch, memplan
from torch import nn

def build():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    return lambda: model(x).sum().backward()

def train():
    other = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    while not stop.is_set():
        optimizer.zero_grad()
        other(torch.randn(8, 64)).sum().backward()
        optimizer.step()

peak = lambda: memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
alone, stop = peak(), threading.Event()
thread = threading.Thread(target=train)
thread.start()
try:
    assert [peak() for _ in range(10)] == [alone] * 10
finally:
    stop.set()
    thread.join()
"""


def test_a_thread_that_trains_beside_it_is_left_alone() -> None:
    """In a process of its own, which this once ended by a segmentation fault."""
    ran = run_fresh(BESIDE)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_lazy_layers_of_other_threads_are_real() -> None:
    go, made = [True], list[type]()

    def beside() -> None:
        while go:
            layer = nn.LazyLinear(4)
            made.append(type(layer.weight))
            layer(torch.randn(2, 3))

    def build() -> Callable[[], None]:
        layer, x = nn.Linear(64, 64), torch.randn(256, 64)

        def step() -> None:
            time.sleep(0.01)
            layer(x).sum().backward()

        return step

    alone = memplan.simulate(memplan.record(build)).peak_allocated
    other = threading.Thread(target=beside)
    other.start()
    try:
        peaks = {memplan.simulate(memplan.record(build)).peak_allocated for _ in range(3)}
    finally:
        go.clear()
        other.join()
    assert peaks == {alone}
    assert set(made) == {nn.parameter.UninitializedParameter}


def test_threads_of_a_step_are_recorded_one_op_at_a_time() -> None:
    def build() -> Callable[[], None]:
        layer, x = nn.Linear(64, 64), torch.randn(256, 64)

        def step() -> None:
            made: list[torch.Tensor] = []
            threads = [threading.Thread(target=lambda: made.append(layer(x).relu().pow(2))) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.stack(made).sum().backward()

        return step

    peaks = {memplan.simulate(memplan.record(build, steps=1)).peak_allocated for _ in range(2)}
    assert peaks == {memplan.simulate(memplan.measure(build, steps=1)).peak_allocated}


def in_threads(number: int) -> Callable[[], None]:
    """A step whose threads make their own inputs, one after the other."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])

    def work() -> None:
        model(torch.randn(128, 64)).sum().backward()

    def step() -> None:
        for _ in range(number):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    return step


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_thread_of_a_step_makes_is_recorded(number: int) -> None:
    measured = memplan.simulate(memplan.measure(lambda: in_threads(number))).peak_allocated
    trace = memplan.record(lambda: in_threads(number), device="cpu")
    assert memplan.simulate(trace).peak_allocated == measured
    assert sum(op.name == "aten.randn.default" for op in trace.ops) == 2 * number
