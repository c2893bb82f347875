"""In the script's process: run it, recorded or for real, with its effects held back."""

from __future__ import annotations

import errno
import inspect
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from memplan import _torch
from memplan.errors import InputError, MemplanError, StepError
from memplan.integrations.scripts.planned import planned
from memplan.integrations.scripts.request import Ran, Request
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


def run_request(request: Request, view: View, give_up: GiveUp) -> Ran:
    """Run a script as a request asks and return its steps and what else it did.

    Args:
        request: what to run, and for which device.
        view: the files as the script sees them.
        give_up: called with the error of a script that does not let itself be ended.

    Raises:
        InputError: for the largest batch, the script uses no loader of torch; for a plan, it trains no model.
    """
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
    ran = Ran(request.command, trace, script.facts(trace))
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
        note = rank_note(request.world, request.rank, len(_torch.rank_groups()))
        return replace(trace, notes=(*trace.notes, note))
    return record(
        script, device=request.device, steps=request.steps, assume=dict(request.assume), cudnn=request.cudnn,
        world=request.world, rank=request.rank,
    )  # fmt: skip


_BATCHES = 6, 96
"""Lengths of shortened loaders: the first, and the last that is tried where a pass makes fewer than two updates. Where
a batch is fetched ahead and the first has nothing to concatenate with, three of six are alike."""


def _record_phases(request: Request, view: View, give_up: GiveUp) -> tuple[Script, Trace]:
    """Record a script through its phases, with loaders so long that gradients accumulate for two updates in each."""
    batches = _BATCHES[0]
    while True:
        script = Script(replace(request, batches=batches), view, give_up)
        trace = _trace_of(script, request)
        if batches >= _BATCHES[1] or _has_two_updates(script.facts(trace).parts, batches):
            return script, trace
        batches *= 4


def _has_two_updates(parts: Sequence[RunPart], batches: int) -> bool:
    """Return whether the first pass over training data made two updates, or cannot be made longer."""
    data = next((part.loader for part in parts if part.trains and part.loader is not None), None)
    own = [part for part in parts if part.loader == data]
    end = next((number for number, part in enumerate(own) if part.exhausted), len(own))
    updates = sum(part.updates for part in own[: end + 1])
    return data is None or updates >= 2 or (own[0].length or batches) <= batches


def _script_error(error: StepError, request: Request) -> StepError:
    """Return the error of a step with advice for a script; an error that already has other advice stays as it is."""
    if error.expected != RUNS:
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
    missing = isinstance(cause, OSError)
    data = "; if only its data are not here, describe the batch: --input 32x3x224x224"
    if missing and (isinstance(cause, _OFFLINE_ERRORS) or cause.errno in _UNREACHABLE):
        do = "The network is held back here; let the script use it: --allow-writes; else run it under python"
    elif missing and (cause.errno in (errno.EACCES, errno.EROFS) or "ermission denied" in str(cause)):
        do = "If it is a library that writes this file, let it: --allow-writes; else run it under python"
    else:
        do = "Run it under python" + data * missing + "; --measure runs it here for real"
    if _torch.unanswered_collectives():
        operation = _torch.unanswered_collectives()[0]
        do = f"{operation} got nothing from the rank that sends: record that one, as with --rank 0. {do}"
    script_error = StepError(error.found, expected="a script that runs as far as its second update", do=do)
    script_error.layer, script_error.where = error.layer, error.where
    return script_error


def _torchrun_variable(cause: BaseException) -> str | None:
    """Return the variable of torchrun's that a line failed to read, as in ``int(os.environ.get("LOCAL_RANK"))``."""
    if not isinstance(cause, (KeyError, TypeError, ValueError)):
        return None
    frames = traceback.extract_tb(cause.__traceback__)
    texts = [*map(str, cause.args), *(str(frame.line) for frame in frames[-2:])]
    names = sorted(_torch.TORCHRUN_VARIABLES, key=len, reverse=True)
    return next((name for name in names if name not in os.environ and any(name in text for text in texts)), None)


class _ScriptOfBatch(Programs):
    """A script as a function of its batch size, for the search for the largest one."""

    def __init__(self, request: Request, view: View, give_up: GiveUp) -> None:
        self._request, self._view, self._give_up = request, view, give_up
        self.__qualname__ = request.command.name
        self.__signature__ = inspect.signature(lambda batch: None)

    def __call__(self) -> None:
        """Do nothing: a subject of a search has to be callable, and its parameters are those of `program`."""

    def program(self, **arguments: Any) -> Script:
        """Return the script with loaders of ``batch`` samples at a time."""
        request = replace(self._request, rules=replace(self._request.rules, batch=arguments["batch"]))
        return Script(request, self._view, self._give_up)
