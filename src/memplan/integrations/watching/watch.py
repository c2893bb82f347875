"""`memplan.watch`: a context manager around any training loop that measures and predicts each step."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan import _torch
from memplan._display import Printed
from memplan._interrupts import deferred
from memplan._json import Written, named
from memplan.devices import Device, find
from memplan.errors import DeviceError, InputError, UsageError
from memplan.integrations.watching.follower import Follower, summary
from memplan.integrations.watching.inputs import LastInputs
from memplan.integrations.watching.live_line import LiveLine
from memplan.integrations.watching.post_mortem import is_out_of_memory, post_mortem
from memplan.integrations.watching.rank_file import RankFile
from memplan.integrations.watching.rows import Growth, Leak, Row
from memplan.integrations.watching.window import Subject
from memplan.studies.watched.watched import Held, Owner, RankWatch, State
from memplan.trace.recording.session import own_card

_LONGEST = 300
"""Characters of an error in a rank's file."""
_OWNERS = 1000
"""Rows in a rank's file of what is alive at the peak, the largest."""
_running = threading.Lock()
_watching_thread = 0
"""Identifier of the thread whose watch runs."""


def watch(
    model: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    device: str | torch.device | None = None,
    *,
    quiet: bool = False,
    post_mortem: str | os.PathLike[str] | None = ".",
    folder: str | os.PathLike[str] | None = None,
) -> Watch:
    """Watch a running training: measured and predicted peak of each step, leaks by line, a post-mortem.

    A step ends with the optimizer's ``step()``. Every op of the first three steps is recorded, and of three more when
    memory grows from step to step or enough time has passed; all other steps run without interception of their ops.

    Args:
        model: the module that is trained, several modules, or a ``transformers.Trainer``.
        optimizer: whose ``step()`` ends a step; of several, the last. None: any that updates a parameter of the model.
        device: to watch, ``"cpu"``, ``"cuda"`` or the name of the card; None: the device that the model is on.
        quiet: print nothing. Otherwise leaks, drifts and the post-mortem's path are printed to stderr, and a status
            line if that is a terminal.
        post_mortem: folder for a post-mortem if a step runs out of memory; None: none is written.
        folder: where each rank of several writes what it has seen, in a file that is named by its rank
            (``rank3.json``): when the watch begins, after its third step, at most every 10 s, and at its end. The last
            rank to end says which one holds more than the others; so does ``memplan why FOLDER``, also where a rank
            was killed. None: no rank writes one.

    Returns:
        A context manager whose ``rows``, ``leaks`` and ``drifts`` are up to date within it and stay after its end.

    Raises:
        InputError: ``model`` has no module, or ``optimizer`` is no optimizer of torch.
        DeviceError: a card is named, and the model is on the CPU, or this machine has no card.
        OSError: on entering: ``folder`` cannot be made.
        UsageError: on entering: another watch runs in this thread, or this watch has run already. If a watch runs in
            another thread, the new one watches nothing and adds a note that says so.

    Example:
        >>> with memplan.watch(model, optimizer) as seen:
        ...     train(model, optimizer)
        >>> seen.leaks
        ()
    """
    models, optimizers = _models(model), _optimizers(optimizer)
    return Watch(models, optimizers, device, quiet=quiet, post_mortem=post_mortem, folder=folder)


