"""Runs a step for real under torch's profiler and a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from memplan import _torch
from memplan._patched import tracked, unpatched
from memplan.trace.recording.boundaries import Program, Runs
from memplan.trace.recording.causes import StepParts, finish
from memplan.trace.recording.join_events import STEP
from memplan.trace.recording.ledger import Entry
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.session import (
    SCRIPTED,
    ObservedRun,
    Running,
    Target,
    recording_runs,
    run_steps,
)
from memplan.trace.recording.state_restore import OutsideState
from memplan.trace.records import HOST

_COMPILED = (
    "torch.compile: the bytes are those of the compiled step; layers and causes are from a run in eager "
    "mode, and what that does not allocate has neither"
)


@dataclass(frozen=True)
class NamedRun:
    """Records of a run under a dispatch mode, by which each allocation belongs to a named op."""

    observer: Observer
    parts: StepParts
    entries: list[Entry]
    """Storages of the ledger when the last step ended; a program may run on."""
    record: _torch.Profile
    notes: tuple[str, ...]


@contextmanager
def compiled_as_torch_is(build: Runs) -> Iterator[None]:
    """Within this context, memplan's patches of a script are undone while compiled functions run: Dynamo cannot trace
    them. Scripted functions run as Python. A ``build`` that is no script (`Program`) has no such patches."""
    if not isinstance(build, Program):
        yield
        return
    with tracked() as patches:

        @contextmanager
        def around() -> Iterator[None]:
            """The context in which compiled functions run."""
            with unpatched(patches), _torch.without_global_hooks():
                yield

        # without a note where a scripted function runs: the run under a dispatch mode has it
        with _torch.around_compiled_calls(around), _torch.scripted_as_python(lambda: None):
            yield


def named_run(build: Runs, steps: int, device: str = HOST) -> NamedRun:
    """Run the step ``steps`` times under a dispatch mode and a memory profile of ``device``. On the CPU, restore the
    tensors from outside of ``build`` that it changed, since another run follows."""
    place = Place()
    observer = Observer(place, real=True, on_card=device != HOST)
    outside = OutsideState(place, observer.ledger) if device == HOST else None
    profile = _torch.memory_profile()
    mode = _torch.EagerMode(_dispatch_in_ranges(observer, outside))
    notes: list[str] = []  # about compiled or scripted functions, which run as plain Python
    finished: list[StepParts] = []
    entries: list[Entry] = []
    with ExitStack() as stack:
        with mode:
            observer.calibrate()
        stack.enter_context(place.following())
        stack.enter_context(_torch.eager_instead_of_compiled(lambda: notes.append(_COMPILED)))
        stack.enter_context(_torch.scripted_as_python(lambda: notes.append(SCRIPTED)))
        marks = StepMarks(observer)

        def finish_observation() -> None:  # now, since layers get their names from modules that are alive
            observer.ledger.close()
            finished.append(finish(observer, marks.ticks))
            entries.extend(observer.ledger.entries)

        marks.after_last_step = finish_observation
        with recording_runs(measurement(place, device)), profile, mode:
            run_steps(build, steps, observer, marks)
    if outside is not None:  # on a card this is the last run of the process
        outside.restore()
    return NamedRun(observer, finished[0], entries, _torch.Profile.of(profile, device), tuple(dict.fromkeys(notes)))


def measurement(place: Place, device: str = HOST) -> Running:
    """Return the `Running` of a measurement, within which memplan's own work can be suspended."""

    @contextmanager
    def suspended() -> Iterator[None]:
        """Within this context, ops of memplan itself are not measured."""
        with (
            place.suspending(), _torch.without_global_hooks(), _torch.without_function_modes(), _torch.no_modes(),
        ):  # fmt: skip
            yield

    return Running(Target(device), suspended, really=True)


class StepMarks(ObservedRun):
    """Boundaries that mark the profiler's record where steps begin and end.

    Marks are empty ranges, since a program's steps may begin and end within ranges of its own.
    """

    def __init__(self, observer: Observer) -> None:
        """``observer``: of the run whose parts are marked."""
        super().__init__(observer)
        self.after_part: Callable[[], None] = lambda: None
        """Called at the end of the build and of each step."""
        self.after_last_step: Callable[[], None] = lambda: None
        """Called while model and optimizer are alive."""

    def end_part(self) -> None:
        """End the build or a step: collect garbage, call `after_part`, and mark the end in the profiler's record."""
        super().end_part()
        self.after_part()
        with _torch.marker(f"{STEP}{self.observer.place.step}"):
            pass

    def ended(self) -> None:
        """Call `after_last_step` while model and optimizer are alive."""
        with _torch.marker(_torch.END_MARK):  # memory events after this mark do not count
            self.after_last_step()


def _dispatch_in_ranges(observer: Observer, outside: OutsideState | None) -> _torch.Dispatch:
    """Return the observer's dispatch with each op in a profiler range named by the op's index, to join memory events
    to ops. With ``outside``, tensors from outside of ``build`` are saved before an op writes them."""

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run an op under the observer, in its own range."""
        if outside is not None:
            outside.save_before(func, args, kwargs)

        def run_marked(op: Any) -> Any:
            with _torch.marker(str(len(observer.notes) - 1)):  # the observer has just noted this op
                return run(op)

        return observer.dispatch(func, args, kwargs, run_marked)

    return dispatch
