"""Make keys of calls: a plan is made for one key and runs for no other.

A graph holds what the model's Python code decided when it was captured. So a key has all that such code usually
reads: which modules there are and whether they train, what is readable in Python (see readable), shapes, strides,
dtypes and ``requires_grad`` of parameters, buffers and inputs, arguments that are not tensors, and autocast.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from memplan import _torch
from memplan.planning.capture.flat_call import Call
from memplan.rewriting.readable import PLAIN, Found, Readable, told
from memplan.trace.structure import TENSOR, Holder, Structure


class UnkeyedError(Exception):
    """Raised for a call that cannot be planned; the text says why."""


class Key(NamedTuple):
    """Key of a call."""

    readable: Found
    leaves: tuple[Hashable, ...]
    """The arguments in order, tensors left out."""
    rest: Hashable

    def only_difference(self, other: Key) -> str | int | None:
        """Return the one thing in which another key differs: the name of a readable, or the position of an argument
        that is a number. None where it is something else, more than one or nothing."""
        if self.rest != other.rest or len(self.leaves) != len(other.leaves):
            return None
        names: list[str | int] = [*self.readable.differing(other.readable)]
        pairs = enumerate(zip(self.leaves, other.leaves, strict=True))
        places = [at for at, (one, another) in pairs if one != another]
        if not all(_is_number(key.leaves[at]) for at in places for key in (self, other)):
            return None
        return (names + places)[0] if len(names) + len(places) == 1 else None


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


class Keys:
    """Make the keys of one model's calls."""

    def __init__(self, model: nn.Module) -> None:
        self._structure, self._readable, self._number = _structure(model), Readable(model), 0

    def key(self, model: nn.Module, call: Call) -> Key:
        """Return the key of a call in the model's present state.

        Raises:
            UnkeyedError: an argument is neither a tensor nor plain data.
        """
        if not self._structure.holds():
            self._structure, self._readable, self._number = _structure(model), Readable(model), self._number + 1
        structure = self._structure
        tensors = list(self._tensors())
        rest = (
            self._number,
            (model.training, *[module.training for module in structure.modules]),
            tuple([_about(tensor) for tensor in tensors]),
            tuple([tensor is not None and _torch.has_gradient_hooks(tensor) for tensor in tensors]),
            _tied(tensors),
            tuple([_about(tensor) for tensor in call.tensors]),
            call.aliases,
            call.kinds,
            call.structure.spec,
            _hooks(structure),
            _autocast(),
            torch.get_default_dtype(),
        )
        return Key(self._readable.now(), _leaves(call.structure), rest)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the model's present parameters."""
        for own in self._structure.tensors[::2]:
            yield from (tensor for tensor in own[0].values() if tensor is not None)

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


def _hooks(structure: _Structure) -> Any:
    return tuple([_torch.own_hooks(module) for module in structure.modules])


def _autocast() -> Any:
    found = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            found.append((device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()))
    return tuple(found)