class Watch(Written, Printed):
    """The results of a watch so far. Created by `memplan.watch`; watching begins when it is entered."""

    FORMAT: ClassVar[str] = "memplan.watch"

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        optimizers: tuple[torch.optim.Optimizer, ...],
        device: str | torch.device | None,
        *,
        quiet: bool,
        post_mortem: str | os.PathLike[str] | None,
        folder: str | os.PathLike[str] | None,
    ) -> None:
        self.post_mortem: Path | None = None
        """Path of the post-mortem's JSON file, with the text next to it; None: no step ran out of memory."""
        self._device, self._card = _device_of(models, device)
        """The device whose memory is watched, and the card that it is; None for the CPU."""
        self._subject = Subject(models, optimizers, self._card)
        """The models and optimizers that are watched."""
        self.rank, self.world = _torch.started_rank()
        """This process's rank, and how many there are; 0 of 1 without others."""
        self._oom_folder = post_mortem
        """Folder for a post-mortem if a step runs out of memory; None: none is written."""
        self._folder = folder
        """Folder for the files of all ranks; None: none is written."""
        self._file: RankFile | None = None
        """File of this rank's results; None without a folder, and before watching begins."""
        self._ended: State = "running"
        """First "running", then how the watch ended."""
        self._error = ""
        """Class and message of the exception that ended it; "" without one."""
        self._follows_model = device is None
        """Whether to watch anew if the model is moved to another type of device."""
        self._quiet = quiet
        self._line = LiveLine(quiet=quiet)
        """The status line on the terminal."""
        self._follower = Follower(self._subject, self._device, self._say)
        """Measures and observes the steps."""
        self._stack = ExitStack()
        """Removes the hooks and releases the lock when it is closed."""
        self._inputs: LastInputs | None = None
        """Arguments of the model's last call, for the post-mortem; None before watching begins."""
        self._seen_optimizers = set[int]()
        """id() of each optimizer that has made a step."""
        self._thread = 0
        """Id of the watched thread; 0 before watching begins."""
        self._state = "new"
        """One of "new", "running", "broken" (watching failed), "aside" (another thread watches) or "over"."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The steps so far; at most the last 10,000."""
        return tuple(self._follower.rows)

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Places whose tensors outlive their step, in the order of detection."""
        return self._follower.leaks

    @property
    def drifts(self) -> tuple[Growth, ...]:
        """Steps whose peak rose above the prediction."""
        return tuple(self._follower.growths)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why some steps could not be watched or predicted."""
        return tuple(self._follower.notes)

    def __enter__(self) -> Self:
        """Watch from now on."""
        if self._state != "new":
            raise UsageError("a watch that has run already", expected="one for each training", do="Make another one")
        with deferred(span=True):
            self._begin()
        return self

    def _begin(self) -> None:
        """Take the lock on watching, set the hooks and observe the first step; add a note if another thread watches."""
        global _watching_thread
        if not _running.acquire(blocking=False):
            if _watching_thread == threading.get_ident():
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
        self.rank, self.world = _torch.started_rank()
        self._state, self._thread = "running", threading.get_ident()
        _watching_thread = self._thread
        try:
            self._set_hooks()
            if self._folder is not None:
                self._file = RankFile(Path(self._folder), self.rank)
                self._file.write(self._of_rank, now=True)
            self._follower.begin()
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove all hooks; write a post-mortem first if the error is out of memory."""
        if self._state not in ("running", "broken"):
            return
        try:
            with deferred(span=True):
                try:
                    out_of_memory = is_out_of_memory(error)
                    self._ended = "over" if error is None else "out of memory" if out_of_memory else "failed"
                    if error is not None:
                        self._error = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
                        if out_of_memory and self._oom_folder is not None:
                            self._write_post_mortem(error)
                finally:
                    self._close()
                    self._write_last()
        except BaseException:
            with deferred(span=True):  # a second Ctrl-C can come before the first `deferred` is in force
                self._close()
            raise

    def end_step(self) -> None:
        """Mark the end of a step, in a loop without an optimizer of torch."""
        if self._state != "running" or threading.get_ident() != self._thread:
            return
        with deferred(span=True):
            self._end_step()

    def _end_step(self) -> None:
        """End a step of the follower; an error in it ends the watch, not the training."""
        try:
            if self._follower.is_observing and self._restart_if_moved():
                return
            before = self._follower.is_observing, self._follower.prediction
            row = self._follower.end_step()
            if self._file is not None:
                after = self._follower.is_observing, self._follower.prediction
                self._file.write(self._of_rank, now=after != before)
            if self._line.is_shown and self.rank == 0:  # else the ranks write over each other's line
                self._line.show(row, len(self.leaks))
        except Exception as error:  # an error of ours must not end the training
            self._follower.notes.append(f"the watch ended at step {self._follower.steps}: {error!r}")
            self._say(self._follower.notes[-1])
            self._follower.close()
            self._state = "broken"

    def _plain(self) -> dict[str, Any]:
        """Return the results as data for JSON."""
        return named(self, "rows", "leaks", "drifts", "notes") | {
            "torch": torch.__version__,
            "device": str(self._device) if self._card is None else self._card.name,
            "rank": self.rank,
            "world": self.world,
            "steps": self._follower.steps,
            "predicted": self._follower.prediction and self._follower.prediction.peak,
            "post_mortem": None if self.post_mortem is None else str(self.post_mortem),
        }

    def __str__(self) -> str:
        follower = self._follower
        lines = [f"{self._of}{summary(follower.steps, follower.rows, follower.prediction)}"]
        lines += [*map(str, self.leaks), *map(str, self.drifts), *(f"note: {note}" for note in self.notes)]
        if self.post_mortem is not None:
            lines.append(f"out of memory: {self.post_mortem}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        follower = self._follower
        text = f"{summary(follower.steps, follower.rows, follower.prediction)}, {len(self.leaks)} leak(s)"
        return f"<Watch, {self._state}: {text}>"

    @property
    def _of(self) -> str:
        """Prefix of messages: the rank, if there are several."""
        return f"rank {self.rank}: " if self.world > 1 else ""

    def _of_rank(self) -> RankWatch:
        """Return the results so far, as written to the rank's file."""
        follower, prediction = self._follower, self._follower.prediction
        measured = [row.peak for row in follower.rows if row.peak is not None]
        rows = () if prediction is None else prediction.owners()
        return RankWatch(
            self.rank, self.world, str(self._device) if self._card is None else self._card.name, self._ended,
            follower.steps, max(measured, default=None), None if prediction is None else prediction.peak,
            tuple(Held(Owner(row.where, row.layer, row.cause), row.bytes) for row in rows[:_OWNERS]),
            tuple(map(str, self.leaks)), self.notes, self._error,
            None if self.post_mortem is None else str(self.post_mortem),
        )  # fmt: skip

    def _write_last(self) -> None:
        """Write the rank's file for the last time; say how the ranks compare, if all others have ended."""
        if self._file is not None:
            self._file.write(self._of_rank, now=True)
            for sentence in [] if self._quiet else self._file.others():
                self._line.say(sentence)

    def _set_hooks(self) -> None:
        """Register the hooks of the whole watch: torch does not allow changes to hooks while it iterates over them.

        A step's end is a hook of that optimizer rather than of all optimizers, because a window that opens or closes
        at that moment changes the latter.
        """
        if self._subject.optimizers:
            self._end_steps_with(self._subject.optimizers[-1])
        else:
            self._stack.callback(register_optimizer_step_pre_hook(self._on_optimizer_step).remove)
        self._inputs = LastInputs(self._subject.models[0])
        self._stack.callback(self._inputs.close)

    def _end_steps_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let each ``step()`` of an optimizer end a step."""
        self._stack.callback(optimizer.register_step_post_hook(lambda *_: self.end_step()).remove)

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Global pre-hook: add an optimizer that updates the model to the watched ones when it first makes a step."""
        if threading.get_ident() != self._thread or self._state != "running" or id(optimizer) in self._seen_optimizers:
            return
        self._seen_optimizers.add(id(optimizer))
        trained = {id(parameter) for model in self._subject.models for parameter in model.parameters()}
        if any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
            self._subject = replace(self._subject, optimizers=(*self._subject.optimizers, optimizer))
            self._follower.subject = self._subject
            self._end_steps_with(optimizer)

    def _restart_if_moved(self) -> bool:
        """If the model was moved to another type of device, as trainers do, watch anew there. Return whether it was."""
        device = _model_device(self._subject.models)
        if not self._follows_model or device.type == self._device.type:
            return False
        previous = self._follower
        previous.close()
        self._device, self._card = device, own_card(device) if device.type == "cuda" else None
        self._subject = replace(self._subject, card=self._card)
        self._follower = Follower(self._subject, device, self._say)
        self._follower.steps = previous.steps + 1
        self._follower.rows.extend(previous.rows)
        note = f"the model moved to {device}: watched from step {previous.steps + 2} on"
        self._follower.notes = [*previous.notes, note]
        self._follower.begin()
        return True

    def _write_post_mortem(self, error: BaseException) -> None:
        """Write the post-mortem of an out-of-memory error; an error of writing it is only reported."""
        follower = self._follower
        prediction, is_failed_step = follower.at_failure()
        follower.close()
        follower.prediction = prediction
        assert self._oom_folder is not None
        try:
            self.post_mortem = post_mortem(
                error, follower.steps + 1, self._subject, prediction, is_failed_step=is_failed_step,
                device=self._device, folder=self._oom_folder, inputs=self._inputs, ranks=(self.rank, self.world),
            )  # fmt: skip
        except Exception as failure:  # the user's error is raised, not ours
            self._say(f"out of memory, and no post-mortem could be written: {failure}")
            return
        self._say(
            f"out of memory: {self.post_mortem.with_suffix('.txt')} says what held it, {self.post_mortem} as JSON"
        )

    def _close(self) -> None:
        """End the watch: remove its hooks and its status line, and release its lock."""
        self._state = "over"
        self._line.close()
        try:
            self._follower.close()
        finally:
            self._stack.close()

    def _say(self, text: str) -> None:
        """Print a message to stderr, unless the watch is quiet."""
        if not self._quiet:
            self._line.say(f"{self._of}{text}")


