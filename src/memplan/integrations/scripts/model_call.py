"""The first training call of a script's model: its arguments, its optimizer, and the line that constructs it."""

from __future__ import annotations

import ast
import linecache
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from memplan import _torch
from memplan._frames import callers
from memplan.errors import MemplanError
from memplan.integrations.described_calls import Unknown, options_of, specs_of
from memplan.integrations.scripts.unplanned_memory import Calls, Span
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.subclassed import output_kinds
from memplan.trace.recording.place import format_frame, local_variables
from memplan.trace.recording.session import is_suspended, recording_suspended


@dataclass
class ModelCall:
    """The first outermost call of a model in training mode."""

    module: nn.Module
    inputs: tuple[Any, ...] = ()
    """Its positional arguments, tensors as `Spec`."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    refused: MemplanError | None = None
    """Why no plan of such a call would equal eager, if none does."""
    unknown: str = ""
    """Argument that has no spec, if any."""
    autocast: torch.dtype | None = None
    """Where its first layer was called."""
    optimizer: type[torch.optim.Optimizer] | None = None
    """Class of the optimizer that updated a parameter of it."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of that optimizer."""
    name: str = "model"
    """What the script calls the model."""
    line: str | None = None
    """``file:line`` of the script next to which `memplan.fit` can be inserted."""
    before: bool = False
    """Whether to insert before that line; else after it."""
    calls: Calls = field(default_factory=Calls)
    """When it was called, and updated by that optimizer."""
    end: int = 0
    """Tick at which the last step ended."""


@dataclass(frozen=True)
class _OptimizerStatement:
    """The statement of the script that constructs an optimizer."""

    line: tuple[str, int]
    end: int
    """Last line of the statement."""
    names: dict[int, str]
    """Names of the script's variables by id() of their module."""


