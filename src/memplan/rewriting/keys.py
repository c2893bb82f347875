"""Cache keys of calls: a plan runs only for calls with the same key.

A key consists of the modules and their training flags, shapes, strides, dtypes and ``requires_grad`` of parameters,
buffers and inputs, arguments that are not tensors, hooks, autocast, and torch's global flags. Other Python values that
the model's code reads are guarded per plan (`memplan.planning.capture.reads`).
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
from memplan.planning.capture.reads.kinds import PLAIN, value_key
from memplan.trace.structure import TENSOR, Holder, Structure

_MAX_STATES = 64
"""Most states that are interned."""


class UnkeyedError(Exception):
    """Raised for a call that cannot be planned, with the reason."""


class Key(NamedTuple):
    """Key of a call."""

    leaves: tuple[Hashable, ...]
    """The arguments in order, without tensors."""
    state: State
    """State of the model and of torch."""
    tensors: tuple[Hashable, ...]
    """Metadata of the call's tensors (shapes, strides, dtypes), their aliases, subclasses and pytree."""

    def __hash__(self) -> int:
        return hash((self.leaves, self.state, self.tensors[0]))  # pytree's spec, the last of `tensors`, hashes slowly

    def differing_leaves(self, other: Key) -> list[int] | None:
        """Return the indices of the leaves in which two keys differ if all of these are numbers, else None."""
        if (self.state, self.tensors) != (other.state, other.tensors) or len(self.leaves) != len(other.leaves):
            return None
        pairs = zip(self.leaves, other.leaves, strict=True)
        differing = [(index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]]
        only_numbers = all(_is_number(leaf) for _, pair in differing for leaf in pair)
        return [index for index, _ in differing] if only_numbers else None


class State:
    """Part of a key for the model and torch. Equal states are one object (interned), so that most comparisons of keys
    are by identity."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        """``value``: a nested tuple, whose hash is computed once."""
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self._hash == other._hash and self._value == other._value)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class _Structure:
    """Modules of a model, and the dicts of their tensors. Keys of different structures differ."""

    modules: tuple[nn.Module, ...]
    """All submodules, without the model itself, which must not be kept alive."""
    children: tuple[tuple[dict[str, nn.Module | None], tuple[nn.Module | None, ...]], ...]
    """Dict of each module's own submodules, and a copy of its values."""
    tensors: tuple[tuple[dict[str, Any], int], ...]
    """Dicts of parameters and of buffers, and their lengths."""

    def holds(self) -> bool:
        """Return whether the model still has the same modules, and as many parameters and buffers."""
        same_modules = all(tuple(children.values()) == before for children, before in self.children)
        return same_modules and all(len(tensors) == length_before for tensors, length_before in self.tensors)


@dataclass(frozen=True)
class _LastCall:
    """State of the last call, and guards whose check is cheaper than computing the state."""

    state: State
    dicts: _torch.DictGuards
    """Attributes, parameters, buffers, submodules and hooks of all modules."""
    empty: list[dict[Any, Any]]
    """Empty dicts of modules, but for tables of hooks."""
    tables: list[dict[Any, Any]]
    """Empty tables of hooks."""
    hooks: int
    """Number of hooks registered so far in the process."""
    kinds: list[type]
    training: list[bool]
    tensors: tuple[torch.Tensor, ...]
    hooked: list[bool] | None
    """For each tensor, whether it has post-accumulate-grad hooks; None if none has."""
    trained: list[torch.Tensor]
    guards: dict[Hashable, tuple[_torch.TensorGuards, State]]
    """By autocast state and global flags."""


