"""The first training call of a script's model: what it was called with, what updates it, where the script made it."""

from __future__ import annotations

import ast
import linecache
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._frames import callers
from memplan.errors import MemplanError
from memplan.integrations.described_calls import Unknown, described, options_of
from memplan.integrations.scripts.beside import Calls, Span
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.subclassed import output_kinds
from memplan.trace.recording.place import format_frame, local_variables
from memplan.trace.recording.session import is_suspended, recording_suspended


@dataclass
class ModelCall:
    """The first call of a model that is in training, from outside of all models."""

    module: nn.Module
    inputs: tuple[Any, ...] = ()
    """Its positional arguments, tensors as `Spec`."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    refused: MemplanError | None = None
    """Why no plan of such a call would equal eager, if none does."""
    unknown: str = ""
    """What among its arguments cannot be described, if anything."""
    autocast: torch.dtype | None = None
    """Where its first layer was called."""
    optimizer: type[torch.optim.Optimizer] | None = None
    """Class of the optimizer that updated a parameter of it."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of that optimizer."""
    name: str = "model"
    """What the script calls the model."""
    line: str | None = None
    """``file:line`` of the script beside which it can be made to fit."""
    before: bool = False
    """Whether before that line; else after it."""
    calls: Calls = field(default_factory=Calls)
    """When it was called, and updated by that optimizer."""
    end: int = 0
    """Tick at which the last step ended."""


@dataclass(frozen=True)
class _Made:
    """An optimizer's making, as the script's frame saw it."""

    line: tuple[str, int]
    end: int
    """Last line of the statement."""
    names: dict[int, str]
    """id() of each module that a variable of the script held -> its name."""


class CallWatch:
    """Keeps the first training call of a script's model.

    Args:
        folder: of the script's own code.
        tick: returns the present tick of the trace.
        fits: called with the model before that call, where the script is to run with a plan.
    """

    def __init__(self, folder: str, tick: Callable[[], int], fits: Callable[[nn.Module], None] | None = None) -> None:
        self._folder, self._tick, self._fits = folder, tick, fits
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """That of the plan."""
        self._update = 0
        """Tick at which the update that runs began."""
        self._running = False
        """Whether the kept model runs."""
        self.call: ModelCall | None = None
        """None until there is one."""
        self._inside = False
        """Whether the first layer of the kept call was called."""
        self._made: _Made | None = None
        """The last optimizer's making."""

    @contextmanager
    def followed(self, is_outermost: Callable[[], bool]) -> Iterator[None]:
        """Watch the calls of all modules.

        Args:
            is_outermost: returns whether no module runs.
        """
        plain = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_suspended():
                return plain(module, *args, **kwargs)
            if self.call is None:
                if is_outermost() and _trains(module):
                    self._keep(module, args, kwargs)
                    if self._fits is not None:
                        self._fits(module)
            elif not self._inside and not is_outermost():
                self._inside = True
                self.call.autocast = _autocast(self.call.module)
            call = self.call
            if call is None or module is not call.module or self._running or not torch.is_grad_enabled():
                return plain(module, *args, **kwargs)
            begin, self._running = self._tick(), True
            call.calls.held |= any(one.requires_grad and one.grad is not None for one in module.parameters())
            try:
                return plain(module, *args, **kwargs)
            finally:
                self._running = False
                call.calls.calls.append(Span(begin, self._tick()))

        with _torch.patched(nn.Module, __call__=called):
            yield

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the script has made an optimizer."""
        frame = next((one for one in self._frames() if not _statement(one)[2]), None)
        if frame is not None and self.call is None:
            self._made = _Made((frame.f_code.co_filename, frame.f_lineno), _statement(frame)[1], _modules(frame))

    def updates(self) -> None:
        """Note that an optimizer begins an update."""
        self._update = self._tick()

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has made an update. The first one that updates nothing but the model is the plan's."""
        call = self.call
        if call is None:
            return
        if call.optimizer is None:
            own = {id(parameter) for parameter in call.module.parameters()}
            theirs = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            if theirs and own.issuperset(theirs):
                call.optimizer, call.options = type(optimizer), options_of(optimizer)
                self._optimizer = weakref.ref(optimizer)
        if self._optimizer is not None and self._optimizer() is optimizer:
            call.calls.updates.append(Span(self._update, self._tick()))

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.call = ModelCall(module, autocast=_autocast(module))
        try:
            call.inputs = tuple(described(one) for one in args)
            call.kwargs = {name: described(one) for name, one in kwargs.items()}
            with recording_suspended():
                output_kinds(module, call_of(args, kwargs))
        except Unknown as error:
            call.unknown = str(error)
        except MemplanError as error:
            call.refused = error
        frame, made = next(self._frames(), None), self._made
        if frame is None:
            return
        here = frame.f_code.co_filename, frame.f_lineno
        if made is None or made.line == here:  # what trains makes the optimizer itself
            call.before, call.line = True, format_frame((here[0], _statement(frame)[0]))
            call.name = _modules(frame).get(id(module), call.name)
        else:
            call.line = format_frame((made.line[0], made.end))
            call.name = made.names.get(id(module), call.name)

    def _frames(self) -> Iterator[FrameType]:
        """Yield the frames of the script's own code outside of its models, the innermost first."""
        for frame in callers():
            file = frame.f_code.co_filename
            own = os.path.abspath(file).startswith(self._folder + os.sep) and "-packages" not in file
            if own and not file.startswith("<") and not isinstance(local_variables(frame).get("self"), nn.Module):
                yield frame


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())


def _autocast(module: nn.Module) -> torch.dtype | None:
    place = next((one.device.type for one in module.parameters()), "cpu")
    kind = place if place in ("cpu", "cuda") else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _modules(frame: FrameType) -> dict[int, str]:
    """Return the names of the variables of a frame that hold modules, those of the function before the module's."""
    found: dict[int, str] = {}
    here = local_variables(frame)
    own = here.get("self")
    for variables in (here, {f"self.{name}": one for name, one in _attributes(own).items()}, frame.f_globals):
        for name, value in list(variables.items()):
            if isinstance(value, nn.Module):
                found.setdefault(id(value), name)
    return found


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {}) if value is not None else {}


def _statement(frame: FrameType) -> tuple[int, int, bool]:
    """Return the first and the last line of the statement that a frame runs, and whether it returns."""
    line = frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return line, line, False
    around = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]  # fmt: skip
    inner = min(around, key=lambda node: (node.end_lineno or node.lineno) - node.lineno, default=None)
    if inner is None:
        return line, line, False
    return inner.lineno, inner.end_lineno or inner.lineno, isinstance(inner, ast.Return)