class CallWatch:
    """Keeps the first training call of a script's model.

    Args:
        folder: of the script's own code.
        tick: returns the present tick of the trace.
        fits: called with the model before that call, where the script is to run with a plan.
    """

    def __init__(self, folder: str, tick: Callable[[], int], fits: Callable[[nn.Module], None] | None = None) -> None:
        """``folder``: of the script's code. ``tick()`` returns the present tick of the trace. ``fits(model)`` is called
        before the first training call of a script that is to run with a plan; None: without a plan."""
        self._folder, self._tick, self._fits = folder, tick, fits
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer of the plan; None before its first update."""
        self._update = 0
        """Tick at which the update that runs began."""
        self._running = False
        """Whether the model of the first training call runs."""
        self.call: ModelCall | None = None
        """The first training call of a model; None before it."""
        self._inside = False
        """Whether a layer of the model was called in that call."""
        self._optimizer_statement: _OptimizerStatement | None = None
        """Construction of the latest optimizer."""

    @contextmanager
    def watching(self, is_outermost: Callable[[], bool]) -> Iterator[None]:
        """Within this context, find the first training call, and note the ticks of each later call of that model.
        ``is_outermost`` returns whether no module runs."""
        original = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Call a module. Store the first training call, and the ticks of each call of its model with gradients."""
            if is_suspended():  # a call by memplan itself
                return original(module, *args, **kwargs)
            if self.call is None:
                if is_outermost() and _trains(module):
                    self._store_first_call(module, args, kwargs)
                    if self._fits is not None:
                        self._fits(module)
            elif not self._inside and not is_outermost():  # the first layer: the model's forward may enable autocast
                self._inside = True
                self.call.autocast = _autocast(self.call.module)
            call = self.call
            if call is None or module is not call.module or self._running or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            begin, self._running = self._tick(), True  # a call within the model's own call is none of its own
            call.calls.start_with_gradients |= any(p.requires_grad and p.grad is not None for p in module.parameters())
            try:
                return original(module, *args, **kwargs)
            finally:
                self._running = False
                call.calls.calls.append(Span(begin, self._tick()))

        with _torch.patched(nn.Module, __call__=called):
            yield

    def optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the statement that constructs an optimizer: `memplan.fit` is to be inserted after it. If it is
        constructed in a ``return``, the statement is that of the caller."""
        if self.call is not None:
            return
        for frame in self._frames():
            statement = _statement(frame)
            if not statement.returns:
                line = frame.f_code.co_filename, frame.f_lineno
                self._optimizer_statement = _OptimizerStatement(line, statement.last, _modules(frame))
                return

    def update_begins(self) -> None:
        """Remember the tick at which an optimizer begins an update."""
        self._update = self._tick()

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the ticks of an update, if this is the optimizer of the plan: the first one all of whose parameters
        are the model's."""
        call = self.call
        if call is None:
            return
        if call.optimizer is None:
            of_model = {id(parameter) for parameter in call.module.parameters()}
            updated = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            if updated and of_model.issuperset(updated):
                call.optimizer, call.options = type(optimizer), options_of(optimizer)
                self._optimizer = weakref.ref(optimizer)
        if self._optimizer is not None and self._optimizer() is optimizer:
            call.calls.updates.append(Span(self._update, self._tick()))

    def _store_first_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the first training call: its arguments, why it cannot be planned, and the line for `memplan.fit`."""
        call = self.call = ModelCall(module, autocast=_autocast(module))
        try:
            call.inputs = tuple(specs_of(value) for value in args)
            call.kwargs = {name: specs_of(value) for name, value in kwargs.items()}
            with recording_suspended():
                output_kinds(module, call_of(args, kwargs))  # raises for a call that cannot be planned
        except Unknown as error:
            call.unknown = str(error)
        except MemplanError as error:
            call.refused = error
        frame, statement = next(self._frames(), None), self._optimizer_statement
        if frame is None:
            return
        here = frame.f_code.co_filename, frame.f_lineno
        if statement is None or statement.line == here:  # the line that trains also creates the optimizer
            call.before, call.line = True, format_frame((here[0], _statement(frame).first))
            call.name = _modules(frame).get(id(module), call.name)
        else:
            call.line = format_frame((statement.line[0], statement.end))
            call.name = statement.names.get(id(module), call.name)

    def _frames(self) -> Iterator[FrameType]:
        """Yield the frames of the script's own code outside of its models, the innermost first."""
        for frame in callers():
            file = frame.f_code.co_filename
            is_scripts = os.path.abspath(file).startswith(self._folder + os.sep) and "-packages" not in file
            in_model = isinstance(local_variables(frame).get("self"), nn.Module)
            if is_scripts and not file.startswith("<") and not in_model:
                yield frame


def _trains(module: nn.Module) -> bool:
    """Return whether a call of the module now would train it."""
    return module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _autocast(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which autocast casts now on the device of the module's parameters; None if it is off."""
    device_type = next((parameter.device.type for parameter in module.parameters()), "cpu")
    if device_type not in ("cpu", "cuda"):
        device_type = "cpu"
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _modules(frame: FrameType) -> dict[int, str]:
    """Map the id() of each module to the variable of a frame that refers to it. A local variable comes first, then an
    attribute (``self.model``), then a global."""
    names: dict[int, str] = {}
    local = local_variables(frame)
    attributes = getattr(local.get("self"), "__dict__", {})
    for variables in (local, {f"self.{name}": value for name, value in attributes.items()}, frame.f_globals):
        for name, value in list(variables.items()):
            if isinstance(value, nn.Module):
                names.setdefault(id(value), name)
    return names


class _Statement(NamedTuple):
    """First and last line of a statement, and whether it is a ``return``."""

    first: int
    last: int
    returns: bool


def _statement(frame: FrameType) -> _Statement:
    """Return the innermost statement that a frame runs; its line alone if there is no source."""
    line = frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return _Statement(first=line, last=line, returns=False)
    statements = [
        _Statement(node.lineno, node.end_lineno or node.lineno, isinstance(node, ast.Return))
        for node in ast.walk(tree) if isinstance(node, ast.stmt)
    ]  # fmt: skip
    enclosing = [statement for statement in statements if statement.first <= line <= statement.last]
    return min(
        enclosing, key=lambda lines: lines.last - lines.first, default=_Statement(first=line, last=line, returns=False)
    )
