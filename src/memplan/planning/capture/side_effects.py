"""Refuse by name, or undo, what a call of a model does beside computing tensors: a graph would not repeat it.

A capture runs the model's Python twice, on tensors without data. What that changes outside of the graph (attributes
of modules, generators of random numbers) is put back.
"""

from __future__ import annotations

import collections
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import InputError, UsageError
from memplan.planning.capture.flat_call import is_transparent
from memplan.planning.capture.loss_module import WithLoss
from memplan.trace.held_output import Printed
from memplan.trace.recording.place import format_frame, is_users, user_frame

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_DEEPEST = 6
_LARGEST = 1000
"""Elements of a container that is looked into."""
_EQUAL = (int, float, bool, str, bytes, complex, torch.Size, torch.dtype, torch.device)
_CLOSED = (torch.Tensor, nn.Module, type)


def refuse_hooks(model: nn.Module) -> None:
    """See that no inner module has hooks: they would run once, now, and never again.

    Raises:
        UsageError: one has. Those with which torch's own weight norm and the like compute a weight do not count.
    """
    inner = model.model if isinstance(model, WithLoss) else None
    for name, module in model.named_modules():
        for table, kind in _HOOKS.items():
            for hook in getattr(module, table).values() if module is not model else ():
                if is_transparent(hook):
                    continue
                called = f"{kind}, {getattr(hook, '__qualname__', type(hook).__qualname__)}"
                if module is inner:
                    raise UsageError(
                        f"The model has a {called}, and is planned together with its loss",
                        expected="no hooks on it: that plan goes from the inputs to the loss and calls no model",
                        do="Remove it, do in forward() or in the loss what it does, or leave the loss out of the plan",
                    )
                raise UsageError(
                    f"The layer {name} has a {called}",
                    expected="hooks on the outermost module only: a planned step does not call its layers",
                    do="Remove it, or do in forward() what it does",
                )


def refuse_surroundings() -> None:
    """See that nothing is active through which a planned step would not go.

    Raises:
        UsageError: hooks for all modules, modes or anomaly detection are.
    """
    found = _torch.surroundings()
    if found is not None:
        raise UsageError(
            f"While the step is planned {found}",
            expected="nothing of the kind: a planned step does not call its layers, and runs other ops",
            do="Remove it, or leave it, before the step is planned; calls that it is active around run unplanned",
        )


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Switch the outermost module's hooks off meanwhile, but for those that compute a weight."""
    tables = [getattr(model, name) for name in _HOOKS]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            for key in [key for key, hook in hooks.items() if not is_transparent(hook)]:
                del table[key]
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def is_fake(model: nn.Module) -> bool:
    """Return whether a model was made under fake tensors: it can be captured, and not run."""
    parameters = list(model.parameters())
    return bool(parameters) and all(isinstance(parameter, _torch.FakeTensor) for parameter in parameters)


def refuse_tensors(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """See that everything handed in is a plain tensor, or that all the model is fake.

    Raises:
        InputError: a tensor is a subclass, quantized, sparse, or has no data; or a fake model holds more tensors than
            its parameters and buffers.
    """
    fake = is_fake(model)
    if fake:
        _refuse_loose(model)
    named = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in (*named, *((f"input {at}", tensor) for at, tensor in enumerate(inputs))):
        if fake and isinstance(tensor, _torch.FakeTensor) and _torch.has_shape(tensor):
            continue
        kind = _torch.peculiarity(tensor)
        if kind is not None:
            lazy = not _torch.has_shape(tensor)
            called = "Call the model once before, also where a function makes it" if lazy else None
            raise InputError(
                f"{name} is {kind}",
                expected="parameters that are made" if lazy else "dense tensors with data, of torch's own classes",
                do=called,
            )


def _refuse_loose(model: nn.Module) -> None:
    """Raise InputError for fake tensors that are neither parameters nor buffers: a graph would hold them itself."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for key, attribute in vars(module).items():
            for one in _torch.tree_leaves(attribute):
                if isinstance(one, _torch.FakeTensor) and id(one) not in known:
                    raise InputError(
                        f"{f'{name}.' if name else ''}{key} is a tensor that is neither parameter nor buffer",
                        expected="only those in a model of which nothing is allocated",
                        do="Register it, by register_buffer(), or pass the module instead of what makes it",
                    )


class Watch:
    """Snapshot of what a model's modules hold, and of the states of random number generators."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = {
            name: _Kept(vars(module), _DEEPEST, computed(module)) for name, module in model.named_modules()
        }
        self._torch = torch.get_rng_state()
        self._random = [(called, get(), get, put) for called, get, put in _generators()]
        self.printed = Printed()
        """What forward() writes to the terminal."""
        self.seeded: str | None = None
        """Place at which forward() first set torch's random state; None where it did not."""

    def seeding(self) -> AbstractContextManager[None]:
        """Return a context in which forward() runs, to see where it sets torch's random state."""

        def seen() -> None:
            self.seeded = self.seeded or format_frame(user_frame()) or "an unknown place"

        return _torch.seeding_seen(seen)

    def changes(self) -> list[str]:
        """Return the names of the attributes that are not what they were."""
        return [
            f"{name}.{key}" if name else key
            for name, kept in self._attributes.items()
            for key in kept.changed_keys()
            if not (key in _HOOKS and _only_transparent(kept.inside, kept.value, key))
        ]

    def has_changed(self, attribute: str) -> bool:
        """Return whether one attribute, by the name that `changes` gives it, has changed: quicker than all of them."""
        name, _, key = attribute.rpartition(".")
        return self._attributes[name].has_changed(key)

    def draws(self) -> list[str]:
        """Return the names of random number generators, beside torch's own, that were drawn from."""
        return [called for called, before, get, _ in self._random if not _same(before, get())]

    def restore(self) -> None:
        """Put everything back."""
        for kept in self._attributes.values():
            kept.restore()
        for _, before, _, put in self._random:
            put(before)
        torch.set_rng_state(self._torch)