class Keys:
    """Make the keys of one model's calls."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: the module whose calls get keys."""
        self._structure_of, self._number = _structure_of(model), 0
        """The present modules and tensors, and the number of changes of them so far."""
        self._last: _LastCall | None = None
        """The last call, whose key is reused if nothing has changed."""
        self._states: dict[State, State] = {}
        """Interned states."""

    def key(self, model: nn.Module, call: Call) -> Key:
        """Return the key of a call in the present state. Raises UnkeyedError for arguments of unknown kinds."""
        metadata = tuple([_tensor_metadata(tensor) for tensor in call.tensors])
        tensors = metadata, call.aliases, call.kinds, call.structure.spec
        return Key(_leaves(call.structure), self._state(model), tensors)

    def have_gradients(self) -> bool:
        """Return whether any trained parameter has a gradient. To be called after `key`."""
        trained = self._trained() if self._last is None else self._last.trained
        for tensor in trained:  # noqa: SIM110  # any() is slower; count(None) compares tensors, 10 us each
            if tensor.grad is not None:
                return True
        return False

    @property
    def moment(self) -> object:
        """Token that stays the same object while no module's attributes change; None if changes cannot be observed."""
        return self._last if _torch.VERSIONS_SEE_ATTRIBUTES else None

    def release(self) -> None:
        """Drop the tensors of the last call; the next key is computed from scratch."""
        self._last = None

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the model's present parameters."""
        parameters_of_modules = self._structure_of.tensors[::2]  # the others are dicts of buffers
        for parameters, _ in parameters_of_modules:
            yield from (parameter for parameter in parameters.values() if parameter is not None)

    def _trained(self) -> list[torch.Tensor]:
        """Return the parameters that require a gradient."""
        return [tensor for tensor in self.parameters() if tensor.requires_grad]

    def _state(self, model: nn.Module) -> State:
        """Return the present state: that of the last call if its guards show that nothing has changed."""
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        cached = torch.is_autocast_cache_enabled()
        global_state = tuple((device, torch.get_autocast_dtype(device), cached) for device in devices), _torch.flags()
        last = self._last
        if last is not None and self._is_unchanged(last, model):
            guards, state = last.guards.get(global_state, (None, last.state))
            if guards is not None and guards.hold(last.tensors):
                return state
        return self._new_state(model, global_state)

    def _is_unchanged(self, last: _LastCall, model: nn.Module) -> bool:
        """Return whether the model's modules, attributes, training flags and hooks are those of the last call."""
        if not last.dicts.hold() or any(last.empty):
            return False
        if [*map(type, self._structure_of.modules), type(model)] != last.kinds:
            return False
        if not (_torch.VERSIONS_SEE_ATTRIBUTES or self._training(model) == last.training):
            return False
        if last.hooked is None and RemovableHandle.next_id == last.hooks:  # no hook was registered anywhere
            return True
        return not any(last.tables) and _have_gradient_hooks(last.tensors) == last.hooked

    def _new_state(self, model: nn.Module, global_state: Hashable) -> State:
        """Compute the state of the model from all its modules and tensors, and store guards for the next call.

        ``global_state``: autocast and torch's global flags.
        """
        if not self._structure_of.holds():
            self._structure_of, self._number, self._last = _structure_of(model), self._number + 1, None
        structure, last = self._structure_of, self._last
        tensors: list[torch.Tensor | None] = [
            tensor for tensors_by_name, _ in structure.tensors for tensor in tensors_by_name.values()
        ]
        first: dict[int, int] = {}  # id() of a tensor -> its first index; tied tensors have the same
        tied = tuple([first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)])
        kinds, training = [*map(type, structure.modules), type(model)], self._training(model)
        state = State((
            self._number,
            tuple(training),
            tuple(kinds),
            tuple([_tensor_metadata(tensor) for tensor in tensors]),
            tuple([tensor is not None and bool(_torch.gradient_hooks(tensor)) for tensor in tensors]),
            tied,
            tuple([_torch.own_hooks(module) for module in structure.modules]),
            global_state,
        ))  # fmt: skip
        if len(self._states) >= _MAX_STATES:
            self._states.clear()
        state = self._states.setdefault(state, state)  # compares by identity from now on
        present = tuple({id(tensor): tensor for tensor in tensors if tensor is not None}.values())
        modules = model, *structure.modules
        dicts_of_modules = [table for module in modules for table in _torch.own_dicts(module)]
        hook_tables = [table for module in modules for table in _torch.hook_tables(module)]
        dicts = _torch.DictGuards(table for table in (*dicts_of_modules, *hook_tables) if table)
        guards = {global_state: (_torch.TensorGuards(present), state)}
        if last is not None and global_state not in last.guards and last.dicts.versions == dicts.versions:
            dicts, guards = last.dicts, guards | last.guards  # only the global state is new
        self._last = _LastCall(
            state, dicts, empty=[table for table in dicts_of_modules if not table],
            tables=[table for table in hook_tables if not table], hooks=RemovableHandle.next_id, kinds=kinds,
            training=training, tensors=present, hooked=_have_gradient_hooks(present), trained=self._trained(),
            guards=guards,
        )  # fmt: skip
        return state

    def _training(self, model: nn.Module) -> list[bool]:
        """Return the training flags of the model and its submodules."""
        return [model.training, *[module.training for module in self._structure_of.modules]]


