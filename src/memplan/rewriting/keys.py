"""Make keys of calls: a plan is made for one key and runs for no other.

A key has which modules there are and whether they train, shapes, strides, dtypes and ``requires_grad`` of parameters,
buffers and inputs, arguments that are not tensors, hooks, autocast, and torch's global flags. What else the model's
Python code has read is known once it was captured (`memplan.planning.capture.reads`), and is compared for each
plan by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memplan import _torch
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.reads.kinds import PLAIN, told
from memplan.trace.structure import TENSOR, Holder, Structure

_STATES = 64
"""Number of states that are recognized as the very same object."""


class UnkeyedError(Exception):
    """Raised for a call that cannot be planned; the text says why."""


class Key(NamedTuple):
    """Key of a call."""

    leaves: tuple[Hashable, ...]
    """The arguments in order, tensors left out."""
    state: State
    """Of the model and of torch."""
    rest: tuple[Hashable, ...]
    """Of the call's tensors: shapes and the like first."""

    def __hash__(self) -> int:
        return hash((self.leaves, self.state, self.rest[0]))  # pytree's spec, which is in the rest, hashes slowly

    def differing_leaves(self, other: Key) -> list[int] | None:
        """Return the positions of the arguments in which another key differs, if these are numbers and nothing else
        differs; else None."""
        if (self.state, self.rest) != (other.state, other.rest) or len(self.leaves) != len(other.leaves):
            return None
        pairs = enumerate(zip(self.leaves, other.leaves, strict=True))
        places = [at for at, (one, another) in pairs if one != another]
        return places if all(_is_number(key.leaves[at]) for at in places for key in (self, other)) else None


class State:
    """Part of a key that is mostly the very same object in the next call."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self._hash == other._hash and self._value == other._value)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class _Structure:
    """Modules of a model at one time. Another structure is another key."""

    modules: tuple[nn.Module, ...]
    """All but the model itself, which must not be kept alive."""
    children: tuple[tuple[dict[str, nn.Module | None], tuple[nn.Module | None, ...]], ...]
    """Dict of each module's own submodules, and its content then."""
    tensors: tuple[tuple[dict[str, Any], int], ...]
    """Dicts of parameters and of buffers, and their lengths then."""

    def holds(self) -> bool:
        """Return whether the model still has these modules, parameters and buffers."""
        return all(tuple(now.values()) == then for now, then in self.children) and all(
            len(now) == then for now, then in self.tensors
        )


@dataclass(frozen=True)
class _Last:
    """State of the last call, and what shows that it still is the same."""

    state: State
    dicts: _torch.DictGuards
    """Attributes, parameters, buffers, submodules and hooks of all modules."""
    empty: list[dict[Any, Any]]
    """Those that had nothing in them, tables of hooks aside."""
    tables: list[dict[Any, Any]]
    """Tables of hooks that had nothing in them."""
    hooks: int
    """Number of hooks that had been registered in the process."""
    kinds: list[type]
    training: list[bool]
    tensors: tuple[torch.Tensor, ...]
    hooked: list[bool] | None
    """Which have hooks that run once a gradient was added; None: none."""
    trained: list[torch.Tensor]
    guards: dict[Hashable, tuple[_torch.TensorGuards, State]]
    """By autocast and flags."""


