"""Undo or refuse side effects of a model's call, which a graph would not repeat.

A capture runs the model's Python twice, on tensors without data. Changes outside of the graph (attributes of modules,
random number generators) are undone.
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
from memplan.trace.held_output import CapturedOutput
from memplan.trace.recording.place import format_frame, is_users, user_frame

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_MAX_DEPTH = 6
"""Levels of containers and objects below a module whose content is compared."""
_MAX_ELEMENTS = 1000
"""Most elements of a container whose content is compared."""
_COMPARED_BY_VALUE = (int, float, bool, str, bytes, complex, torch.Size, torch.dtype, torch.device)
_COMPARED_BY_IDENTITY = (torch.Tensor, nn.Module, type, *_torch.COMPOSABLE_STATES)


_SHARD_LATER = (
    "Fit the module first, then wrap what is fitted: fully_shard(fitted.model), DistributedDataParallel(fitted.model)"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raise UsageError if an inner module has hooks, which planned steps would not call. Hooks with which torch
    computes a weight (weight norm) are allowed."""
    model_of_loss = model.model if isinstance(model, WithLoss) else None
    for name, module in model.named_modules():
        if module is model:
            continue
        hooks = [(kind, hook) for table, kind in _HOOKS.items() for hook in getattr(module, table).values()]
        for kind, hook in hooks:
            if is_transparent(hook):
                continue
            description = f"{kind}, {getattr(hook, '__qualname__', type(hook).__qualname__)}"
            if module is model_of_loss:
                raise UsageError(
                    f"The model has a {description}, and is planned together with its loss",
                    expected="no hooks on it: that plan goes from the inputs to the loss and calls no model",
                    do="Remove it, do in forward() or in the loss what it does, or leave the loss out of the plan",
                )
            raise UsageError(
                f"The layer {name} has a {description}",
                expected="hooks on the outermost module only: a planned step does not call its layers",
                do="Remove it, or do in forward() what it does",
            )


def refuse_surroundings() -> None:
    """Raise UsageError if global module hooks, modes or anomaly detection are active, which a planned step bypasses."""
    active = _torch.surroundings()
    if active is not None:
        raise UsageError(
            f"While the step is planned {active}",
            expected="nothing of the kind: a planned step does not call its layers, and runs other ops",
            do="Remove it, or leave it, before the step is planned; calls that it is active around run unplanned",
        )


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Disable the outermost module's hooks within this context, except those that compute a weight."""
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
    """Return whether all parameters are fake tensors, so that the model can be captured but not run."""
    parameters = list(model.parameters())
    return bool(parameters) and all(isinstance(parameter, _torch.FakeTensor) for parameter in parameters)


