"""Observe: run the step for real and write down what it did allocate."""

from __future__ import annotations

import os

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import DeviceError, UsageError
from memplan.trace.dry_run.process import run_dry
from memplan.trace.measure_run import StepMarks, named_run
from memplan.trace.recording.boundaries import Runs
from memplan.trace.recording.followed.line_marks import LineClock
from memplan.trace.recording.followed.line_watch import LineWatch, watching
from memplan.trace.recording.join_events import join
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.session import (
    CUDA_DIFFERS,
    check_steps,
    of_outside,
    random_kept,
    run_steps,
    undisturbed,
)
from memplan.trace.records import HOST
from memplan.trace.trace import Trace


def measure(
    build: Runs,
    *,
    device: str | None = None,
    steps: int = 2,
    dry: bool = False,
    environment: str | os.PathLike[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
) -> Trace:
    """Run a step on this machine and return what it allocated.

    The step runs twice, each time from ``build`` on. Births, deaths and bytes are the allocator's own events of a run
    that nothing but torch's profiler watches; ops, layers and causes come from a run under a dispatch mode before, and
    are joined to them. Between the two, random states are put back, and what ops changed of tensors, gradients and
    optimizers from outside of ``build``. Memory that was there before does not count.

    ``dry`` runs the step on the CUDA build of torch in a process that sees an emulated card: torch's own code chooses
    and allocates as on a real one, and kernels do nothing. Losses are zeros, and a value that decides a branch is in
    the trace's assumptions. If ``build`` puts nothing on CUDA, everything is made on the card.

    Args:
        build: as for `record`. It is called twice, and each step that it returns ``steps`` times.
        device: ``"cpu"`` or None; for a dry run, the card: ``"h100"``.
        steps: how often the step runs.
        dry: whether to run it on an emulated card. Linux on x86-64, with a C compiler.
        environment: of a dry run, the virtual environment with the CUDA build of torch; this one where None.
        snapshot: of a dry run, a file that torch's own snapshot of its memory history is written to.

    Raises:
        StepError: ``build`` or the step raised, or ``build`` did not return a step.
        DeviceError: a device that this machine or this version does not have; no CUDA build of torch, or no compiler.
        UsageError: options of a dry run without ``dry``; a ``build`` that cannot be sent to another process.

    Example:
        >>> memplan.simulate(memplan.measure(build)).peak_allocated
        >>> memplan.simulate(memplan.measure(build, device="h100", dry=True)).peak_reserved
    """
    check_steps(steps)
    if dry:
        return run_dry(build, device=device, steps=steps, environment=environment, snapshot=snapshot)
    _check_dry(environment, snapshot)
    target, notes = _target(device)
    with undisturbed():
        with random_kept():
            named = named_run(build, steps)
        plain, unended, watch = _plain(build, steps)
    joined = join(named.parts, named.observer.ledger.entries, named.record, plain, lines=watch.rows())
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
        (), notes, forms=joined.forms, returned=joined.returned, lines=joined.lines,
    )  # fmt: skip


_UNENDED = "a thread that the step started is still running: what it allocates is not measured"


def _plain(build: Runs, steps: int) -> tuple[_torch.Profile, tuple[str, ...], LineWatch]:
    """Run the step as it is, seen by the profiler alone, with the threads that it starts.

    Returns:
        What the profiler saw, what has to be said about it, and the lines of what is followed.
    """
    profile = _torch.memory_profile()
    with _torch.eager_instead_of_compiled(lambda: None), _torch.threads_watched() as threads, profile:
        observer = Observer(Place(), real=True)
        marks = StepMarks(observer)
        with watching(LineClock()) as watch:
            marks.last = watch.stop
            run_steps(build, steps, observer, marks)
    unended = (_UNENDED,) if len(threads.started) > len(threads.ended) else ()
    return _torch.with_threads(_torch.Profile.of(profile), threads), unended, watch


def _check_dry(environment: object, snapshot: object) -> None:
    """Refuse what only a dry run has."""
    if environment is not None or snapshot is not None:
        option = "environment" if environment is not None else "snapshot"
        raise UsageError(f"{option} without dry=True", expected="it of a dry run alone", do="Add dry=True, or leave it")


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _target(device: str | None) -> tuple[str, tuple[str, ...]]:
    if device is not None and str(device).lower() != HOST:
        raise DeviceError(
            f"device {device!r} to measure on",
            expected="'cpu': only allocations of the CPU are measured, by torch's profiler",
            do="Leave device out; or add dry=True (--dry), which runs the step on an emulated card",
        )
    return HOST, (CUDA_DIFFERS,) if device is None else ()
