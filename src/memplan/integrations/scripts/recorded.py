"""In the script's process: run it, recorded or for real, with its effects held back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

from memplan.errors import MemplanError
from memplan.integrations.scripts.held_calls import OFFLINE
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.script import Script
from memplan.trace.measure import measure
from memplan.trace.program_facts import Facts
from memplan.trace.record import record
from memplan.trace.recording.followed.line_watch import following
from memplan.trace.trace import Trace


def recorded(request: Request, world: str, give_up: Callable[[MemplanError], NoReturn]) -> tuple[Trace, Facts]:
    """Run a script as a request asks and return its steps and what else it did.

    Args:
        request: what to run, and for which device.
        world: an empty folder that its files go to.
        give_up: called with the error of a script that does not let itself be ended.
    """
    script = Script(request, world, give_up)
    if not request.writes:
        os.environ.update({name: value for name, value in OFFLINE.items() if name not in os.environ})
    with following(request.lines):
        if request.really:
            trace = measure(script, device=request.device, steps=request.steps)
        else:
            assume = dict(request.assume)
            trace = record(script, device=request.device, steps=request.steps, assume=assume, cudnn=request.cudnn)
    assert script.facts is not None, "it has run"
    return trace, script.facts
