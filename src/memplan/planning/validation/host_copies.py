"""Check asynchronous copies: no value is read before it has arrived, and none is freed or overwritten during its copy.

Whether values are live, and their bytes, is checked by `memplan.planning.validation.validate`.
"""

from __future__ import annotations

from collections.abc import Iterable

from memplan.errors import ScheduleError
from memplan.planning.schedule.scheduler import Schedule

BEGINS = {"store": "stored", "fetch": "fetched"}
"""Kind of action that begins a copy -> kind that waits for its end."""
ENDS = ("stored", "fetched")


def check_copies(schedule: Schedule) -> None:
    """Raise ScheduleError if a copy is not waited for, or if a value is read, freed or overwritten during its copy."""
    copies = {form.encoded: form for form in schedule.graph.forms if form.copy_seconds is not None}
    for phase, actions in (("forward", schedule.forward), ("backward", schedule.backward)):
        underway: dict[int, tuple[int, str]] = {}
        """Target of a copy -> its source, and the kind of action that waits for its end."""
        for index, action in enumerate(actions):
            place = f"{phase} action {index} ({action.kind})"
            form = None if action.encoding is None else copies.get(action.encoding)
            value, on_host = (-1, -1) if form is None else (form.value, form.encoded)  # -1: no value
            source, target = (value, on_host) if action.kind in ("store", "stored") else (on_host, value)
            if action.kind in ENDS:
                ended = underway.pop(target, None)
                _require(ended == (source, action.kind), place, f"no such copy of value {action.value} is underway")
            arriving, leaving = {*underway}, {copied for copied, _ in underway.values()}
            too_soon = arriving.intersection(action.reads)
            _require(not too_soon, place, f"{_names(schedule, too_soon)} is not there yet")
            # freed or overwritten
            lost = {*action.frees} | ({action.overwritten} if action.overwritten is not None else set[int]())
            if form is not None and action.kind in BEGINS:
                underway[target] = source, BEGINS[action.kind]
                leaving |= {source}
                arriving |= {target}
            too_soon = lost & (arriving | leaving)
            _require(
                not too_soon, place, f"{_names(schedule, too_soon)} is freed, or written over, and is being copied"
            )
        _require(not underway, f"the end of the {phase} pass", f"{_names(schedule, underway)} is still being copied")


def _names(schedule: Schedule, values: Iterable[int]) -> str:
    return ", ".join(schedule.graph.values[value].name for value in sorted(values))


def _require(holds: bool, place: str, otherwise: str) -> None:
    """Raise ScheduleError unless a condition holds. ``place``: the action; ``otherwise``: the violation."""
    if not holds:
        raise ScheduleError(f"The schedule is wrong at {place}: {otherwise}")