def _only_transparent(before: dict[Any, _Kept] | None, now: dict[str, Any], table: str) -> bool:
    """Return whether only transparent hooks were added to a module's table of hooks, and none was removed."""
    known = {} if before is None else before[table].inside or {}
    came = [hook for number, hook in now[table].items() if number not in known]
    return known.keys() <= now[table].keys() and all(map(is_transparent, came))


def line_of(run: Callable[[], Any], happened: Callable[[], Any]) -> str | None:
    """Find the user's line that makes something happen, by running everything line by line; None where none does."""
    last: tuple[str, int] | None = None
    found: tuple[str, int] | None = None

    def follow(frame: Any, event: str, argument: Any) -> Any:
        nonlocal last, found
        if not is_users(frame.f_code.co_filename):
            return None
        if found is None and last is not None and happened():
            found = last
        last = frame.f_code.co_filename, frame.f_lineno
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        run()
    except Exception:  # it failed before, or it does now: the line is all that is asked for
        pass
    finally:
        sys.settrace(before)
    return format_frame(found)


_INSTALLED = "_output_capturing_hooks_installed"
"""Set by transformers when a model's first call that needs hidden states installs (transparent) hooks for them."""


def computed(module: nn.Module) -> frozenset[str]:
    """Return the names of attributes that are no state: what torch's own modules compute from parameters in each
    forward (weight norm's weight), and the marks that transparent hooks are installed."""
    if isinstance(module, nn.RNNBase):
        return frozenset({"_flat_weights", "_flat_weight_refs"})
    hooks = (hook for hook in _torch.pre_hooks(module) if is_transparent(hook))
    names = (str(getattr(hook, "name", getattr(hook, "_tensor_name", ""))) for hook in hooks)
    return frozenset({_INSTALLED, *names})


class _Kept:
    """Snapshot of a value and of the contents of containers and objects in it, down to a depth."""

    def __init__(self, value: Any, depth: int, without: frozenset[str] = frozenset()) -> None:
        self.value, self.without = value, without
        self.inside: dict[Any, _Kept] | None = None
        self.state = _state_of(value)
        content = None if depth == 0 or self.state is not None else _content(value)
        if content is not None:
            self.inside = {key: _Kept(part, depth - 1) for key, part in content.items()}

    def changed_keys(self, now: Any = None) -> Iterator[Any]:
        """Yield the keys of parts that differ from the snapshot, in the value or in another one in its place."""
        now, before = _content(self.value if now is None else now) or {}, self.inside or {}
        for key in (*before, *(key for key in now if key not in before)):
            if key not in self.without and self._apart(key, before, now):
                yield key

    def has_changed(self, key: Any) -> bool:
        """Return whether one part of the value is not what it was."""
        return self._apart(key, self.inside or {}, _content(self.value) or {})

    @staticmethod
    def _apart(key: Any, before: dict[Any, _Kept], now: dict[Any, Any]) -> bool:
        return (key in before) != (key in now) or (key in before and before[key].differs(now[key]))

    def differs(self, now: Any) -> bool:
        """Return whether another value is in its place, or what is in it has changed. That nothing becomes something
        plain does not count: a model that finds out in its first call what kind of labels it is given."""
        if self.value is None and isinstance(now, _EQUAL):
            return False
        if isinstance(self.value, _EQUAL):
            return type(now) is not type(self.value) or bool(now != self.value)
        if isinstance(self.value, weakref.ref) and isinstance(now, weakref.ref):
            return now() is not self.value()
        if self.inside is not None and type(now) is type(self.value) and not hasattr(now, "__dict__"):
            return any(True for _ in self.changed_keys(now))
        if now is not self.value:
            return True
        if self.state is not None:
            return not _same(self.state, _state_of(now))
        return self.inside is not None and any(True for _ in self.changed_keys())

    def restore(self) -> None:
        """Put back what was in it."""
        if self.state is not None:
            _set_state(self.value, self.state)
        if self.inside is None:
            return
        for part in self.inside.values():
            part.restore()
        if not isinstance(self.value, tuple) and any(True for _ in self._replaced()):
            _refill(self.value, {key: part.value for key, part in self.inside.items()})

    def _replaced(self) -> Iterator[Any]:
        """Parts in whose place there is another object, those that hooks compute among them."""
        now, before = _content(self.value) or {}, self.inside or {}
        for key in {**before, **now}:
            if key not in before or key not in now or now[key] is not before[key].value:
                yield key


def _content(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, _CLOSED) or callable(value):
        return None
    if isinstance(value, dict):
        return dict(value) if len(value) <= _LARGEST else None
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value)) if len(value) <= _LARGEST else None
    if isinstance(value, set):
        return {element: element for element in value} if len(value) <= _LARGEST else None
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if isinstance(attributes, dict) else None


def _refill(value: Any, content: dict[Any, Any]) -> None:
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    elif isinstance(value, (list, collections.deque)):
        value.clear()
        value.extend(content.values())
    else:
        value.__dict__.clear()
        value.__dict__.update(content)


# -- generators of random numbers


def _generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    yield "Python's random", random.getstate, random.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", numpy.random.get_state, numpy.random.set_state


def _state_of(value: Any) -> Any:
    """Return the state of a generator of random numbers, None of anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state()
    return None


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):  # numpy's, of names, numbers and arrays
        return one.keys() == other.keys() and all(_same(part, other[key]) for key, part in one.items())
    if isinstance(one, tuple) and len(one) < _LARGEST:
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else one == other
