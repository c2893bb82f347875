"""A training that is watched while it runs: a context manager, whatever runs the steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan._display import Printed
from memplan._interrupts import deferred
from memplan.devices import Device, find
from memplan.errors import DeviceError, InputError, UsageError
from memplan.integrations.watching.follower import Follower, summary
from memplan.integrations.watching.inputs import LastInputs
from memplan.integrations.watching.live_line import LiveLine
from memplan.integrations.watching.post_mortem import is_out_of_memory, post_mortem
from memplan.integrations.watching.rows import Growth, Leak, Row
from memplan.integrations.watching.window import Subject
from memplan.trace.recording.session import own_card

SCHEMA = 1
_running = threading.Lock()
_watched = 0
"""The thread in which a watch runs."""


def watch(
    model: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    device: str | torch.device | None = None,
    *,
    quiet: bool = False,
    post_mortem: str | os.PathLike[str] | None = ".",
) -> Watch:
    """Watch a training while it runs: peaks beside what is predicted, leaks by line, a post-mortem.

    A step ends with the optimizer's ``step()``. Every op of the first three is noted, and of three more where memory
    grows from step to step; all others run without anything of memplan's around their ops.

    Args:
        model: the module that is trained, several of them, or a ``transformers.Trainer``.
        optimizer: that ends a step; of several the last one. None: each that updates a parameter of the model.
        device: that is watched; None: the one that the model is on. The name of a card says which one that is.
        quiet: print nothing. Otherwise leaks, drifts and the post-mortem's path go to stderr, and where that is a
            terminal a line there follows the steps.
        post_mortem: the folder for a post-mortem when memory ends; None: none is written.

    Returns:
        A context manager: ``rows``, ``leaks`` and ``drifts`` tell what it saw, also after its end.

    Raises:
        InputError: no module, no optimizer.
        DeviceError: a card is named, and the model is on the CPU, or there is none.
        UsageError: on entering it: another watch runs in this thread, or this one has run. Where one runs in another
            thread, the new one sees nothing, and says so.

    Example:
        >>> with memplan.watch(model, optimizer) as seen:
        ...     train(model, optimizer)
        >>> seen.leaks
        ()
    """
    models, optimizers = _models(model), _optimizers(optimizer)
    return Watch(models, optimizers, device, quiet=quiet, post_mortem=post_mortem)


class Watch(Printed):
    """What a watch saw so far. Made by `memplan.watch`; enter it to begin."""

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        optimizers: tuple[torch.optim.Optimizer, ...],
        device: str | torch.device | None,
        *,
        quiet: bool,
        post_mortem: str | os.PathLike[str] | None,
    ) -> None:
        self.post_mortem: Path | None = None
        """Path of the post-mortem as JSON, the text beside it, where one was written."""
        self._device, self._card = _device_of(models, device)
        self._subject = Subject(models, optimizers, self._card)
        self._folder = post_mortem
        self._moves = device is None
        self._quiet = quiet
        self._line = LiveLine(quiet=quiet)
        self._follower = Follower(self._subject, self._device, self._say)
        self._stack = ExitStack()
        self._inputs: LastInputs | None = None
        self._known = set[int]()
        """id() of each optimizer that was met."""
        self._thread = 0
        self._state = "new"

    @property
    def rows(self) -> tuple[Row, ...]:
        """Steps, of many the last 10,000."""
        return tuple(self._follower.rows)

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Places whose tensors outlive their steps."""
        return self._follower.leaks

    @property
    def drifts(self) -> tuple[Growth, ...]:
        """Steps whose peaks moved away from the prediction."""
        return tuple(self._follower.growths)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why something could not be seen."""
        return tuple(self._follower.notes)

    def __enter__(self) -> Self:
        """Begin with the next step."""
        if self._state != "new":
            raise UsageError("a watch that has run already", expected="one for each training", do="Make another one")
        with deferred(span=True):
            self._begin()
        return self

    def _begin(self) -> None:
        global _watched
        if not _running.acquire(blocking=False):
            if _watched == threading.get_ident():
                raise UsageError(
                    "a second watch while one runs in this thread",
                    expected="one at a time",
                    do="Leave the first one before",
                )
            self._state = "aside"
            self._follower.notes.append("nothing was watched: another thread has a watch, and there is one at a time")
            self._say(f"memplan: {self._follower.notes[-1]}")
            return
        self._stack.callback(_running.release)
        self._state, self._thread = "running", threading.get_ident()
        _watched = self._thread
        try:
            self._set_hooks()
            self._follower.begin()
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Put everything back; write a post-mortem first where memory ended."""
        if self._state not in ("running", "broken"):
            return
        try:
            with deferred(span=True):
                try:
                    if error is not None and self._folder is not None and is_out_of_memory(error):
                        self._write_post_mortem(error)
                finally:
                    self._close()
        except BaseException:
            with deferred(span=True):  # a second Ctrl-C can come before the first of these lets it wait
                self._close()
            raise

    def end_step(self) -> None:
        """Say that a step is over, in a loop without an optimizer of torch's."""
        if self._state != "running" or threading.get_ident() != self._thread:
            return
        with deferred(span=True):
            self._end_step()

    def _end_step(self) -> None:
        try:
            if self._follower.is_observing and self._moved():
                return
            row = self._follower.end_step()
            if self._line.is_shown:
                self._line.show(row, len(self.leaks))
        except Exception as error:  # a mistake of ours must not end the training
            self._follower.notes.append(f"the watch ended at step {self._follower.steps}: {error!r}")
            self._say(self._follower.notes[-1])
            self._follower.close()
            self._state = "broken"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "format": "memplan.watch",
            "schema": SCHEMA,
            "torch": torch.__version__,
            "device": str(self._device) if self._card is None else self._card.name,
            "steps": self._follower.steps,
            "predicted": self._follower.prediction and self._follower.prediction.peak,
            "rows": [row.to_dict() for row in self.rows],
            "leaks": [leak.to_dict() for leak in self.leaks],
            "drifts": [growth.to_dict() for growth in self.drifts],
            "notes": list(self.notes),
            "post_mortem": None if self.post_mortem is None else str(self.post_mortem),
        }

    def __str__(self) -> str:
        follower = self._follower
        lines = [summary(follower.steps, follower.rows, follower.prediction)]
        lines += [*map(str, self.leaks), *map(str, self.drifts), *(f"note: {note}" for note in self.notes)]
        if self.post_mortem is not None:
            lines.append(f"out of memory: {self.post_mortem}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        follower = self._follower
        text = f"{summary(follower.steps, follower.rows, follower.prediction)}, {len(self.leaks)} leak(s)"
        return f"<Watch, {self._state}: {text}>"

    def _set_hooks(self) -> None:
        """Set the hooks, which stay until the end: within an optimizer's step torch goes over its own hooks.

        That at a step's end is the optimizer's own, not one of all optimizers: while torch goes over these, a window
        could neither set nor remove its own.
        """
        if self._subject.optimizers:
            self._end_with(self._subject.optimizers[-1])
        else:
            self._stack.callback(register_optimizer_step_pre_hook(self._begins).remove)
        self._inputs = LastInputs(self._subject.models[0])
        self._stack.callback(self._inputs.close)

    def _end_with(self, optimizer: torch.optim.Optimizer) -> None:
        self._stack.callback(optimizer.register_step_post_hook(lambda *_: self.end_step()).remove)

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note of an optimizer that nobody named."""
        if threading.get_ident() != self._thread or self._state != "running" or id(optimizer) in self._known:
            return
        self._known.add(id(optimizer))
        if self._updates(optimizer):
            self._subject = replace(self._subject, optimizers=(*self._subject.optimizers, optimizer))
            self._follower.subject = self._subject
            self._end_with(optimizer)

    def _updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates a parameter of the model."""
        own = {id(parameter) for model in self._subject.models for parameter in model.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _moved(self) -> bool:
        """Return whether the model was moved to another device in this step, as trainers do; begin anew there if so."""
        now = _place_of(self._subject.models)
        if not self._moves or now.type == self._device.type:
            return False
        before = self._follower
        before.close()
        self._device, self._card = now, own_card(now) if now.type == "cuda" else None
        self._subject = replace(self._subject, card=self._card)
        self._follower = Follower(self._subject, now, self._say)
        self._follower.steps = before.steps + 1
        self._follower.rows.extend(before.rows)
        self._follower.notes = [*before.notes, f"the model moved to {now}: watched from step {before.steps + 2} on"]
        self._follower.begin()
        return True

    def _write_post_mortem(self, error: BaseException) -> None:
        follower = self._follower
        seen, within = follower.at_failure()
        follower.close()
        assert self._folder is not None
        try:
            self.post_mortem = post_mortem(
                error, follower.steps + 1, self._subject, seen, within=within, device=self._device,
                folder=self._folder, inputs=self._inputs,
            )  # fmt: skip
        except Exception as problem:  # the user's error goes on, whatever becomes of ours
            self._say(f"out of memory, and no post-mortem could be written: {problem}")
            return
        self._say(
            f"out of memory: {self.post_mortem.with_suffix('.txt')} says what held it, {self.post_mortem} as JSON"
        )

    def _close(self) -> None:
        self._state = "over"
        self._line.close()
        try:
            self._follower.close()
        finally:
            self._stack.close()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._line.say(text)


def _models(what: Any) -> tuple[nn.Module, ...]:
    model = what if isinstance(what, nn.Module) else getattr(what, "model", what)  # of a trainer
    models = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise InputError(
            f"a model to watch of type {type(what).__name__}",
            expected="a module, several of them, or a trainer that has one",
            do="Pass the module that is trained",
        )
    return models


def _optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    bare = list[torch.optim.Optimizer]()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"an optimizer of type {type(optimizer).__name__}", expected="one of torch.optim",
                do="Leave it out, and call end_step() after each update",
            )  # fmt: skip
        inner = getattr(optimizer, "optimizer", None)  # Accelerate's and others wrap one, and call its step
        bare.append(inner if isinstance(inner, torch.optim.Optimizer) else optimizer)
    return tuple(bare)


def _place_of(models: tuple[nn.Module, ...]) -> torch.device:
    first = next((parameter for model in models for parameter in model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _device_of(models: tuple[nn.Module, ...], asked: str | torch.device | None) -> tuple[torch.device, Device | None]:
    """Return the device to watch, and which card it is."""
    place = _place_of(models)
    if asked is None:
        return place, own_card(place) if place.type == "cuda" else None
    text = str(asked).strip().lower()
    if text == "cpu" or text.partition(":")[0] == "cuda":
        chosen = torch.device(text)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise DeviceError(f"device={text!r} on a machine without a card", expected="a device that torch has here")
        return chosen, own_card(chosen) if chosen.type == "cuda" else None
    card = find(text)
    if place.type != "cuda":
        raise DeviceError(
            f"device={text!r}, and the model is on {place}", expected="a card that the model is on",
            do="Leave device out; memplan.explain predicts for a card that is not there",
        )  # fmt: skip
    return place, card
