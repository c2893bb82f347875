"""Kernels are timed by a clock that other load does not advance."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from memplan.planning.cost.clock import clock_of

WAIT = 0.2


def seconds_while_waiting(place: str) -> float:
    """Return by how much a device's clock advances while the thread waits."""
    clock = clock_of(place)
    begin = clock()
    time.sleep(WAIT)
    return clock() - begin


def test_only_a_card_s_clock_advances_while_the_thread_waits() -> None:
    """The thread waits for a card; on the CPU it waits where another process runs."""
    assert seconds_while_waiting("cpu") < WAIT / 2
    assert seconds_while_waiting("cuda:0") >= WAIT


def test_the_cpu_s_clock_advances_while_the_thread_computes() -> None:
    clock = clock_of("cpu")
    begin, begin_of_thread = clock(), time.thread_time()
    while time.thread_time() < begin_of_thread + 0.01:
        pass
    assert clock() - begin >= 0.01


def test_a_thread_s_clock_that_is_too_coarse_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Windows has a resolution of 16 ms."""
    monkeypatch.setattr(time, "get_clock_info", lambda name: SimpleNamespace(resolution=0.015625))
    assert clock_of("cpu") is time.perf_counter
