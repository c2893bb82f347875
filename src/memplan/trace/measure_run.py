"""A step run for real, seen by torch's profiler: under a dispatch mode, or as it is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from memplan import _torch
from memplan.trace.recording.causes import Finished, finish
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.put_back import Outside
from memplan.trace.recording.session import Build, Step, located, run_build
from memplan.trace.records import HOST

_COMPILED = (
    "torch.compile: the bytes are the compiled step's; layers and causes are from its run in eager mode, and what that "
    "has not has neither"
)


@dataclass(frozen=True)
class Named:
    """What a run under a dispatch mode gave."""

    observer: Observer
    parts: Finished
    record: _torch.Profile
    notes: tuple[str, ...]


def named_run(build: Build, steps: int, device: str = HOST) -> Named:
    """Run the step under a dispatch mode, and put back what it changed; of memory, see that of a type of device."""
    place = Place()
    observer = Observer(place, real=True, on_card=device != HOST)
    outside = Outside(place, observer.ledger) if device == HOST else None
    profile = _torch.memory_profile()
    mode = _torch.EagerMode(_marked(observer, outside))
    compiled: list[str] = []
    with ExitStack() as stack:
        with mode:
            observer.calibrate()
        stack.enter_context(place.following())
        stack.enter_context(_torch.eager_instead_of_compiled(lambda: compiled.append(_COMPILED)))
        with profile, mode:
            built, step = run_in_ranges(build, steps, observer)
        observer.ledger.close()
        parts = finish(observer, built)
        del step
    if outside is not None:  # else it is the last run of its process
        outside.put_back()
    return Named(observer, parts, _torch.Profile.of(profile, device), tuple(dict.fromkeys(compiled)))


def _nothing(number: int) -> None:
    return None


def run_in_ranges(
    build: Build, steps: int, observer: Observer, after: Callable[[int], None] = _nothing
) -> tuple[int, Step]:
    """Build and run the step, each within a range of the profiler; return the tick when it was built, and the step.

    ``after`` is called with -1 when it was built, and with each step's number when that ended.
    """
    with _torch.marker("build"):
        step = run_build(build, observer)
        observer.place.building = False
        observer.marks.mark_modules()
        gc.collect()
    after(-1)
    built = observer.ledger.clock
    for number in range(steps):
        observer.place.step = number
        with _torch.marker(f"step{number}"):
            with located(observer, f"step {number + 1}"):
                step()
            observer.end_step()
            gc.collect()
        after(number)
    return built, step


def _marked(observer: Observer, outside: Outside | None) -> _torch.Dispatch:
    """Return the observer's dispatch, each op inside of a range of the profiler that carries its index."""

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        if outside is not None:
            outside.before(func, args, kwargs)

        def run_marked(op: Any) -> Any:
            with _torch.marker(str(len(observer.notes) - 1)):
                return run(op)

        return observer.dispatch(func, args, kwargs, run_marked)

    return dispatch
