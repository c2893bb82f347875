"""Records every op of a few steps of a running training, without changing their results."""

from __future__ import annotations

import bisect
import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._interrupts import deferred
from memplan.devices import Device
from memplan.trace.recording.causes import StepParts, finish, trace_of
from memplan.trace.recording.ledger import Entry
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.records import HOST, ON_CARD
from memplan.trace.semantics.cpu import table as cpu
from memplan.trace.semantics.cuda import table as cuda
from memplan.trace.semantics.kinds import Semantics
from memplan.trace.trace import Trace

OBSERVED = 3
"""Number of steps whose ops a window records. It stays open for another step, to see which storages outlive a step."""


@dataclass(frozen=True)
class Subject:
    """The training that is watched."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    card: Device | None
    """The card that the model is on; None: the CPU."""

    def by_cause(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (cause, tensor) of parameters, buffers, gradients and optimizer states, some more than once."""
        for model in self.models:
            yield from (("buffer", buffer) for buffer in model.buffers())
            yield from _with_gradients(model.parameters())
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            yield from _with_gradients(parameter for group in groups for parameter in group["params"])
            leaves = _torch.tree_leaves(list(optimizer.state.values()))
            yield from (("optimizer_state", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of `by_cause`."""
        return (tensor for _, tensor in self.by_cause())


def _with_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (cause, tensor) of parameters, and of their gradients if they have any."""
    for parameter in parameters:
        yield "weight", parameter
        if parameter.is_leaf and parameter.grad is not None:
            yield "parameter_gradient", parameter.grad


class _ResultResidence:
    """Device of the running op's results, from its arguments (a `Residence`, as `Observer.card` expects)."""

    everything = False

    def __init__(self) -> None:
        self.destination: str | None = HOST
        """Device of the running op's results, set by `follow`."""

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the destination from the arguments of an op that is about to run."""
        device = kwargs.get("device")
        if device is not None:
            on_card = torch.device(device).type == "cuda"
        else:
            on_card = any(leaf.is_cuda for leaf in _torch.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        self.destination = ON_CARD if on_card else HOST


class Window:
    """Records the ops of a few steps: call `open`, `end_step` after each step, `stop` to record no more, then `close`.

    Each op runs exactly as the step calls it. An error of the recording ends the recording, not the step. If a module
    is compiled, ops have no layer names, because the hooks that track layers would be compiled into it.
    """

    def __init__(self, subject: Subject, first: int) -> None:
        self.first = first
        """Number of its first step."""
        self.bounds = list[int]()
        """Ticks of the ledger: when the window was opened, then the end of each step."""
        self.collected = list[tuple[int, int]]()
        """(begin, end) in ticks of each run of Python's garbage collector that freed storages."""
        self.broken: str | None = None
        """Why the recording failed; None if it did not."""
        self.recorded: StepParts | None = None
        """Ops and storages, once recording has stopped without an error."""
        self._subject = subject
        self._place = Place()
        """Tracks the running module, optimizer and phase."""
        card = subject.card
        self.observer = Observer(self._place, real=True, semantics=_semantics(card), on_card=card is not None)
        """Records ops and storages."""
        self._residence = _ResultResidence()
        """Devices of the results, in a window on a card."""
        if card is not None:
            self.observer.card = self._residence
        self._mode = _torch.GuestMode(self._dispatch)
        """Dispatch mode that passes each op to the observer."""
        self._is_entered = self._is_recording = False
        """Whether the mode is entered, and whether it records: it can be left only while it is the innermost."""
        self._hooks, self._callbacks = ExitStack(), ExitStack()
        """Exited when recording stops, and when the window is closed."""
        self._collection_start = 0
        """Tick at which the last run of the garbage collector began."""

    @property
    def ended(self) -> int:
        """The number of steps that have ended in it."""
        return len(self.bounds) - 1

    def open(self) -> None:
        """Begin to record. Tensors of the model and the optimizers count as allocated before."""
        self._callbacks.enter_context(deferred(span=True))  # an interrupt waits until the bookkeeping is consistent
        ledger, marks = self.observer.ledger, self.observer.ownership
        for model in self._subject.models:
            self._place.add_modules(model)
        for optimizer in self._subject.optimizers:
            self._place.optimizers[id(optimizer)] = weakref.ref(optimizer)
        for tensor in self._subject.resident():
            if _torch.has_shape(tensor):
                ledger.parts(tensor, op=None)
        marks.mark_modules()
        marks.before_update()
        marks.mark_states()
        marks.updating.clear()
        self._place.building, self._place.step = False, 0
        self.bounds.append(ledger.clock)
        gc.callbacks.append(self._on_collection)
        self._callbacks.callback(gc.callbacks.remove, self._on_collection)
        if not any(map(_torch.is_compiled, self._subject.models)):
            self._hooks.enter_context(self._place.following())
            self._hooks.enter_context(_torch.compiled_modules_seen(self._hooks.close))
        self._mode.__enter__()
        self._is_entered = self._is_recording = True

    def end_step(self) -> None:
        """Record the end of a step: its tick in the ledger, from which the next step begins."""
        if self._is_recording:
            self.observer.end_step()
        self._leave()
        self.bounds.append(self.observer.ledger.clock)
        self._place.step += 1

    def stop(self) -> None:
        """Record no more ops, only frees."""
        if self._is_recording:
            self._is_recording = False
            self._hooks.close()
            if self.broken is None:
                try:
                    self.recorded = finish(self.observer, self.bounds)
                except Exception as error:  # of the recording, not of the step
                    self._give_up(error)
        self._leave()

    def close(self) -> None:
        """Remove all hooks and leave the dispatch mode."""
        self._is_recording = False
        self._hooks.close()
        self._callbacks.close()
        self._leave()
        self.observer.ledger.close()

    def trace(self) -> Trace | None:
        """Return the recorded steps, once recording has stopped; None if it failed."""
        if self.recorded is None:
            return None
        card = self._subject.card
        parts = dataclasses.replace(
            self.recorded, steps=tuple(self.bounds[:-1]), end=self.bounds[-1], passes=(), optimized=(), ungraded=()
        )
        return trace_of(parts, origin="measured", device=HOST if card is None else card.name)

    def step_of(self, entry: Entry) -> int:
        """Return the step (from 0) in which a storage was allocated; -1: before the window."""
        return bisect.bisect_left(self.bounds, entry.born) - 1

    def step_of_tick(self, tick: int | None) -> int | None:
        """Return the step (from 0) of a tick; -1: before the window. None for None."""
        return None if tick is None else bisect.bisect_left(self.bounds, tick) - 1

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run an op exactly as called, and let the observer record it; an error of the observer ends the recording."""
        # while a CUDA graph is captured, other calls of the driver are not allowed
        is_capturing = self._subject.card is not None and torch.cuda.is_current_stream_capturing()
        if not self._is_recording or self.broken is not None or is_capturing:
            return run(func)
        results = list[Any]()
        failed = False

        def as_called(_: Any) -> Any:
            nonlocal failed
            try:
                results.append(run(func))  # the original op, not the one the observer passes
            except BaseException:
                failed = True
                raise
            return results[0]

        try:
            self._residence.follow(args, kwargs)
            self.observer.dispatch(func, args, kwargs, as_called)
        except Exception as error:
            if failed:
                raise
            self._give_up(error)
        return results[0] if results else run(func)

    def _give_up(self, error: Exception) -> None:
        """Store why the recording failed: the error's type and first line."""
        self.broken = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]

    def _leave(self) -> None:
        """Exit the dispatch mode once recording has stopped, unless the user's code has entered another mode since."""
        if self._is_entered and not self._is_recording and self._mode.is_innermost:
            self._mode.__exit__(None, None, None)
            self._is_entered = False

    def _on_collection(self, phase: str, info: Any) -> None:
        """Callback of the garbage collector: note the ticks of a collection in which storages were freed."""
        clock = self.observer.ledger.clock
        if phase == "start":
            self._collection_start = clock
        elif clock > self._collection_start:
            self.collected.append((self._collection_start, clock))


def _semantics(card: Device | None) -> Semantics:
    """Return the semantics for workspaces only: results are those of real ops and need no correction."""
    semantics = cpu.SEMANTICS if card is None else cuda.semantics(card, lambda: 0, lambda tensor: tensor.is_cuda)
    return dataclasses.replace(semantics, results={}, instead={}, assumed=lambda *_: None)
