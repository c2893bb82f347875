"""Observe: run the step for real and write down what it did allocate."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import DeviceError
from memplan.trace.recording.causes import Finished, finish
from memplan.trace.recording.join_events import join
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.put_back import Outside
from memplan.trace.recording.session import (
    COMPILED,
    CUDA_DIFFERS,
    Build,
    Step,
    check_steps,
    located,
    of_outside,
    random_kept,
    run_build,
    undisturbed,
)
from memplan.trace.records import HOST
from memplan.trace.trace import Trace


def measure(build: Build, *, device: str | None = None, steps: int = 2) -> Trace:
    """Run a step on this machine and return what it allocated.

    The step runs twice, each time from ``build`` on. Births, deaths and bytes are the allocator's own events of a run
    that nothing but torch's profiler watches; ops, layers and causes come from a run under a dispatch mode before, and
    are joined to them. Between the two, random states are put back, and what ops changed of tensors, gradients and
    optimizers from outside of ``build``. Memory that was there before does not count.

    Args:
        build: as for `record`. It is called twice, and each step that it returns ``steps`` times.
        device: ``"cpu"`` or None.
        steps: how often the step runs.

    Raises:
        StepError: ``build`` or the step raised, or ``build`` did not return a step.
        DeviceError: a device that this machine or this version does not have.

    Example:
        >>> memplan.simulate(memplan.measure(build)).peak_allocated
    """
    check_steps(steps)
    target, notes = _target(device)
    with undisturbed():
        with random_kept():
            named = _named(build, steps)
        plain, unended = _plain(build, steps)
    joined = join(named.parts, named.observer.ledger.entries, named.record, plain, steps)
    notes += named.notes + unended + of_outside(joined.outside)
    if joined.apart:
        notes += (
            f"{format_bytes(joined.apart)} have no layer and no cause: they are allocated only where nothing names the "
            f"ops, in {_few(joined.otherwise)}",
        )
    elif joined.lost:
        notes += (f"{format_bytes(joined.lost)} of allocations could not be joined to an op or a tensor",)
    return Trace(
        "measured", target, torch.__version__, joined.ops, joined.storages, joined.layers, joined.steps, joined.end,
        (), notes, forms=joined.forms, returned=joined.returned,
    )  # fmt: skip


_UNENDED = "a thread that the step started is still running: what it allocates is not measured"


@dataclass(frozen=True)
class _Named:
    """What a run under a dispatch mode gave."""

    observer: Observer
    parts: Finished
    record: _torch.Profile
    notes: tuple[str, ...]


def _named(build: Build, steps: int) -> _Named:
    """Run the step under a dispatch mode, and put back what it changed."""
    place = Place()
    observer = Observer(place, real=True)
    outside = Outside(place, observer.ledger)
    profile = _torch.memory_profile()
    mode = _torch.EagerMode(_marked(observer, outside))
    compiled: list[str] = []
    with ExitStack() as stack:
        with mode:
            observer.calibrate()
        stack.enter_context(place.following())
        stack.enter_context(_torch.eager_instead_of_compiled(lambda: compiled.append(COMPILED)))
        with profile, mode:
            built, step = _run(build, steps, observer)
        observer.ledger.close()
        parts = finish(observer, built)
        del step
    outside.put_back()
    return _Named(observer, parts, _torch.Profile.of(profile), tuple(dict.fromkeys(compiled)))


def _plain(build: Build, steps: int) -> tuple[_torch.Profile, tuple[str, ...]]:
    """Run the step as it is, seen by the profiler alone, with the threads that it starts.

    Returns:
        What the profiler saw, and what has to be said about it.
    """
    profile = _torch.memory_profile()
    with _torch.eager_instead_of_compiled(lambda: None), _torch.threads_watched() as threads, profile:
        _run(build, steps, Observer(Place(), real=True))
    unended = (_UNENDED,) if len(threads.started) > len(threads.ended) else ()
    return _torch.with_threads(_torch.Profile.of(profile), threads), unended


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _target(device: str | None) -> tuple[str, tuple[str, ...]]:
    if device is not None and str(device).lower() != HOST:
        raise DeviceError(
            f"device {device!r} to measure on",
            expected="'cpu': only allocations of the CPU are measured, by torch's profiler",
            do="Leave device out; on a machine with a GPU, tools/gpu/golden.py records what CUDA's allocator does",
        )
    return HOST, (CUDA_DIFFERS,) if device is None else ()


def _run(build: Build, steps: int, observer: Observer) -> tuple[int, Step]:
    """Build and run the step, each within a range of the profiler; return the tick when it was built, and the step."""
    with _torch.marker("build"):
        step = run_build(build, observer)
        observer.place.building = False
        observer.marks.mark_modules()
        gc.collect()
    built = observer.ledger.clock
    for number in range(steps):
        observer.place.step = number
        with _torch.marker(f"step{number}"):
            with located(observer, f"step {number + 1}"):
                step()
            observer.end_step()
            gc.collect()
    return built, step


def _marked(observer: Observer, outside: Outside) -> _torch.Dispatch:
    """Return the observer's dispatch, each op inside of a range of the profiler that carries its index."""

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        outside.before(func, args, kwargs)

        def run_marked(op: Any) -> Any:
            with _torch.marker(str(len(observer.notes) - 1)):
                return run(op)

        return observer.dispatch(func, args, kwargs, run_marked)

    return dispatch
