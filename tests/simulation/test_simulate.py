"""One simulator, against a brute-force count."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.errors import UsageError
from memplan.simulation.simulate import live_at
from memplan.trace.records import Storage
from memplan.trace.trace import Trace


@st.composite
def programs(draw: st.DrawFn) -> tuple[Trace, list[int]]:
    """A random program of allocations and frees, and the bytes live after each event, counted one by one."""
    storages: list[Storage] = []
    live: list[int] = []
    levels: list[int] = []
    for tick in range(1, draw(st.integers(1, 60)) + 1):
        if live and draw(st.booleans()):
            victim = live.pop(draw(st.integers(0, len(live) - 1)))
            storages[victim] = dataclasses.replace(storages[victim], died=tick)
        else:
            live.append(len(storages))
            size = draw(st.integers(0, 1 << 40))
            storages.append(Storage(len(storages), size, "activation", tick, None))
        levels.append(sum(storages[i].bytes for i in live))
    end = len(levels)
    steps = tuple(sorted(draw(st.sets(st.integers(0, end), min_size=1, max_size=3))))
    return Trace(
        origin="recorded", device="cpu", torch="2", ops=(), storages=tuple(storages), layers=(), steps=steps, end=end
    ), levels


@given(programs())
def test_every_event_and_peak_equals_the_count(program: tuple[Trace, list[int]]) -> None:
    trace, levels = program
    timeline = memplan.simulate(trace)
    assert [allocated for _, allocated, _ in timeline.events] == levels
    assert timeline.peak_allocated == timeline.peak_reserved == max(levels)
    assert levels[timeline.peak_tick - 1] == max(levels) or not max(levels)
    bounds = (0, *trace.steps, trace.end)
    for step, (start, end) in zip((timeline.build, *timeline.steps), pairwise(bounds), strict=True):
        held = levels[start - 1] if start else 0
        assert step.peak_allocated == max([held, *levels[start:end]])


@given(programs())
def test_what_is_live_adds_up(program: tuple[Trace, list[int]]) -> None:
    trace, levels = program
    for tick, level in enumerate(levels, 1):
        assert sum(s.bytes for s in live_at(trace, tick)) == level


def test_settings_need_a_device_that_has_them() -> None:
    trace = Trace(origin="recorded", device="cpu", torch="2", ops=(), storages=(), layers=(), steps=(0,), end=0)
    with pytest.raises(UsageError, match="the CPU has none"):
        memplan.simulate(trace, settings="expandable_segments:True")
    with pytest.raises(UsageError, match="'low', 'high' or 'measured'"):
        memplan.simulate(trace, workspace="middle")  # pyright: ignore[reportArgumentType]  # on purpose
