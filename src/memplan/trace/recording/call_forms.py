"""Records the arguments and results of forward ops: tensors as views, other arguments as plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.records import Form, Option, View


class Forms:
    """Records the call of each forward op, and the tensors that modules returned, for checks that trace positions."""

    def __init__(self, ledger: Ledger) -> None:
        self.forms: list[Form] = []
        """Forward ops so far, with the tensors of each as views of storages, and its options."""
        self.returned: list[tuple[int, int, tuple[View, ...]]] = []
        """(id() of the module, number of ops begun by then, its tensors)."""
        self._ledger = ledger
        self._arguments: dict[Any, list[tuple[int, str, bool, Any]]] = {}
        """Op -> its arguments: (position, name, whether it is a tensor, default)."""

    def note(self, op: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record the call of op number ``op``."""
        reads: list[tuple[str, View]] = []
        options: list[tuple[str, Option]] = []
        for position, name, is_tensor, default in self._arguments_of(func):
            value = args[position] if position < len(args) else kwargs.get(name, default)
            views = list(self._views(value)) if is_tensor else []
            reads += [(name, view) for view in views]
            option = None if views else _plain(value)  # also of a tensor argument, which can be a number: x + 1
            if option is not None:
                options.append((name, option))
        self.forms.append(Form(op, tuple(reads), tuple(self._views(result)), tuple(options)))

    def returns(self, module: int, after: int, result: Any) -> None:
        """Record the tensors that a module (its id()) returned after ``after`` ops."""
        self.returned.append((module, after, tuple(self._views(list(tensors_in(result))))))

    def _arguments_of(self, func: Any) -> list[tuple[int, str, bool, Any]]:
        """Return (position, name, whether it takes tensors, default) of each argument of an op."""
        arguments = self._arguments.get(func)
        if arguments is None:
            arguments = self._arguments[func] = [
                (position, argument.name, "Tensor" in str(argument.type), argument.default_value)
                for position, argument in enumerate(_torch.arguments(func))
            ]
        return arguments

    def _views(self, value: Any) -> Iterator[View]:
        """Yield each dense tensor in a value, or in nested lists and tuples, as a view of its storage."""
        if isinstance(value, torch.Tensor):
            entry = self._ledger.find(value) if value.layout == torch.strided else None
            if entry is not None:
                yield View(entry.id, tuple(value.shape), tuple(value.stride()), int(value.storage_offset()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self._views(item)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module returned, in lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _plain(value: Any) -> Option:
    """Return a number, a string or a list of numbers as a saved option; None for other values, such as a dtype.

    Inf and nan, which JSON lacks, become strings.
    """
    if isinstance(value, (bool, int, float, str)):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, (list, tuple)) and all(item is None or isinstance(item, (bool, int, float)) for item in value):
        return tuple(map(_plain, value))
    return None
