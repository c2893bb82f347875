"""Observe: run the step for real and write down what it did allocate."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import DeviceError
from memplan.trace.recording.causes import finish
from memplan.trace.recording.join_events import join
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.session import COMPILED, CUDA_DIFFERS, Build, check_steps, located, run_build, undisturbed
from memplan.trace.records import HOST
from memplan.trace.trace import Trace


def measure(build: Build, *, device: str | None = None, steps: int = 2) -> Trace:
    """Run a step on this machine and return what it allocated.

    Births, deaths and bytes are the allocator's own events, as torch's profiler records them; ops, layers and causes
    come from a dispatch mode and are joined to them. Memory that was there before the call is not part of it.

    Args:
        build: as for `record`. It is called once, and the step that it returns ``steps`` times.
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
    place = Place()
    observer = Observer(place, real=True)
    profile = _torch.memory_profile()
    mode = _torch.EagerMode(_marked(observer))
    compiled: list[str] = []
    with undisturbed(), ExitStack() as stack:
        with mode:
            observer.calibrate()
        stack.enter_context(place.following())
        stack.enter_context(_torch.eager_instead_of_compiled(lambda: compiled.append(COMPILED)))
        with profile, mode:
            with _torch.marker("build"):
                step = run_build(build, observer)
                place.building = False
                observer.marks.mark_modules()
                gc.collect()
            built = observer.ledger.clock
            for number in range(steps):
                place.step = number
                with _torch.marker(f"step{number}"):
                    with located(observer, f"step {number + 1}"):
                        step()
                    observer.end_step()
                    gc.collect()
        observer.ledger.close()
        record = _torch.Profile(profile)
        parts = finish(observer, built)
        entries = observer.ledger.entries
        del step
    joined = join(parts, entries, record, steps)
    notes += tuple(dict.fromkeys(compiled))
    if joined.lost:
        notes += (f"{format_bytes(joined.lost)} of allocations could not be joined to an op or a tensor",)
    return Trace(
        "measured", target, torch.__version__, joined.ops, joined.storages, joined.layers, joined.steps, joined.end,
        (), notes, forms=joined.forms, returned=joined.returned,
    )  # fmt: skip


def _target(device: str | None) -> tuple[str, tuple[str, ...]]:
    if device is not None and str(device).lower() != HOST:
        raise DeviceError(
            f"device {device!r} to measure on",
            expected="'cpu': only allocations of the CPU are measured, by torch's profiler",
            do="Leave device out; on a machine with a GPU, tools/gpu/golden.py records what CUDA's allocator does",
        )
    return HOST, (CUDA_DIFFERS,) if device is None else ()


def _marked(observer: Observer) -> _torch.Dispatch:
    """Return the observer's dispatch, each op inside of a range of the profiler that carries its index."""

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        def run_marked(op: Any) -> Any:
            with _torch.marker(str(len(observer.notes) - 1)):
                return run(op)

        return observer.dispatch(func, args, kwargs, run_marked)

    return dispatch
