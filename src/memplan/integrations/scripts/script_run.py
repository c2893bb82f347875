"""A run of a script: where its steps begin and end is seen from its optimizers, its loaders and its models."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memplan import _torch
from memplan.errors import MemplanError, StepError
from memplan.integrations.scripts.lines import script_line
from memplan.integrations.scripts.loaders import Batches, Loaders
from memplan.integrations.scripts.model_call import CallWatch
from memplan.integrations.scripts.request import Request, ScriptEnded
from memplan.trace.program_facts import Ending, Facts
from memplan.trace.recording.boundaries import Boundaries
from memplan.trace.recording.session import is_suspended

_RARE = 8
"""Updates by an optimizer, as a multiple of the requested ones, after which steps no longer wait for slower
optimizers."""
_MAX_CALLS_WITHOUT_UPDATE = 256
"""Batches or model calls without an update after which the run ends."""
_ROLLOUT_FACTOR = 16
"""Multiple of that limit for calls without gradients once an optimizer exists: a rollout, or a first validation."""
_CAUGHT = 50
"""Times that a script may catch the exception that ends it."""


class _Over(BaseException):
    """All requested steps were recorded. Not an Exception, so that handlers of the script let it through."""


class ScriptRun:
    """A run of a script until its optimizers have made the requested updates."""

    def __init__(
        self, request: Request, steps: int, boundaries: Boundaries, give_up: Callable[[MemplanError], NoReturn]
    ) -> None:
        self._command = request.command
        self._steps = steps
        self._boundaries = boundaries
        self._give_up = give_up
        self._deadline = time.monotonic() + request.limit
        """Monotonic time after which the run ends at the next boundary."""
        self._loaders = self._make_loaders(request, steps)
        """The script's loaders, whose batches are boundaries."""
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Number of updates of each live optimizer."""
        self._models: list[nn.Module] = []
        """Models that were called, referenced until the layers have their names."""
        self._running: list[nn.Module] = []
        """Stack of running modules, outermost first."""
        self.steps_made = self._last_updates = 0
        """Steps that have ended, and updates that every optimizer has made (`_common_updates`)."""
        self._calls_since_update = 0.0
        """Batches and outermost calls since the last update of an optimizer; those of a rollout count less."""
        self._built = self._step_is_complete = self._over = False
        """Whether the build has ended; whether an update has completed the step, which the next boundary ends; whether
        the run is over."""
        self._ending: Ending | None = None
        """Why the run ended; None before its end."""
        self._exit_code: int | str | None = None
        """What the script passed to ``sys.exit``."""
        self._times_stopped = 0
        """How often `_Over` was raised in the script's code."""
        self.calls = CallWatch(request.command.folder, lambda: boundaries.tick, request.fits)
        """Stores the first training call of a model, and the ticks of calls and updates."""
        self._stores_call = request.plan is not None or request.fits is not None
        """Whether `calls` is to do so, for a plan."""

    def _make_loaders(self, request: Request, steps: int) -> Loaders:
        """Return the script's loaders; one on which no model is trained may yield ``steps`` batches."""
        return Loaders(request.rules, steps, self, request.command.folder, really=request.really)

    def before_batch(self, batches: Batches) -> None:
        """Called before a loader returns a batch, which is a boundary between steps."""
        self._at_boundary()

    def after_last_batch(self, batches: Batches) -> None:
        """Called when a loader has no further batch."""

    def before_checkpoint(self, kind: Literal["save", "load"]) -> None:
        """Called before a checkpoint is saved or loaded."""

    def facts(self) -> Facts:
        """Return what this run shows by itself: how it ended, its updates, exit code and batches, and absent data sets.

        The sandbox's part is empty: prevented effects and printed lines.
        """
        loaders = self._loaders
        return Facts(
            self._ending or "script", self._last_updates, self._exit_code, loaders.batches(), held=(), lines=0,
            absent=tuple(loaders.absent),
        )  # fmt: skip

    def run(self) -> None:
        """Run the script. Raises StepError if it ended before its first step."""
        try:
            with self._hooks():
                self._command.execute()
        except _Over:
            return
        except KeyboardInterrupt:  # Ctrl-C does not reach this process
            raise StepError(
                f"{self._command.name} interrupted itself (KeyboardInterrupt)",
                expected="a script that runs as far as its second update",
                do="Run it under python",
                where=script_line(self._command.folder),
            ) from None
        except SystemExit as error:
            self._ending = self._ending or "exit"
            self._exit_code = error.code
        if self._ending is None:
            self._ending = "script"
        if not self._over:
            self._end_early()

    def _end_early(self) -> None:
        """End a run with fewer steps than requested."""
        if not self._models and not self._optimizers:
            raise ScriptEnded(self._command.name, self._exit_code)
        if not self._built:
            self._boundaries.built()
        self._end_step()
        self._finish()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Within this context every optimizer, every module and every loader of the script reports to this run."""
        initialize = torch.optim.Optimizer.__init__

        def initialize_and_count(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            """Construct an optimizer, and count its updates from then on."""
            initialize(optimizer, *args, **kwargs)
            if is_suspended():  # memplan's own, with which it plans or proves a step
                return
            self._optimizers.setdefault(optimizer, 0)
            self.calls.optimizer_created(optimizer)

        with ExitStack() as stack:
            for handle in (
                module_hooks.register_module_forward_pre_hook(self._enter),
                module_hooks.register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(lambda *_: self.calls.update_begins()),
                register_optimizer_step_post_hook(self._on_update),
            ):
                stack.callback(handle.remove)
            stack.enter_context(_torch.patched(torch.optim.Optimizer, __init__=initialize_and_count))
            stack.enter_context(self._loaders.hooked())
            if self._stores_call:
                stack.enter_context(self.calls.watching(lambda: not self._running))
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Hook before each module's call; a call at the outermost level is a boundary between steps."""
        module = _torch.hooked_module(module)
        if not self._running:
            self._before_call(module)
            if not any(module is model for model in self._models):
                self._models.append(module)
            self._loaders.model_called(trains=module.training and torch.is_grad_enabled())
        self._running.append(module)

    def _before_call(self, module: nn.Module) -> None:
        """Called before a model is called at the outermost level."""
        self._at_boundary()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Hook after each module's call: it runs no more, nor do those within it whose hook did not run."""
        module = _torch.hooked_module(module)
        if any(module is running for running in self._running):
            while self._running.pop() is not module:
                pass

    def _on_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook after each update: count it. A step is complete once each optimizer has made another update, and ends at
        a boundary."""
        self.calls.update_ended(optimizer)
        before = self._common_updates()
        self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        self._last_updates = self._common_updates()
        self._step_is_complete = self._step_is_complete or self._last_updates > before
        self._calls_since_update = 0.0
        self._loaders.model_called(trains=True)

    def _common_updates(self) -> int:
        """Return the smallest number of updates of any optimizer, without those that are updated far less often."""
        counts = list(self._optimizers.values())
        most = max(counts, default=0)
        return min((count for count in counts if most < _RARE * max(count, self._steps)), default=most)

    def _at_boundary(self) -> None:
        """End the step if it is complete. Called when a batch is loaded or a model is called at the outermost level."""
        if self._over:
            self._stop()
        if not self._built:
            self._built = True
            self._boundaries.built()
        # between two updates a rollout or a validation calls the model many times: each counts a fraction of a call
        is_rollout = self._optimizers and not torch.is_grad_enabled()
        self._calls_since_update += 1 / _ROLLOUT_FACTOR if is_rollout else 1
        if self._step_is_complete:
            self._step_is_complete = False
            self._end_step()
            if self.steps_made == self._steps:
                self._end("steps")
        elif self._calls_since_update > _MAX_CALLS_WITHOUT_UPDATE:  # in the middle of a step, which counts as a step
            self._end_step()
            self._end("no update")
        elif time.monotonic() > self._deadline:
            self._end_step()
            self._end("time")

    def _end_step(self) -> None:
        """Tell the recording that a step ends here."""
        self.steps_made += 1
        self._boundaries.stepped()
        if self.calls.call is not None:
            self.calls.call.end = self._boundaries.tick

    def _end(self, ending: Ending) -> None:
        """End the run from within the script's code, by `_Over`."""
        self._ending = ending
        self._finish()
        self._stop()

    def _finish(self) -> None:
        """Tell the recording that the run is over; from now on each boundary only raises `_Over`."""
        self._last_updates = self._common_updates() or self._last_updates  # the weak dictionary may be empty by now
        self._boundaries.ended()
        self._over = True

    def _stop(self) -> None:
        """Raise `_Over` in the script's code; give up on a script that catches it again and again."""
        self._times_stopped += 1
        if self._times_stopped > _CAUGHT:
            self._give_up(
                StepError(
                    f"{self._command.name} goes on after it was told to end: it catches every exception",
                    expected="handlers of Exception, which let BaseException through",
                    do='Write "except Exception" where it says "except:" or "except BaseException"',
                    where=script_line(self._command.folder),
                )
            )
        raise _Over
