"""A script as a `Program`, run unchanged: its steps, or its phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from torch import nn

from memplan.errors import MemplanError
from memplan.integrations.scripts.checkpoints import Checkpoints
from memplan.integrations.scripts.effects import Effects
from memplan.integrations.scripts.imports import library_imports_unrecorded
from memplan.integrations.scripts.model_call import ModelCall
from memplan.integrations.scripts.one_process import in_one_process
from memplan.integrations.scripts.phased_run import PhasedRun
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.sandbox.messages import LISTED
from memplan.integrations.scripts.script_run import ScriptRun
from memplan.integrations.scripts.views import View
from memplan.trace.program_facts import Facts
from memplan.trace.recording.boundaries import Boundaries
from memplan.trace.trace import Trace


class Script:
    """A script, run unchanged until its optimizers have made some updates.

    A step ends where the next begins: with the first batch loaded, or the first model called, after each optimizer has
    been updated once more. So what follows an update (a scheduler, an average of weights, logging) is part of it.
    """

    def __init__(self, request: Request, view: View, give_up: Callable[[MemplanError], NoReturn]) -> None:
        self._request = request
        self._view = view
        """The files, as the script sees them."""
        self._give_up = give_up
        """Called with the error if a script does not end."""
        self._began = time.monotonic()
        """Monotonic time of the start."""
        self._longest_run = 0.0
        """Seconds of the longest run so far."""
        self._runs: list[tuple[int, Facts]] = []
        """Steps and facts of each run: runs differ in the branches that they take."""
        self.calls: list[ModelCall | None] = []
        """First training call of a model in each run, if a plan is requested."""

    @property
    def title(self) -> str:
        """Return the script's name for messages."""
        return self._request.command.name

    @property
    def has_time(self) -> bool:
        """Return whether a run as long as the longest would end within the time limit, with half of it to spare."""
        return time.monotonic() + 1.5 * self._longest_run < self._began + self._request.limit

    def facts(self, trace: Trace) -> Facts:
        """Return the facts of the run that a trace records: the first with as many steps."""
        return next(facts for steps, facts in self._runs if steps == len(trace.steps))

    def call(self, trace: Trace) -> ModelCall | None:
        """Return the first training call of a model in the run that a trace records, or None."""
        calls = [call for call in self.calls if call is not None]
        of_trace = [call for call in calls if call.end == trace.end]
        return of_trace[0] if of_trace else next(reversed(calls), None)

    def with_fit(self, fits: Callable[[nn.Module], None]) -> Script:
        """Return the script with ``fits`` called on its model before the first training call."""
        return Script(replace(self._request, fits=fits), self._view, self._give_up)

    def run_steps(self, steps: int, boundaries: Boundaries) -> None:
        """Run the script for ``steps`` steps, or to its end. Store the facts about the run, with the effects that were
        prevented, and the first training call."""
        request, view, began = self._request, self._view, time.monotonic()
        kind = PhasedRun if request.phases else ScriptRun
        run = kind(request, steps, boundaries, self._give_up)
        folder = request.command.folder
        effects = Effects(folder)
        checkpoints = Checkpoints(effects, values=request.really, writes=view.protects, before=run.before_checkpoint)
        with (
            library_imports_unrecorded(folder),
            view.one_run(effects),
            checkpoints.hooked(),
            in_one_process(folder, values=request.really, world=request.world, rank=request.rank),
            effects.auditing(),
        ):
            run.run()
        self._longest_run = max(self._longest_run, time.monotonic() - began)
        self.calls.append(run.calls.call)
        changes = view.changes()
        rows = effects.rows(changes.rows, ignored_folders=view.own, writes=request.writes)
        unlisted = changes.more + max(len(rows) - LISTED, 0)
        facts = replace(run.facts(), held=rows[:LISTED], unlisted=unlisted, really=request.really)
        self._runs.append((run.steps_made, facts))
