"""Measures a step: runs it for real and returns what it allocated."""

from __future__ import annotations

import os
import re

import torch

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.devices import Device
from memplan.errors import DeviceError, UsageError
from memplan.trace.card_run import contribution
from memplan.trace.card_run.observed import observed
from memplan.trace.dry_run.process import run_dry
from memplan.trace.measure_run import StepMarks, compiled_as_torch_is, measurement, named_run
from memplan.trace.recording.boundaries import Runs
from memplan.trace.recording.causes import trace_of
from memplan.trace.recording.followed.line_marks import LineClock
from memplan.trace.recording.followed.line_watch import LineWatch, watching
from memplan.trace.recording.join_events import join
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.recording.session import (
    CUDA_DIFFERS,
    called,
    check_steps,
    note_about_outside,
    own_card,
    random_kept,
    recording_runs,
    recording_suspended,
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
    contribute: str | os.PathLike[str] | None = None,
) -> Trace:
    """Run a step on this machine, and return the trace of its allocations.

    The step runs twice, each time from ``build`` on. Allocations and frees are the allocator's own events in a run
    under torch's profiler alone; ops, layers and causes come from an earlier run under a dispatch mode, and are joined
    to the events. Between the two runs, random states are restored, and tensors, gradients and optimizers from outside
    of ``build`` that ops changed. Memory allocated before does not count.

    ``device="cuda"`` runs the step on this machine's GPU: events are those of torch's memory history, peaks torch's own
    counters. There, a step's changes of tensors from outside of ``build`` are not undone.

    ``dry`` runs the step on the CUDA build of torch in a process with an emulated card: torch's own code chooses
    kernels and allocates as on a real card, and kernels do nothing. Losses are zeros, and a value that decides a branch
    is in the trace's assumptions. If ``build`` puts nothing on CUDA, everything is created on the card.

    Args:
        build: as for `record`. It is called twice, and each step that it returns ``steps`` times.
        device: ``"cpu"`` or None; ``"cuda"`` for this machine's GPU; for a dry run, the card: ``"h100"``.
        steps: how often the step runs.
        dry: whether to run on an emulated card. Linux on x86-64, with a C compiler.
        environment: for a dry run, the virtual environment with the CUDA build of torch; by default the current one.
        snapshot: on a card, the file to which to write torch's own snapshot of its memory history.
        contribute: on a GPU, the file to which to write the allocator's events with shapes and sizes, without names.

    Raises:
        StepError: ``build`` or the step raised, or ``build`` did not return a step.
        DeviceError: a device that this machine or this version does not have; no CUDA build of torch, or no compiler.
        UsageError: options for a card on the CPU; a ``build`` that cannot be sent to another process.

    Example:
        >>> measured = memplan.simulate(memplan.measure(build)).peak_allocated
        >>> measured == memplan.simulate(memplan.record(build)).peak_allocated
        True
        >>> memplan.measure(build, device="h100", dry=True, environment="~/cuda-env")  # doctest: +SKIP
    """
    check_steps(steps)
    # suspended, since the step itself may measure something
    with recording_suspended(), called("memplan.measure", profiles=not dry):
        if dry:
            _refuse("with dry=True", contribute=contribute)
            return run_dry(build, device=device, steps=steps, environment=environment, snapshot=snapshot)
        _refuse("without dry=True", environment=environment)
        if is_cuda(device):
            return _on_card(build, own_gpu(), steps, snapshot, contribute)
        _refuse("without a card", snapshot=snapshot, contribute=contribute)
        return _on_cpu(build, device, steps)


def _on_cpu(build: Runs, device: str | None, steps: int) -> Trace:
    """Measure on this machine's CPU: join the ops of a run under a dispatch mode to the allocator's events of a run
    without the mode. Raises DeviceError if ``device`` is neither the CPU nor None."""
    if device is not None and str(device).lower() != HOST:
        raise DeviceError(
            f"device {device!r} to measure on",
            expected="'cpu', or 'cuda' where a GPU is",
            do="Leave it out, name this machine's GPU (device='cuda'), or emulate the card: memplan measure --dry "
            "--device h100 TARGET (dry=True)",
        )
    notes: tuple[str, ...] = (CUDA_DIFFERS,) if device is None else ()
    with undisturbed(real=True):
        with random_kept():
            named = named_run(build, steps)
        profile, unended, watch = _profiled_run(build, steps)
    joined = join(named.parts, named.entries, named.record, profile, lines=watch.rows())
    notes += named.notes + unended + note_about_outside(joined.outside)
    if joined.unpaired:
        notes += (
            f"{format_bytes(joined.unpaired)} have no layer and no cause: they are allocated only where nothing "
            f"names the ops, in {_first_three(joined.differing_calls)}",
        )
    elif joined.lost:
        notes += (f"{format_bytes(joined.lost)} of allocations could not be joined to an op or a tensor",)
    return trace_of(joined.parts, origin="measured", device=HOST, notes=notes)


_UNENDED = "a thread that the step started is still running: what it allocates is not measured"


def _profiled_run(build: Runs, steps: int) -> tuple[_torch.Profile, tuple[str, ...], LineWatch]:
    """Run the step without a dispatch mode, under torch's profiler alone.

    Returns:
        The profile, including threads that the step starts; notes about it; the watch on lines of followed functions.
    """
    profile = _torch.memory_profile()
    with compiled_as_torch_is(build), _torch.threads_watched() as threads, profile:
        place = Place()
        observer = Observer(place, real=True)
        marks = StepMarks(observer)
        with watching(LineClock()) as watch, recording_runs(measurement(place)):
            marks.after_last_step = watch.stop
            run_steps(build, steps, observer, marks)
    unended = (_UNENDED,) if len(threads.started) > len(threads.ended) else ()
    return _torch.with_threads(_torch.Profile.of(profile), threads), unended, watch


def _refuse(why: str, **options: object) -> None:
    """Raise UsageError if any of the options is not None. ``why`` says when they have no meaning: "without a card"."""
    used = [name for name, value in options.items() if value is not None]
    if used:
        raise UsageError(
            f"{' and '.join(used)} {why}", expected="none there", do="Leave it out, or name the card: docs/measure.md"
        )


def is_cuda(device: str | None) -> bool:
    """Return whether ``device`` names this machine's GPU ("cuda", "cuda:0", "gpu")."""
    return device is not None and re.fullmatch(r"cuda(:\d+)?|gpu", str(device).strip().lower()) is not None


def own_gpu() -> Device:
    """Return this machine's GPU. Raises DeviceError if there is no GPU that torch sees."""
    card = own_card()
    if card is None:
        why = "is built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise DeviceError(
            f"no GPU here: torch {torch.__version__} {why}",
            expected="a machine with a GPU that torch sees",
            do="Run it on an emulated card: memplan measure --dry --device h100 TARGET (dry=True, device='h100')",
        )
    return card


def _on_card(
    build: Runs, card: Device, steps: int, snapshot: str | os.PathLike[str] | None,
    contribute: str | os.PathLike[str] | None,
) -> Trace:  # fmt: skip
    """Run the steps on the card, and return the trace of its allocator's events."""
    file = None if snapshot is None else os.path.abspath(snapshot)
    run = observed(build, steps, snapshot_file=file, snapshot=contribute is not None)
    if contribute is not None:
        contribution.write(os.fspath(contribute), contribution.contribution(run))
    return trace_of(
        run.step.parts, origin="measured", device=card.name, notes=run.notes, calls=run.step.calls,
        counters=run.counters,
    )  # fmt: skip


def _first_three(names: tuple[str, ...]) -> str:
    """Return the first three names for a message, with the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
