"""A run of a script that goes on through evaluation, checkpoints and further epochs, with shortened loaders."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from memplan._frames import callers
from memplan.errors import MemplanError
from memplan.integrations.scripts.lines import script_line
from memplan.integrations.scripts.loaders import Batches, Loaders
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.script_run import ScriptRun
from memplan.trace.program_facts import Ending, Facts, RunPart
from memplan.trace.recording.boundaries import Boundaries
from memplan.trace.recording.loading import ObjectNumbers
from memplan.trace.records import HOST

_PASSES = 2
"""Passes over the training data; the second shows which memory the first leaves allocated."""
_UPDATES = 8
"""Consecutive updates after which a training loop without a loader, which cannot be shortened, ends the run."""


class PhasedRun(ScriptRun):
    """A run of a script through its phases. Each part of it is a step of the recording.

    It ends with the script, or where a third pass over the training data begins, or after some updates in a row without
    a loader. With real tensors it runs to the script's end.
    """

    def __init__(
        self, request: Request, steps: int, boundaries: Boundaries, give_up: Callable[[MemplanError], NoReturn]
    ) -> None:
        super().__init__(request, steps, boundaries, give_up)
        self._folder = request.command.folder
        """Folder of the script's code."""
        self._to_the_end = request.batches is None
        """Whether the script runs to its end, also in an endless loop."""
        self._parts: list[RunPart] = []
        """Parts that have ended."""
        self._part = RunPart()
        """The part that runs."""
        self._data_sets = ObjectNumbers()
        """Numbers of the data sets."""
        self._passes: dict[int, int] = {}
        """Number of a data set -> passes over it in which a model was trained."""
        self._pass_trains = False
        """Whether a model was trained since the last pass over a loader began."""

    def _make_loaders(self, request: Request, steps: int) -> Loaders:
        """Return the loaders, shortened to the request's number of batches. For a card, batches repeat their shapes."""
        for_card = request.device not in (None, HOST)
        return Loaders(
            request.rules, idle_limit=None, watcher=self, folder=request.command.folder, really=request.really,
            most=request.batches, multiple=request.multiple, repeats=for_card and not request.really,
        )  # fmt: skip

    def facts(self) -> Facts:
        """Return the facts of this run, with its parts."""
        return replace(super().facts(), parts=tuple(self._parts))

    def before_batch(self, batches: Batches) -> None:
        """Begin a part from this batch to the next, or end the run if a third pass over training data begins."""
        number = self._data_sets.number_of(getattr(batches.loader, "dataset", batches.loader))
        begins = batches.progress.loaded == 0  # a pass
        if begins and not self._to_the_end and self._passes.get(number, 0) >= _PASSES:
            self._end_here("passes")
        size, last = batches.sizes
        self._begin(
            RunPart(
                where=batches.where, loader=number, loads=True, begins_pass=begins,
                length=batches.length, batch_size=size, last_batch=last,
            )
        )  # fmt: skip
        self._pass_trains = self._pass_trains and not begins

    def after_last_batch(self, batches: Batches) -> None:
        """Mark the part that `before_batch` began as one without a batch, and count the pass if it trained."""
        self._part = replace(self._part, exhausted=True)
        if self._pass_trains and self._part.loader is not None:
            self._passes[self._part.loader] = self._passes.get(self._part.loader, 0) + 1
            self._pass_trains = False

    def before_checkpoint(self, kind: Literal["save", "load"]) -> None:
        """Begin a part, once the script has called a model."""
        if self._built and not self._over and self._part.kind != kind:
            self._begin(RunPart(kind, script_line(self._folder)))

    def _before_call(self, module: nn.Module) -> None:
        """Count a call in the part that runs. Before it, begin a new part where `generate` starts or ends, after a
        checkpoint, and after an update; in a loop without a loader also where training follows other calls."""
        with_gradients = torch.is_grad_enabled()
        generates = not with_gradients and any(frame.f_code.co_name == "generate" for frame in callers())
        part = self._part
        if not self._built or part.kind in ("save", "load") or generates != (part.kind == "generate"):
            self._begin(
                replace(
                    RunPart("generate" if generates else "work", script_line(self._folder)), loader=part.loader,
                    length=part.length, batch_size=part.batch_size, last_batch=part.last_batch,
                )
            )  # fmt: skip
        else:
            is_updated = part.updates and self._step_is_complete
            starts_training = part.loader is None and part.calls and with_gradients and not part.training_calls
            if is_updated or starts_training:
                self._begin(RunPart(where=script_line(self._folder)))
        part = self._part
        trains = module.training and any(True for _ in module.parameters())  # a loss has no parameters
        self._part = replace(
            part, calls=part.calls + 1, training_calls=part.training_calls + (with_gradients and trains),
            graph_calls=part.graph_calls + (with_gradients and not trains),
        )  # fmt: skip
        self._pass_trains = self._pass_trains or self._part.trains

    def _on_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count an update in the part that runs."""
        super()._on_update(optimizer, args, kwargs)
        self._part = replace(self._part, updates=self._part.updates + 1)

    def _begin(self, part: RunPart) -> None:
        """End the part that runs and begin ``part``, or end the run in an endless loop or at the time limit."""
        if self._over:
            self._stop()
        if not self._built:
            self._built = True
            self._boundaries.built()
        else:
            self._end_step()
        self._step_is_complete = False
        self._part = part
        last = self._parts[-_UPDATES:]
        is_endless = len(last) == _UPDATES and all(part.updates and part.loader is None for part in last)
        if is_endless and not self._to_the_end:
            self._end("steps")
        if time.monotonic() > self._deadline:
            self._end("time")

    def _end_here(self, ending: Ending) -> None:
        """End the part that runs, and the run."""
        if self._over:
            self._stop()
        self._end_step()
        self._end(ending)

    def _end_step(self) -> None:
        self._parts.append(self._part)
        super()._end_step()
