"""Tensors inside of other values: taken out in order, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch

_CLOSED = (str, bytes, int, float, complex, type, torch.Tensor, nn.Module, torch.Generator)
"""What nothing is taken out of."""


class _Slot:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _Slot()
"""Stands for a tensor among the leaves of a Structure."""


@dataclass(frozen=True, slots=True)
class Structure:
    """How a value is put together from its tensors; what else is in it is kept as it was."""

    spec: Any
    leaves: tuple[Any, ...]
    """TENSOR, the `Holder` of further ones, or the leaf itself."""

    def rebuild(self, tensors: Iterable[Any]) -> Any:
        """Return the value with these in place of its tensors. Objects that held some are copies of the original
        ones."""
        left = iter(tensors)
        return _torch.tree_unflatten([_filled(leaf, left) for leaf in self.leaves], self.spec)

    def constants(self) -> Iterator[Any]:
        """Return everything in it that is no tensor and holds none, in order."""
        for leaf in self.leaves:
            if isinstance(leaf, Holder):
                yield from leaf.inside.constants()
            elif leaf is not TENSOR:
                yield leaf


@dataclass(frozen=True, slots=True)
class Holder:
    """An object with tensors among its attributes or items (a dataclass, a cache), and what it is without them."""

    shell: Any
    inside: Structure
    """Of two dicts: its attributes and its items that hold tensors."""

    def filled(self, tensors: Iterator[Any]) -> Any:
        """Return a copy of the object with these tensors."""
        attributes, items = self.inside.rebuild(tensors)
        made = _copied(self.shell)
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        for key, value in items.items():
            dict.__setitem__(made, key, value)
        return made


def _filled(leaf: Any, tensors: Iterator[Any]) -> Any:
    if leaf is TENSOR:
        return next(tensors)
    return leaf.filled(tensors) if isinstance(leaf, Holder) else leaf


def take_apart(value: Any) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """Return the tensors in a value, in order, and how they are put together.

    Looks into lists, tuples and dicts, into what is registered with torch's pytree, and into objects that hold
    tensors among their attributes; not into modules.
    """
    tensors: list[torch.Tensor] = []
    structure = _apart(value, tensors, ())
    return tuple(tensors), structure


def _apart(value: Any, tensors: list[torch.Tensor], path: tuple[int, ...]) -> Structure:
    leaves, spec = _torch.tree_flatten(value)
    return Structure(spec, tuple(_leaf(leaf, tensors, path) for leaf in leaves))


def _leaf(leaf: Any, tensors: list[torch.Tensor], path: tuple[int, ...]) -> Any:
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf)
        return TENSOR
    if leaf is None or isinstance(leaf, _CLOSED) or id(leaf) in path:
        return leaf
    path = (*path, id(leaf))
    attributes = {name: part for name, part in _attributes(leaf).items() if _holds(part, path)}
    items = {key: part for key, part in leaf.items() if _holds(part, path)} if isinstance(leaf, dict) else {}
    if not attributes and not items:
        return leaf
    shell = _copied(leaf)
    for name in attributes:
        object.__setattr__(shell, name, None)
    for key in items:
        dict.__setitem__(shell, key, None)
    return Holder(shell, _apart((attributes, items), tensors, path))


def _holds(value: Any, path: tuple[int, ...]) -> bool:
    """Return whether there is a tensor in a value."""
    for leaf in _torch.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            return True
        if leaf is None or isinstance(leaf, _CLOSED) or id(leaf) in path:
            continue
        inner = (*path, id(leaf))
        items = list(leaf.values()) if isinstance(leaf, dict) else []
        if any(_holds(part, inner) for part in (*_attributes(leaf).values(), *items)):
            return True
    return False


def _copied(value: Any) -> Any:
    """Return a shallow copy, made without the object's own way to copy itself, which may not stand a missing part."""
    try:
        made = object.__new__(type(value)) if not isinstance(value, dict) else type(value).__new__(type(value))
    except TypeError:  # a class with a __new__ of its own in C
        return copy.copy(value)
    if isinstance(value, dict):
        dict.update(made, value)
    for name, part in _attributes(value).items():
        object.__setattr__(made, name, part)
    return made


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):  # which may have slots
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} | found
    return found
