"""The part of the independent checker that is about copies to host memory and back: nothing is read before it has
arrived, and nothing is freed or written over while it is copied.

What there is to be read at all, and its bytes, is for `memplan.planning.validation.validate`.
"""

from __future__ import annotations

from collections.abc import Iterable

from memplan.errors import ScheduleError
from memplan.planning.schedule.scheduler import Schedule

BEGINS = {"store": "stored", "fetch": "fetched"}
"""What begins a copy, and what ends it."""
ENDS = ("stored", "fetched")


def check_copies(schedule: Schedule) -> None:
    """Raises ScheduleError where a copy is not waited for."""
    host = {one.value: one.host for one in schedule.graph.offloads}
    for phase, actions in (("forward", schedule.forward), ("backward", schedule.backward)):
        underway: dict[int, tuple[int, str]] = {}
        """By where a copy goes: where it comes from, and what ends it."""
        for at, action in enumerate(actions):
            place, value = f"{phase} action {at} ({action.kind})", -1 if action.value is None else action.value
            out, there = action.kind in ("store", "stored"), host.get(value, -1)
            source, target = (value, there) if out else (there, value)
            if action.kind in ENDS:
                ended = underway.pop(target, None)
                _need(ended == (source, action.kind), place, f"no such copy of value {value} is underway")
            arriving, leaving = {*underway}, {begun for begun, _ in underway.values()}
            early = arriving.intersection(action.reads)
            _need(not early, place, f"{_names(schedule, early)} is not there yet")
            gone = {*action.frees} | ({action.into} if action.into is not None else set[int]())
            if action.kind in BEGINS:
                underway[target] = source, BEGINS[action.kind]
                leaving |= {source}
                arriving |= {target}
            early = gone & (arriving | leaving)
            _need(not early, place, f"{_names(schedule, early)} is freed, or written over, and is being copied")
        _need(not underway, f"the end of the {phase} pass", f"{_names(schedule, underway)} is still being copied")


def _names(schedule: Schedule, values: Iterable[int]) -> str:
    return ", ".join(schedule.graph.values[value].name for value in sorted(values))


def _need(right: bool, place: str, otherwise: str) -> None:
    if not right:
        raise ScheduleError(f"The schedule is wrong at {place}: {otherwise}")
