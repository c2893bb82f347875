"""Run a script in its own process, recorded or for real, with its effects sandboxed."""

from __future__ import annotations

import errno
import inspect
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

from memplan import _torch
from memplan.errors import InputError, MemplanError, StepError
from memplan.integrations.scripts.planned import planned
from memplan.integrations.scripts.request import Request, RunResult
from memplan.integrations.scripts.script import Script
from memplan.integrations.scripts.views import View
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.largest import find_largest
from memplan.trace.measure import measure
from memplan.trace.program_facts import RunPart
from memplan.trace.record import record
from memplan.trace.recording.boundaries import Programs
from memplan.trace.recording.followed.line_watch import following
from memplan.trace.recording.place import format_frame, frame_of_error
from memplan.trace.recording.session import RUNS, rank_note
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace

GiveUp = Callable[[MemplanError], NoReturn]
_OFFLINE = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Switches of libraries that would try the network again and again."""
_OFFLINE_ERRORS = (ConnectionError, socket.gaierror)
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)


def run_request(request: Request, view: View, give_up: GiveUp) -> RunResult:
    """Run a script, and return its trace, the facts about the run, and the largest batch or plan if requested.
    ``give_up`` is called with the error of a script that catches the exception that ends it. Raises InputError for the
    largest batch of a script without a loader of torch, or the plan of a script without a model."""
    if not request.writes:
        os.environ.update({name: value for name, value in _OFFLINE.items() if name not in os.environ})
    script = Script(request, view, give_up)
    try:
        with following(request.lines):
            if request.phases and not request.really:
                script, trace = _record_phases(request, view, give_up)
            else:
                trace = _trace_of(script, request)
    except StepError as error:
        if error.__cause__ is None:
            error.where = error.where or format_frame(frame_of_error(error))
            raise
        raise _script_error(error, request) from error.__cause__
    ran = RunResult(request.command, trace, script.facts(trace))
    if request.room is None:
        return ran
    if request.plan is not None:
        return replace(ran, fitting=planned(trace, script, request))
    if ran.facts.batch_size is None:
        raise InputError(
            f"{script.title} loads no batch by a torch.utils.data.DataLoader",
            expected="a loader, whose batches are made larger and smaller",
            do="Run it with its own argument for the batch: memplan run train.py --batch-size 64",
        )
    batches = _ScriptOfBatch(request, view, give_up)
    subject = Subject(batches, StepOptions(), {"batch": ran.facts.batch_size})
    largest = find_largest(
        subject, "batch", request.room, most=request.most, settings=request.settings, title=script.title
    )
    return replace(ran, largest=largest)


def _trace_of(script: Script, request: Request) -> Trace:
    """Measure or record a script."""
    if request.really:
        trace = measure(script, device=request.device, steps=request.steps, contribute=request.contribute)
        if request.world is None:
            return trace
        note = rank_note(request.world, request.rank, len(_torch.rank_groups()), trace)
        return replace(trace, notes=(*trace.notes, note))
    return record(
        script, device=request.device, steps=request.steps, assume=dict(request.assume), cudnn=request.cudnn,
        world=request.world, rank=request.rank,
    )  # fmt: skip


_BATCHES = 6, 96
"""Smallest and largest length to which loaders are shortened; larger ones are tried if a pass makes fewer than two
updates. With a batch fetched ahead and no tensor for the first to be concatenated with, three of six batches match."""
_PERIODS = 4
"""Updates of a pass that is recorded again because its last update accumulated another number of batches than in a
whole run. The first update creates the optimizer's states, and the last of a loader that fetches ahead cannot be
repeated."""


def _record_phases(request: Request, view: View, give_up: GiveUp) -> tuple[Script, Trace]:
    """Record a script through its phases; return the script that was recorded, and its trace. Loaders are shortened,
    but long enough for two updates in each pass. The last update accumulates as many batches as in a whole run."""
    shortest, longest = _BATCHES
    batches, multiple = shortest, 1
    while True:
        script = Script(replace(request, batches=batches, multiple=multiple), view, give_up)
        trace = _trace_of(script, request)
        first_pass = _first_pass(script.facts(trace).parts)
        length = first_pass[0].length if first_pass else None
        if length is None or length <= batches or multiple > 1:
            return script, trace
        updates = [number for number, part in enumerate(first_pass) if part.updates]
        accumulated = _accumulated(first_pass, updates)
        if len(updates) < 2 and batches < longest:
            batches *= 4
        elif (length - batches) % accumulated:
            batches, multiple = max(batches, min(_PERIODS * accumulated, longest)), accumulated
        else:
            return script, trace


def _first_pass(parts: Sequence[RunPart]) -> list[RunPart]:
    """Return the parts of the first pass over the training data, without phases that interrupt it; [] if there is no
    training with a loader."""
    loader = next((part.loader for part in parts if part.trains and part.loader is not None), None)
    of_loader = [part for part in parts if loader is not None and part.loader == loader]
    last = next((number for number, part in enumerate(of_loader) if part.exhausted), len(of_loader))
    return of_loader[: last + 1]


def _accumulated(parts: Sequence[RunPart], updates: Sequence[int]) -> int:
    """Return the number of batches whose gradients are accumulated for an update. ``updates`` are the indices of the
    parts of a pass with an update."""
    loads = [sum(part.loads for part in parts[last + 1 : this + 1]) for last, this in pairwise([-1, *updates])]
    if loads and parts[-1].exhausted and parts[-1].trains:  # the first update came after a batch was fetched ahead
        loads[0] -= 1
    return max(loads, default=1)


def _script_error(error: StepError, request: Request) -> StepError:
    """Return the error of a step with advice for a script; an error with advice of its own is returned unchanged."""
    if error.expected != RUNS:  # what errors expect that user code raised
        return error
    cause = error.__cause__
    variable = None if request.world is not None or cause is None else _torchrun_variable(cause)
    if variable is not None:
        started = StepError(
            f"the script reads {variable}, which torchrun sets", expected="the number of ranks",
            do="It starts under torchrun: say how many ranks there are, as in --world 8",
        )  # fmt: skip
        started.layer, started.where = error.layer, error.where
        return started
    do = "Run it under python; --measure runs it here for real"
    if isinstance(cause, OSError):
        if isinstance(cause, _OFFLINE_ERRORS) or cause.errno in _UNREACHABLE:
            do = "The network is held back here; let the script use it: --allow-writes; else run it under python"
        elif cause.errno in (errno.EACCES, errno.EROFS) or "ermission denied" in str(cause):
            do = "If it is a library that writes this file, let it: --allow-writes; else run it under python"
        else:
            do = (
                "Run it under python; if only its data are not here, describe the batch: --input 32x3x224x224; "
                "--measure runs it here for real"
            )
    unanswered = _torch.unanswered_collectives()
    if unanswered:
        do = f"{unanswered[0]} got nothing from the rank that sends: record that one, as with --rank 0. {do}"
    script_error = StepError(error.found, expected="a script that runs as far as its second update", do=do)
    script_error.layer, script_error.where = error.layer, error.where
    return script_error


def _torchrun_variable(cause: BaseException) -> str | None:
    """Return the unset variable of torchrun that an error is about, as in ``int(os.environ.get("LOCAL_RANK"))``; None
    for other errors."""
    if not isinstance(cause, (KeyError, TypeError, ValueError)):
        return None
    frames = traceback.extract_tb(cause.__traceback__)
    texts = [*map(str, cause.args), *(str(frame.line) for frame in frames[-2:])]
    names = sorted(_torch.TORCHRUN_VARIABLES, key=len, reverse=True)
    return next((name for name in names if name not in os.environ and any(name in text for text in texts)), None)


class _ScriptOfBatch(Programs):
    """A script as a function of its batch size, for the search for the largest batch."""

    def __init__(self, request: Request, view: View, give_up: GiveUp) -> None:
        self._request, self._view, self._give_up = request, view, give_up
        self.__qualname__ = request.command.name  # its name in messages
        self.__signature__ = inspect.signature(lambda batch: None)  # the search looks for an argument of this name

    def __call__(self) -> None:
        """Do nothing: a subject of a search has to be callable, and its parameters are those of `program`."""

    def program(self, **arguments: Any) -> Script:
        """Return the script with the batch size ``batch``."""
        request = replace(self._request, rules=replace(self._request.rules, batch=arguments["batch"]))
        return Script(request, self._view, self._give_up)
