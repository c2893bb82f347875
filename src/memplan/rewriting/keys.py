"""What tells one call of a model from another: a plan is made for one key and runs for no other.

A graph holds what the model's Python code decided when it was captured. So a key has all that such code usually
reads: which modules there are and whether they train, their plain attributes (a dropout's ``p``), shapes, strides,
dtypes and ``requires_grad`` of parameters, buffers and inputs, arguments that are no tensors, and autocast.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.planning.calls import Call
from memplan.trace.structure import TENSOR, Holder, Structure

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format, enum.Enum)  # fmt: skip


class UnkeyedError(Exception):
    """A call that no plan can be made for; the text says why."""


@dataclass(frozen=True)
class _Structure:
    """The modules of a model as they were once. Another structure is another key."""

    modules: tuple[nn.Module, ...]
    """All but the model itself, which is not to be kept alive."""
    children: tuple[tuple[dict[str, nn.Module | None], tuple[nn.Module | None, ...]], ...]
    """The dict of each module's own submodules, and what was in it."""
    attributes: tuple[tuple[dict[str, Any], str], ...]
    """(a module's attributes, the name of a plain one)."""
    tensors: tuple[tuple[dict[str, Any], int], ...]
    """The dicts of parameters and of buffers, and their lengths."""

    def holds(self) -> bool:
        """Whether the model still has just these modules, parameters and buffers."""
        return all(tuple(now.values()) == then for now, then in self.children) and all(
            len(now) == then for now, then in self.tensors
        )


class Keys:
    """Makes the keys of the calls of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._structure, self._number = _structure(model), 0
        self._last: list[Any] = []
        self._attributes: tuple[Any, ...] = ()

    def key(self, model: nn.Module, call: Call) -> Hashable:
        """The key of a call now.

        Raises:
            UnkeyedError: an argument is neither a tensor nor plain data.
        """
        if not self._structure.holds():
            self._structure, self._number = _structure(model), self._number + 1
            self._last = []
        structure = self._structure
        tensors = list(self._tensors())
        return (
            self._number,
            (model.training, *[module.training for module in structure.modules]),
            self.attributes(),
            tuple([_about(tensor) for tensor in tensors]),
            _tied(tensors),
            tuple([_about(tensor) for tensor in call.tensors]),
            call.aliases,
            _arguments(call.structure),
            _hooks(structure),
            _autocast(),
            torch.get_default_dtype(),
        )

    def attributes(self) -> tuple[Any, ...]:
        """The plain attributes of all modules."""
        now = [own.get(name) for own, name in self._structure.attributes]
        # Few attributes ever change: what is the same object as in the last call is not looked at again.
        if len(now) != len(self._last) or not all(map(operator.is_, now, self._last)):
            self._last = [value if _is_plain(value) else None for value in now]
            self._attributes = tuple(map(_attribute, now))
        return self._attributes

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters that the model has now."""
        for own in self._structure.tensors[::2]:
            yield from (tensor for tensor in own[0].values() if tensor is not None)

    def _tensors(self) -> Iterator[torch.Tensor | None]:
        for own, _ in self._structure.tensors:
            yield from own.values()


def _structure(model: nn.Module) -> _Structure:
    modules = tuple(model.modules())
    return _Structure(
        modules[1:],
        tuple((own, tuple(own.values())) for own in map(_torch.own_modules, modules)),
        tuple(
            (module.__dict__, name)
            for module in modules
            for name, value in _torch.own_attributes(module)
            if _is_plain(value)
        ),
        tuple((own, len(own)) for module in modules for own in _torch.own_tensors(module)),
    )


def _is_plain(value: Any) -> bool:
    """Whether it cannot change, or is a tensor: that is told by which one it is."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (*_PLAIN, torch.Tensor))


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_attribute, value))
    return value if isinstance(value, _PLAIN) else id(value)


def _arguments(structure: Structure) -> Hashable:
    return structure.spec, tuple([_leaf(leaf) for leaf in structure.leaves])


def _leaf(leaf: Any) -> Hashable:
    if leaf is TENSOR:
        return TENSOR
    if isinstance(leaf, Holder):
        shell = tuple((name, _leaf(value)) for name, value in getattr(leaf.shell, "__dict__", {}).items())
        return type(leaf.shell), shell, _arguments(leaf.inside)
    if isinstance(leaf, (tuple, list)):
        return type(leaf), tuple(_leaf(part) for part in leaf)
    if not isinstance(leaf, _PLAIN):
        raise UnkeyedError(f"an argument of type {type(leaf).__name__}, neither a tensor nor plain data")
    return type(leaf), leaf


def _about(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if type(tensor) is not torch.Tensor and type(tensor) not in (nn.Parameter, nn.Buffer):
        raise UnkeyedError(f"a tensor of type {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise UnkeyedError(f"a tensor of layout {tensor.layout}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _tied(tensors: list[Any]) -> tuple[int, ...]:
    """For each tensor the first place where it is."""
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