def _models(target: Any) -> tuple[nn.Module, ...]:
    """Return the modules of a module, a sequence of modules, or a trainer."""
    model = target if isinstance(target, nn.Module) else getattr(target, "model", target)  # of a trainer
    models = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    if not models or not all(isinstance(module, nn.Module) for module in models):
        raise InputError(
            f"a model to watch of type {type(target).__name__}",
            expected="a module, several of them, or a trainer that has one",
            do="Pass the module that is trained",
        )
    return models


def _optimizers(target: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of torch in an optimizer, a sequence of these, or None; wrappers are unwrapped."""
    if target is None:
        return ()
    unwrapped = list[torch.optim.Optimizer]()
    for optimizer in target if isinstance(target, (list, tuple)) else [target]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"an optimizer of type {type(optimizer).__name__}", expected="one of torch.optim",
                do="Leave it out, and call end_step() after each update",
            )  # fmt: skip
        inner = getattr(optimizer, "optimizer", None)  # such as Accelerate's, which calls step() of this
        unwrapped.append(inner if isinstance(inner, torch.optim.Optimizer) else optimizer)
    return tuple(unwrapped)


def _model_device(models: tuple[nn.Module, ...]) -> torch.device:
    """Return the device of the first parameter; the CPU without parameters."""
    first = next((parameter for model in models for parameter in model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _device_of(models: tuple[nn.Module, ...], device: str | torch.device | None) -> tuple[torch.device, Device | None]:
    """Return the device to watch and its card, None for the CPU."""
    current = _model_device(models)
    if device is None:
        return current, own_card(current) if current.type == "cuda" else None
    text = str(device).strip().lower()
    if text == "cpu" or text.partition(":")[0] == "cuda":
        chosen = torch.device(text)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise DeviceError(f"device={text!r} on a machine without a card", expected="a device that torch has here")
        return chosen, own_card(chosen) if chosen.type == "cuda" else None
    card = find(text)
    if current.type != "cuda":
        raise DeviceError(
            f"device={text!r}, and the model is on {current}", expected="a card that the model is on",
            do="Leave device out; memplan.explain predicts for a card that is not there",
        )  # fmt: skip
    return current, card
