"""A planned step in the place of a module's call: the module stays the user's own."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.errors import TargetError
from memplan.planning.calls import Call, call_of
from memplan.planning.capture import Captured
from memplan.planning.schedule import Schedule
from memplan.rewriting.engine import Engine
from memplan.rewriting.keys import Keys, UnkeyedError


class Runnable(Protocol):
    """What a planner answers: a schedule and what it is of."""

    @property
    def captured(self) -> Captured:
        """The graph, and how it hangs together with the call."""
        ...

    @property
    def schedule(self) -> Schedule:
        """What runs when."""
        ...


Planner = Callable[[Call, bool], Runnable | None]
"""A call, and whether gradients are held when it begins -> what to run instead of it; None: the model as it is."""

_planning = threading.local()
_one_at_a_time = threading.RLock()


def install(model: nn.Module, planner: Planner) -> Installed:
    """Make calls of a module run as planned.

    A call under grad mode is planned when it is the first of its kind (see keys) and runs as planned from then on;
    without anything that requires grad, under a transform or a compiler, the module runs as it is. The module keeps
    its parameters, attributes and methods. Copies and pickles of it are not planned.

    Args:
        model: a module, or `memplan.with_loss` of one.
        planner: asked once for each kind of call. It may call the module: that runs as it is, without its own hooks.

    Raises:
        TargetError: the module is planned or compiled already.
    """
    return Installed(model, planner)


class Installed:
    """See `install`."""

    def __init__(self, model: nn.Module, planner: Planner) -> None:
        if _torch.call_of_module(model) is not None:
            raise TargetError(
                "A model whose calls are planned or compiled already",
                expected="one that runs as it is",
                do="Call fitted.undo(), or leave out model.compile()",
            )
        self._model = weakref.ref(model, lambda _: self._died())
        self._planner = planner
        self._keys = Keys(model)
        self._engines: dict[Hashable, tuple[Engine | None, ...]] = {}
        """By key; more than one where values of inputs decide which is right."""
        self._told: set[str] = set()
        self._restore: Callable[[], None] = _torch.set_call(model, self._call)

    def undo(self) -> None:
        """Make the module run as it did before; calls whose backward pass is still to come are not disturbed."""
        self._restore()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The planned steps, in the order in which they were planned."""
        return tuple(engine for engines in self._engines.values() for engine in engines if engine is not None)

    def _died(self) -> None:
        """The model is gone: hold nothing of it any more."""
        self._keys, self._engines, self._restore = Keys(nn.Module()), {}, lambda: None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "it is called by its module"
        captured = getattr(_planning, "modules", ())
        if model in captured:
            return model.forward(*args, **kwargs)
        if captured or not torch.is_grad_enabled() or torch.compiler.is_compiling() or _torch.is_transformed():
            return _torch.original_call(model)(*args, **kwargs)
        if _torch.has_hooks(model):
            return _torch.call_with_hooks(model, self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        call = call_of(args, kwargs)
        try:
            engine = self._engine(model, call)
        except UnkeyedError as error:
            self._tell(f"a call runs unplanned because of {error}")
            engine = None
        return model.forward(*args, **kwargs) if engine is None else engine.run(model, call)

    def _engine(self, model: nn.Module, call: Call) -> Engine | None:
        plain = self._keys.key(model, call)
        parameters = list(self._keys.parameters())
        held = any(parameter.requires_grad and parameter.grad is not None for parameter in parameters)
        key = (plain, held)
        found = self._found(key, call)
        if not found and not any(tensor.requires_grad for tensor in (*parameters, *call.tensors)):
            return None
        if not found:
            with _one_at_a_time:
                found = self._found(key, call)
                if not found:
                    found = [self._planned(model, call, held)]
                    self._engines[key] = (*self._engines.get(key, ()), *found)
        return found[0]

    def _found(self, key: Hashable, call: Call) -> list[Engine | None]:
        """What was planned for such a call, where that was done already."""
        return [one for one in self._engines.get(key, ()) if one is None or one.suits(call)][:1]

    def _planned(self, model: nn.Module, call: Call, held: bool) -> Engine | None:
        outer = getattr(_planning, "modules", ())
        _planning.modules = (*outer, model)
        try:
            planned = self._planner(_as_leaves(call), held)
        finally:
            _planning.modules = outer
        return None if planned is None else Engine(planned.captured, planned.schedule)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"memplan: {text}", stacklevel=5)


def _as_leaves(call: Call) -> Call:
    """The call with tensors in which the graph that made them ends: a capture starts from there."""
    leaves = tuple(one if one.is_leaf else one.detach().requires_grad_() for one in call.tensors)
    return replace(call, tensors=leaves)
