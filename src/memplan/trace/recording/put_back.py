"""What a step changed of what was there before it, put back so that a second run begins as the first did."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.recording.place import Place

_STATISTICS = ("running_mean", "running_var")
"""Arguments that norms write, whatever their schema says."""


class Outside:
    """Contents of tensors from outside of a recording, their gradients, and states of optimizers and generators.

    Each is kept when an op is about to change it for the first time. What code in Python changes by itself, such as an
    iterator that goes on, is not seen.
    """

    def __init__(self, place: Place, ledger: Ledger) -> None:
        self._ledger = ledger
        self._arguments: dict[Any, list[tuple[int, str]]] = {}
        self._contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._optimizers: dict[
            int, tuple[weakref.ref[torch.optim.Optimizer], dict[Any, Any], list[dict[str, Any]]]
        ] = {}
        place.on_update = self._keep_state

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what an op is about to change."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._generators.setdefault(id(value), (value, value.get_state()))
            for tensor in _tensors(value):
                if tensor.requires_grad and tensor.is_leaf and self._is_outside(tensor):
                    self._gradients.setdefault(id(tensor), (tensor, tensor.grad))
        for position, name in self._written(func):
            for tensor in _tensors(args[position] if position < len(args) else kwargs.get(name)):
                self._keep_content(tensor)

    def put_back(self) -> None:
        """Put all of it back. The recording must be over."""
        with torch.no_grad():
            for storage, kept in self._contents.values():
                storage.copy_(kept)
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient
        for generator, state in self._generators.values():
            generator.set_state(state)
        for reference, state, groups in self._optimizers.values():
            optimizer = reference()
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, options in zip(optimizer.param_groups, groups, strict=False):
                    group.update(options)

    def _written(self, func: Any) -> list[tuple[int, str]]:
        known = self._arguments.get(func)
        if known is None:
            by_schema = _torch.written_arguments(func)
            statistics = [one for one in _torch.tensor_arguments(func) if one[1] in _STATISTICS]
            known = self._arguments[func] = [*by_schema, *statistics]
        return known

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        entry = self._ledger.find(tensor)
        return entry is None or entry.op is None

    def _keep_content(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or not self._is_outside(tensor):
            return
        storage = tensor.untyped_storage()
        key = _torch.storage_key(storage)
        if key not in self._contents:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._contents[key] = whole, whole.clone()

    def _keep_state(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._optimizers:
            return
        state = {key: _copied(value) for key, value in optimizer.state.items()}
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._optimizers[id(optimizer)] = weakref.ref(optimizer), state, groups


def _copied(value: Any) -> Any:
    """Return the same in containers of its own."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [*map(_copied, value)] if type(value) is list else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item