class Keys:
    """Make the keys of one model's calls."""

    def __init__(self, model: nn.Module) -> None:
        self._structure, self._number = _structure(model), 0
        self._last: _Last | None = None
        self._states: dict[State, State] = {}

    def key(self, model: nn.Module, call: Call) -> Key:
        """Return the key of a call in the model's present state.

        Raises:
            UnkeyedError: an argument is neither a tensor nor plain data.
        """
        rest = tuple([_about(tensor) for tensor in call.tensors]), call.aliases, call.kinds, call.structure.spec
        return Key(_leaves(call.structure), self._state(model), rest)

    def are_gradients_held(self) -> bool:
        """Return whether a parameter that is trained has a gradient. Call it after `key`."""
        trained = self._trained() if self._last is None else self._last.trained
        for tensor in trained:  # noqa: SIM110  # any() takes longer, and count(None) compares tensors, 10 us for each
            if tensor.grad is not None:
                return True
        return False

    @property
    def moment(self) -> object:
        """Token: the same object in later calls as long as no module's attributes have changed; None: not known."""
        return self._last if _torch.VERSIONS_SEE_ATTRIBUTES else None

    def release(self) -> None:
        """Hold no tensor of the last call: the next key is made anew."""
        self._last = None

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the model's present parameters."""
        for own in self._structure.tensors[::2]:
            yield from (tensor for tensor in own[0].values() if tensor is not None)

    def _trained(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.parameters() if tensor.requires_grad]

    def _state(self, model: nn.Module) -> State:
        around = _autocast(), _torch.flags()
        last = self._last
        if last is not None and self._is_as(last, model):
            known = last.guards.get(around)
            if known is not None and known[0].hold(last.tensors):
                return known[1]
        return self._new_state(model, around)

    def _is_as(self, last: _Last, model: nn.Module) -> bool:
        return (
            last.dicts.hold()
            and not any(last.empty)
            and [*map(type, self._structure.modules), type(model)] == last.kinds
            and (_torch.VERSIONS_SEE_ATTRIBUTES or self._training(model) == last.training)
            and (
                (last.hooked is None and RemovableHandle.next_id == last.hooks)  # no hook was registered anywhere
                or (not any(last.tables) and _hooked(last.tensors) == last.hooked)
            )
        )

    def _new_state(self, model: nn.Module, around: Hashable) -> State:
        if not self._structure.holds():
            self._structure, self._number, self._last = _structure(model), self._number + 1, None
        structure, last = self._structure, self._last
        tensors = list(self._tensors())
        kinds, training = [*map(type, structure.modules), type(model)], self._training(model)
        state = State((
            self._number,
            tuple(training),
            tuple(kinds),
            tuple([_about(tensor) for tensor in tensors]),
            tuple([tensor is not None and bool(_torch.gradient_hooks(tensor)) for tensor in tensors]),
            _tied(tensors),
            tuple([_torch.own_hooks(module) for module in structure.modules]),
            around,
        ))  # fmt: skip
        if len(self._states) >= _STATES:
            self._states.clear()
        state = self._states.setdefault(state, state)  # objects that are the same are compared quickly
        present = tuple({id(tensor): tensor for tensor in tensors if tensor is not None}.values())
        modules = model, *structure.modules
        own = [table for module in modules for table in _torch.own_dicts(module)]
        hooks = [table for module in modules for table in _torch.hook_tables(module)]
        dicts = _torch.DictGuards(table for table in (*own, *hooks) if table)
        empty, tables = [table for table in own if not table], [table for table in hooks if not table]
        guards = {around: (_torch.TensorGuards(present), state)}
        if last is not None and around not in last.guards and last.dicts.versions == dicts.versions:
            dicts, guards = last.dicts, guards | last.guards
        hooked = _hooked(present)
        self._last = _Last(
            state,
            dicts,
            empty,
            tables,
            RemovableHandle.next_id,
            kinds,
            training,
            present,
            hooked,
            self._trained(),
            guards,
        )
        return state

    def _training(self, model: nn.Module) -> list[bool]:
        return [model.training, *[module.training for module in self._structure.modules]]

    def _tensors(self) -> Iterator[torch.Tensor | None]:
        for own, _ in self._structure.tensors:
            yield from own.values()


def argument_of(call: Call, leaf: int) -> str:
    """Name the argument that holds a leaf of a call: ``argument scale``, ``argument 0``."""
    args, kwargs = call.rebuild(call.tensors)
    for name, part in (*enumerate(args), *kwargs.items()):
        leaf -= len(_torch.tree_leaves(part))
        if leaf < 0:
            return f"argument {name}"
    return "an argument"


def _structure(model: nn.Module) -> _Structure:
    modules = tuple(model.modules())
    return _Structure(
        modules[1:],
        tuple((own, tuple(own.values())) for own in map(_torch.own_modules, modules)),
        tuple((own, len(own)) for module in modules for own in _torch.own_tensors(module)),
    )


def _leaves(structure: Structure) -> tuple[Hashable, ...]:
    return tuple([_leaf(leaf) for leaf in structure.leaves])


def _leaf(leaf: Any) -> Hashable:
    if leaf is TENSOR:
        return TENSOR
    if isinstance(leaf, Holder):
        shell = tuple((name, _leaf(value)) for name, value in getattr(leaf.shell, "__dict__", {}).items())
        return type(leaf.shell), shell, leaf.inside.spec, _leaves(leaf.inside)
    if isinstance(leaf, (tuple, list)):
        return type(leaf), tuple(_leaf(part) for part in leaf)
    if not isinstance(leaf, PLAIN):
        raise UnkeyedError(f"an argument of type {type(leaf).__name__}, neither a tensor nor plain data")
    return told(leaf)


def _is_number(leaf: Hashable) -> bool:
    """Return whether a leaf's value (see `told`) is a number and not a bool."""
    return isinstance(leaf, tuple) and isinstance(leaf[0], type) and issubclass(leaf[0], (int, float, complex)) and (
        leaf[0] is not bool
    )  # fmt: skip


def _about(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if type(tensor) is not torch.Tensor and type(tensor) not in (nn.Parameter, nn.Buffer) and not _is_recorded(tensor):
        raise UnkeyedError(f"a tensor of type {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise UnkeyedError(f"a tensor of layout {tensor.layout}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is what memplan's recordings have for any dense one."""
    return type(tensor) is _torch.FakeTensor and isinstance(tensor.fake_mode, _torch.FakeMode)


def _tied(tensors: list[Any]) -> tuple[int, ...]:
    """Return, for each tensor, the first position that has it."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor), at) for at, tensor in enumerate(tensors)])


def _hooked(tensors: Iterable[torch.Tensor]) -> list[bool] | None:
    hooks = [*map(_torch.gradient_hooks, tensors)]
    return [*map(bool, hooks)] if any(hooks) else None


def _autocast() -> Any:
    found = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            found.append((device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()))
    return tuple(found)