def refuse_tensors(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Check that parameters, buffers and inputs are plain tensors, or that the model is fake.

    Raises:
        InputError: the model is wrapped for data parallelism; a tensor is a subclass, quantized, sparse, or has no
            data; or a fake model has tensors that are neither parameters nor buffers.
    """
    for module in model.modules():
        if _torch.is_data_parallel(module):
            raise InputError(f"The model is {type(module).__name__}", expected="the module in it", do=_SHARD_LATER)
    fake = is_fake(model)
    if fake:
        _refuse_unregistered(model)
    named_inputs = [(f"input {index}", tensor) for index, tensor in enumerate(inputs)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *named_inputs):
        if fake and isinstance(tensor, _torch.FakeTensor) and _torch.has_shape(tensor):
            continue
        reason = _torch.untraceable_reason(tensor)
        if reason is not None:
            is_lazy = not _torch.has_shape(tensor)  # a parameter of nn.LazyLinear, for example
            do = None
            if is_lazy:
                do = "Call the model once before, also where a function makes it"
            elif tensor.is_meta:
                do = "To plan without data, pass the function that makes the model, and inputs as text: '8x3x224x224'"
            raise InputError(
                f"{name} is {reason}",
                expected="parameters that are made" if is_lazy else "dense tensors with data, of torch's own classes",
                do=_SHARD_LATER if _torch.is_distributed(tensor) else do,
            )


def _refuse_unregistered(model: nn.Module) -> None:
    """Raise InputError for fake tensors that are neither parameters nor buffers: they would become constants."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for key, attribute in vars(module).items():
            for leaf in _torch.tree_leaves(attribute):
                if isinstance(leaf, _torch.FakeTensor) and id(leaf) not in known:
                    raise InputError(
                        f"{f'{name}.' if name else ''}{key} is a tensor that is neither parameter nor buffer",
                        expected="only those in a model of which nothing is allocated",
                        do="Register it, by register_buffer(), or pass the module instead of what makes it",
                    )


class Watch:
    """Snapshot of the attributes of a model's modules and of the states of random number generators."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = {
            name: _Snapshot(vars(module), _MAX_DEPTH, recomputed_attributes(module))
            for name, module in model.named_modules()
        }
        """By name of a module: its attributes."""
        self._torch_rng_state = torch.get_rng_state()
        generators: list[tuple[str, Callable[[], Any], Callable[[Any], None]]]
        generators, numpy = [("Python's random", random.getstate, random.setstate)], sys.modules.get("numpy")
        if numpy is not None:
            generators.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
        self._generators = [(name, get_state(), get_state, set_state) for name, get_state, set_state in generators]
        """(name, state in the snapshot, get_state, set_state) of the global generators."""
        self.printed = CapturedOutput()
        """What forward() writes to the terminal."""
        self.seeded_at: str | None = None
        """Line at which forward() first set torch's random state, if it did."""

    def seeding(self) -> AbstractContextManager[None]:
        """Return a context that observes where forward() sets torch's random state."""

        def note_line() -> None:
            self.seeded_at = self.seeded_at or format_frame(user_frame()) or "an unknown place"

        return _torch.seeding_seen(note_line)

    def changed_attributes(self) -> list[str]:
        """Return the names of the attributes that differ from the snapshot."""
        return [
            f"{name}.{key}" if name else key
            for name, snapshot in self._attributes.items()
            for key in snapshot.changed_keys()
            if not (key in _HOOKS and _only_transparent(snapshot.parts, snapshot.value, key))
        ]

    def has_changed(self, attribute: str) -> bool:
        """Return whether an attribute differs, by its name in `changed_attributes`."""
        name, _, key = attribute.rpartition(".")
        return self._attributes[name].has_changed(key)

    def drawn_generators(self) -> list[str]:
        """Return the names of the generators of Python and numpy that were drawn from."""
        return [name for name, before, get_state, _ in self._generators if not _same(before, get_state())]

    def restore(self) -> None:
        """Restore attributes and generators as they were in the snapshot."""
        for snapshot in self._attributes.values():
            snapshot.restore()
        for _, before, _, set_state in self._generators:
            set_state(before)
        torch.set_rng_state(self._torch_rng_state)


def _only_transparent(before: dict[Any, _Snapshot] | None, now: dict[str, Any], table: str) -> bool:
    """Return whether the only change of a module's dict of hooks, the attribute ``table``, is that transparent hooks
    were added. ``before``: snapshots of the module's attributes, by name; ``now``: its attributes."""
    hooks_before, hooks_now = ({} if before is None else before[table].parts or {}), now[table]
    added = [hook for key, hook in hooks_now.items() if key not in hooks_before]
    return hooks_before.keys() <= hooks_now.keys() and all(map(is_transparent, added))


def line_of(run: Callable[[], Any], happened: Callable[[], Any]) -> str | None:
    """Return the user's line (``file:line``) after which ``happened()`` is first true, None if it never is. Calls
    ``run()`` and follows it line by line."""
    last_line: tuple[str, int] | None = None
    line: tuple[str, int] | None = None

    def follow(frame: Any, event: str, argument: Any) -> Any:
        """Trace function of `sys.settrace`."""
        nonlocal last_line, line
        if not is_users(frame.f_code.co_filename):
            return None
        if line is None and last_line is not None and happened():
            line = last_line
        last_line = frame.f_code.co_filename, frame.f_lineno
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        run()
    except Exception:  # the caller raises its own error with this line
        pass
    finally:
        sys.settrace(before)
    return format_frame(line)


_TRANSFORMERS_FLAG = "_output_capturing_hooks_installed"
"""Set by transformers in a model's first call that needs hidden states, when it installs transparent hooks."""


def recomputed_attributes(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's attributes whose changes are no side effects: each forward pass computes them from
    parameters (the weight of weight norm), or transformers sets them."""
    if isinstance(module, nn.RNNBase):
        return frozenset({"_flat_weights", "_flat_weight_refs"})
    hooks = (hook for hook in _torch.pre_hooks(module) if is_transparent(hook))
    # weight_norm's hook has the weight's name in ``name``, a pruning method in ``_tensor_name``
    names = (str(getattr(hook, "name", getattr(hook, "_tensor_name", ""))) for hook in hooks)
    return frozenset({_TRANSFORMERS_FLAG, *names})


class _Snapshot:
    """Snapshot of a value, and of the containers and objects in it down to a depth. Changes at the keys ``ignored`` of
    its content do not count."""

    def __init__(self, value: Any, depth: int, ignored: frozenset[str] = frozenset()) -> None:
        self.value, self.ignored = value, ignored
        self.parts: dict[Any, _Snapshot] | None = None
        """Snapshots of its elements or attributes, by key; None if its content is not compared."""
        self.state = _state_of(value)
        """State of a random number generator, None for other values."""
        content = None if depth == 0 or self.state is not None else _content(value)
        if content is not None:
            self.parts = {key: _Snapshot(part, depth - 1) for key, part in content.items()}

    def changed_keys(self, now: Any = None) -> Iterator[Any]:
        """Yield the keys at which the content of ``now`` (default: the value itself) differs from the snapshot."""
        content, before = _content(self.value if now is None else now) or {}, self.parts or {}
        for key in (*before, *(key for key in content if key not in before)):
            if key not in self.ignored and self._differs_at(key, before, content):
                yield key

    def has_changed(self, key: Any) -> bool:
        """Return whether the value's element or attribute at a key differs from the snapshot."""
        return self._differs_at(key, self.parts or {}, _content(self.value) or {})

    @staticmethod
    def _differs_at(key: Any, before: dict[Any, _Snapshot], now: dict[Any, Any]) -> bool:
        """Return whether a key was added or removed, or its value differs."""
        return (key in before) != (key in now) or (key in before and before[key].differs(now[key]))

    def differs(self, now: Any) -> bool:
        """Return whether ``now`` is another value, or the same with other content."""
        if self.value is None and isinstance(now, _COMPARED_BY_VALUE):  # some models set their kind of labels once
            return False
        if isinstance(self.value, _COMPARED_BY_VALUE):
            return type(now) is not type(self.value) or bool(now != self.value)
        if isinstance(self.value, weakref.ref) and isinstance(now, weakref.ref):
            return now() is not self.value()
        if self.parts is not None and type(now) is type(self.value) and not hasattr(now, "__dict__"):
            return any(True for _ in self.changed_keys(now))  # builtin containers are compared by content
        if now is not self.value:
            return True
        if self.state is not None:
            return not _same(self.state, _state_of(now))
        return self.parts is not None and any(True for _ in self.changed_keys())

    def restore(self) -> None:
        """Restore the content of the value, at all levels."""
        if self.state is not None:
            _set_state(self.value, self.state)
        if self.parts is None:
            return
        for part in self.parts.values():
            part.restore()
        content, content_now = {key: part.value for key, part in self.parts.items()}, _content(self.value) or {}
        is_same = content_now.keys() == content.keys() and all(content_now[key] is content[key] for key in content)
        if not isinstance(self.value, tuple) and not is_same:
            _refill(self.value, content)


def _content(value: Any) -> dict[Any, Any] | None:
    """Return a container's elements or an object's attributes by key; None if its content is not compared."""
    if isinstance(value, _COMPARED_BY_IDENTITY) or callable(value):
        return None
    if isinstance(value, dict):
        return dict(value) if len(value) <= _MAX_ELEMENTS else None
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value)) if len(value) <= _MAX_ELEMENTS else None
    if isinstance(value, set):
        return {element: element for element in value} if len(value) <= _MAX_ELEMENTS else None
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if isinstance(attributes, dict) else None


def _refill(value: Any, content: dict[Any, Any]) -> None:
    """Replace the content of a container or object in place. ``content``: as `_content` returns it."""
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


def _state_of(value: Any) -> Any:
    """Return the state of a random number generator, None for other values."""
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


def _set_state(generator: Any, state: Any) -> None:
    """Set the state of a random number generator of Python, numpy or torch. ``state``: as `_state_of` returns it."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):  # numpy.random.Generator
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _same(before: Any, now: Any) -> bool:
    """Return whether two states of a random number generator (tensors, arrays, tuples, dicts) are equal."""
    if isinstance(before, torch.Tensor):
        return torch.equal(before, now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(part, now[key]) for key, part in before.items())
    if isinstance(before, tuple) and len(before) < _MAX_ELEMENTS:
        return len(before) == len(now) and all(map(_same, before, now))
    is_array = hasattr(before, "all")
    return bool((before == now).all()) if is_array else before == now
