"""A few steps of somebody's training, every op of them noted, with nothing of them changed."""

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
from memplan.trace.recording.causes import Finished, finish
from memplan.trace.recording.ledger import Entry
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place
from memplan.trace.records import HOST, ON_CARD
from memplan.trace.semantics.cpu import table as cpu
from memplan.trace.semantics.cuda import table as cuda
from memplan.trace.semantics.kinds import Semantics
from memplan.trace.trace import Trace

OBSERVED = 3
"""Steps of a window whose ops are noted; the one after them shows what of these outlives its step."""


@dataclass(frozen=True)
class Subject:
    """What is watched."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    card: Device | None
    """The card that it is on; None: the CPU."""

    def by_cause(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, buffers, gradients and the optimizers' states as they are now, some more than once."""
        for model in self.models:
            yield from (("buffer", one) for one in model.buffers())
            yield from _with_gradients(model.parameters())
        for optimizer in self.optimizers:
            yield from _with_gradients(one for group in optimizer.param_groups for one in group["params"])
            leaves = _torch.tree_leaves(list(optimizer.state.values()))
            yield from (("optimizer_state", one) for one in leaves if isinstance(one, torch.Tensor))

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of `by_cause`."""
        return (tensor for _, tensor in self.by_cause())


def _with_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter in parameters:
        yield "weight", parameter
        if parameter.is_leaf and parameter.grad is not None:
            yield "parameter_gradient", parameter.grad


class _Destination:
    """Where the results of the running op lie (`memplan.trace.recording.observer.Residence`): a real op shows it."""

    everything = False

    def __init__(self) -> None:
        self.destination: str | None = HOST

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note where the results of an op will lie."""
        device = kwargs.get("device")
        if device is not None:
            on_card = torch.device(device).type == "cuda"
        else:
            on_card = any(one.is_cuda for one in _torch.tree_leaves(args) if isinstance(one, torch.Tensor))
        self.destination = ON_CARD if on_card else HOST


class Window:
    """Notes the ops of some steps: `open` it, say where each step ends, `stop` noting, then `close` it.

    Each op runs as the step calls it, and its result is the step's: an error of the notes themselves ends them alone.
    Where a module is compiled, layers have no names: it would be compiled with the hooks that tell them.
    """

    def __init__(self, subject: Subject, first: int) -> None:
        self.first = first
        """Number of its first step."""
        self.bounds = list[int]()
        """Ticks of the ledger at which it was opened, and at which each step ended."""
        self.collected = list[tuple[int, int]]()
        """From one tick to another Python's garbage collector ran."""
        self.broken: str | None = None
        """Why no more was noted; None where all is well."""
        self.parts: Finished | None = None
        """Ops and storages, once noting has stopped."""
        self._subject = subject
        self._place = Place()
        card = subject.card
        self.observer = Observer(self._place, real=True, semantics=_semantics(card), on_card=card is not None)
        self._destination = _Destination()
        if card is not None:
            self.observer.card = self._destination
        self._mode = _torch.GuestMode(self._dispatch)
        self._inside = self._noting = False
        self._hooks, self._callbacks = ExitStack(), ExitStack()
        self._collecting = 0

    @property
    def ended(self) -> int:
        """Return the number of steps that have ended in it."""
        return len(self.bounds) - 1

    def open(self) -> None:
        """Begin to note. What the subject has now was there before."""
        self._callbacks.enter_context(deferred(span=True))  # what dies or is noted in a step is not interrupted
        ledger, marks = self.observer.ledger, self.observer.ownership
        for model in self._subject.models:
            self._place.add_modules(model)
        for optimizer in self._subject.optimizers:
            self._place.optimizers[id(optimizer)] = weakref.ref(optimizer)
        for tensor in self._subject.resident():
            if _torch.has_shape(tensor):
                ledger.parts(tensor, None)
        marks.mark_modules()
        marks.before_update()
        marks.mark_states()
        marks.updating.clear()
        self._place.building, self._place.step = False, 0
        self.bounds.append(ledger.clock)
        gc.callbacks.append(self._collector)
        self._callbacks.callback(gc.callbacks.remove, self._collector)
        if not any(map(_torch.is_compiled, self._subject.models)):
            self._hooks.enter_context(self._place.following())
            self._hooks.enter_context(_torch.compiled_modules_seen(self._hooks.close))
        self._mode.__enter__()
        self._inside = self._noting = True

    def end_step(self) -> None:
        """Note that a step is over."""
        if self._noting:
            self.observer.end_step()
        self._leave()
        self.bounds.append(self.observer.ledger.clock)
        self._place.step += 1

    def stop(self) -> None:
        """Note no more ops, only which storages die."""
        if self._noting:
            self._noting = False
            self._hooks.close()
            if self.broken is None:
                try:
                    self.parts = finish(self.observer, self.bounds[0])
                except Exception as error:  # of the notes, not of the step
                    self._give_up(error)
        self._leave()

    def close(self) -> None:
        """Put everything back."""
        self._noting = False
        self._hooks.close()
        self._callbacks.close()
        self._leave()
        self.observer.ledger.close()

    def trace(self) -> Trace | None:
        """Return the steps that were noted; None where that failed. Call it once noting has stopped."""
        if self.parts is None:
            return None
        parts, card = self.parts, self._subject.card
        return Trace(
            origin="measured",
            device=HOST if card is None else card.name,
            torch=torch.__version__,
            ops=tuple(parts.ops),
            storages=tuple(parts.storages),
            layers=tuple(parts.layers),
            steps=tuple(self.bounds[:-1]),
            end=self.bounds[-1],
            forms=parts.forms,
            returned=parts.returned,
        )

    def step_of(self, entry: Entry) -> int:
        """Return in which of its steps a storage was born, from 0; -1: it was there before."""
        return bisect.bisect_left(self.bounds, entry.born) - 1

    def step_of_tick(self, tick: int | None) -> int | None:
        """Return in which of its steps something happened, from 0; -1: before them, None: not at all."""
        return None if tick is None else bisect.bisect_left(self.bounds, tick) - 1

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        if not self._noting or self.broken is not None or _captures(self._subject):
            return run(func)
        results = list[Any]()
        failed = False

        def as_called(_: Any) -> Any:
            nonlocal failed
            try:
                results.append(run(func))  # in no other form than without us
            except BaseException:
                failed = True
                raise
            return results[0]

        try:
            self._destination.follow(args, kwargs)
            self.observer.dispatch(func, args, kwargs, as_called)
        except Exception as error:
            if failed:
                raise
            self._give_up(error)
        return results[0] if results else run(func)

    def _give_up(self, error: Exception) -> None:
        self.broken = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]

    def _leave(self) -> None:
        """Leave the mode once noting has stopped; later, where the user's code has entered another one since."""
        if self._inside and not self._noting and self._mode.is_innermost:
            self._mode.__exit__(None, None, None)
            self._inside = False

    def _collector(self, phase: str, info: Any) -> None:
        clock = self.observer.ledger.clock
        if phase == "start":
            self._collecting = clock
        elif clock > self._collecting:
            self.collected.append((self._collecting, clock))


def _captures(subject: Subject) -> bool:
    """Return whether a CUDA graph is being made: nothing else may ask the card anything then."""
    return subject.card is not None and torch.cuda.is_current_stream_capturing()


def _semantics(card: Device | None) -> Semantics:
    """Return what kernels take beside their results. The results are real ones, and need no correction."""
    known = cpu.SEMANTICS if card is None else cuda.semantics(card, lambda: 0, lambda tensor: tensor.is_cuda)
    return dataclasses.replace(known, results={}, instead={}, assumed=lambda *_: None)