def argument_of(call: Call, leaf: int) -> str:
    """Return the name of the argument that contains the leaf with this number, counted over all arguments of a call:
    ``argument scale``, ``argument 0``."""
    args, kwargs = call.rebuild(call.tensors)
    for name, argument in (*enumerate(args), *kwargs.items()):
        leaf -= len(_torch.tree_leaves(argument))
        if leaf < 0:
            return f"argument {name}"
    return "an argument"


def _structure_of(model: nn.Module) -> _Structure:
    """Return the present modules of a model, and the dicts of their tensors."""
    modules = tuple(model.modules())
    return _Structure(
        modules[1:],
        tuple((children, tuple(children.values())) for children in map(_torch.own_modules, modules)),
        tuple((tensors, len(tensors)) for module in modules for tensors in _torch.own_tensors(module)),
    )


def _leaves(structure: Structure) -> tuple[Hashable, ...]:
    """Return the keys of all leaves of arguments, in order."""
    return tuple([_leaf(leaf) for leaf in structure.leaves])


def _leaf(leaf: Any) -> Hashable:
    """Return the key of a leaf of the arguments: the value of plain data; of an object that contains tensors, its
    class, its other attributes and its structure. Raises UnkeyedError if the argument is of another kind."""
    if leaf is TENSOR:
        return TENSOR
    if isinstance(leaf, Holder):
        shell = tuple((name, _leaf(value)) for name, value in getattr(leaf.shell, "__dict__", {}).items())
        return type(leaf.shell), shell, leaf.inside.spec, _leaves(leaf.inside)
    if isinstance(leaf, (tuple, list)):
        return type(leaf), tuple(_leaf(part) for part in leaf)
    if not isinstance(leaf, PLAIN):
        raise UnkeyedError(f"an argument of type {type(leaf).__name__}, neither a tensor nor plain data")
    return value_key(leaf)


def _is_number(leaf: Hashable) -> bool:
    """Return whether the key of a leaf, (type, value) for plain data, is that of a number and not a bool."""
    kind = leaf[0] if isinstance(leaf, tuple) else None
    return isinstance(kind, type) and issubclass(kind, (int, float, complex)) and kind is not bool


def _tensor_metadata(tensor: torch.Tensor | None) -> Any:
    """Return the part of a key for a tensor: shape, strides, dtype, device and ``requires_grad``. Raises UnkeyedError
    if the tensor is of a subclass or not strided."""
    if tensor is None:
        return None
    is_recorded = type(tensor) is _torch.FakeTensor and isinstance(tensor.fake_mode, _torch.FakeMode)
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) and not is_recorded:
        order = ": call fully_shard before memplan.fit" if _torch.is_distributed(tensor) else ""
        raise UnkeyedError(f"a tensor of type {type(tensor).__name__}{order}")
    if tensor.layout is not torch.strided:
        raise UnkeyedError(f"a tensor of layout {tensor.layout}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _have_gradient_hooks(tensors: Iterable[torch.Tensor]) -> list[bool] | None:
    """Return for each tensor whether it has post-accumulate-grad hooks; None if none has."""
    hooks = [*map(_torch.gradient_hooks, tensors)]
    return [*map(bool, hooks)] if any(hooks) else None
