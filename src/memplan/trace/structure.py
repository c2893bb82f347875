"""Takes the tensors out of a nested value, and rebuilds the value around other tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch

_LEAVES = (str, bytes, int, float, complex, type, torch.Tensor, nn.Module, torch.Generator,
           torch.SymInt, torch.SymFloat, torch.SymBool)  # fmt: skip
"""Types that are not searched for tensors. Symbolic sizes reference their whole shape environment."""


class _Slot:
    """Type of `TENSOR`."""

    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _Slot()
"""Marks the place of a tensor among the leaves of a Structure."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A nested value without its tensors."""

    spec: Any
    leaves: tuple[Any, ...]
    """TENSOR, a `Holder` of nested tensors, or a leaf without tensors."""

    def rebuild(self, tensors: Iterable[Any]) -> Any:
        """Return the value with these tensors, in order. Objects that contain tensors are copied."""
        remaining = iter(tensors)
        return _torch.tree_unflatten([_fill(leaf, remaining) for leaf in self.leaves], self.spec)

    def constants(self) -> Iterator[Any]:
        """Yield the leaves that are not tensors and contain none, in order."""
        for leaf in self.leaves:
            if isinstance(leaf, Holder):
                yield from leaf.inside.constants()
            elif leaf is not TENSOR:
                yield leaf


@dataclass(frozen=True, slots=True)
class Holder:
    """An object with tensors among its attributes or items (a dataclass, a cache), and its copy without them."""

    shell: Any
    inside: Structure
    """Structure of a pair of dicts: the object's attributes, and its items, that contain tensors."""

    def fill(self, tensors: Iterator[Any]) -> Any:
        """Return a copy of the object with these tensors."""
        attributes, items = self.inside.rebuild(tensors)
        copied = _shallow_copy(self.shell)
        for name, value in attributes.items():
            object.__setattr__(copied, name, value)
        for key, value in items.items():
            dict.__setitem__(copied, key, value)
        return copied


def _fill(leaf: Any, tensors: Iterator[Any]) -> Any:
    """Return a leaf of a Structure with the next of ``tensors`` in the place of each tensor in it."""
    if leaf is TENSOR:
        return next(tensors)
    return leaf.fill(tensors) if isinstance(leaf, Holder) else leaf


def take_apart(value: Any) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """Return the tensors in a value, in order, and its structure.

    Searches lists, tuples, dicts, types registered with torch's pytree, and attributes and items of other objects;
    not modules.
    """
    tensors: list[torch.Tensor] = []
    structure = _structure(value, tensors, ())
    return tuple(tensors), structure


def _structure(value: Any, tensors: list[torch.Tensor], path: tuple[int, ...]) -> Structure:
    """Return the structure of a value, and append its tensors to ``tensors``. ``path``: see `_leaf`."""
    leaves, spec = _torch.tree_flatten(value)
    return Structure(spec, tuple(_leaf(leaf, tensors, path) for leaf in leaves))


def _leaf(leaf: Any, tensors: list[torch.Tensor], path: tuple[int, ...]) -> Any:
    """Return the entry of a leaf in `Structure.leaves`, and append the tensors in the leaf to ``tensors``.

    ``path``: id() of each enclosing object, against endless recursion.
    """
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf)
        return TENSOR
    if leaf is None or isinstance(leaf, _LEAVES) or id(leaf) in path:
        return leaf
    path = (*path, id(leaf))
    attributes = {name: part for name, part in _attributes(leaf).items() if _contains_tensor(part, path)}
    items = {key: part for key, part in leaf.items() if _contains_tensor(part, path)} if isinstance(leaf, dict) else {}
    if not attributes and not items:
        return leaf
    shell = _shallow_copy(leaf)
    for name in attributes:
        object.__setattr__(shell, name, None)
    for key in items:
        dict.__setitem__(shell, key, None)
    return Holder(shell, _structure((attributes, items), tensors, path))


def _contains_tensor(value: Any, path: tuple[int, ...]) -> bool:
    """Return whether a value contains a tensor. ``path``: id() of each enclosing object, against endless recursion."""
    for leaf in _torch.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            return True
        if leaf is None or isinstance(leaf, _LEAVES) or id(leaf) in path:
            continue
        inner = (*path, id(leaf))
        items = list(leaf.values()) if isinstance(leaf, dict) else []
        if any(_contains_tensor(part, inner) for part in (*_attributes(leaf).values(), *items)):
            return True
    return False


def _shallow_copy(value: Any) -> Any:
    """Return a shallow copy without calling ``__copy__``, which may fail on an object without its tensors."""
    try:
        copied = object.__new__(type(value)) if not isinstance(value, dict) else type(value).__new__(type(value))
    except TypeError:  # a class with a __new__ of its own in C
        return copy.copy(value)
    if isinstance(value, dict):
        dict.update(copied, value)
    for name, part in _attributes(value).items():
        object.__setattr__(copied, name, part)
    return copied


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those of a dataclass with slots included."""
    attributes = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):  # which may have slots
        attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} | attributes
    return attributes
