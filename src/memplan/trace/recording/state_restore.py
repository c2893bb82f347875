"""Restores tensors, gradients, optimizers and generators that a step changed and that existed before it, so that a
second run starts from the same state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.recording.place import Place

_STATISTICS = ("running_mean", "running_var")
"""Arguments that norms write although their schema does not mark them as written."""


class OutsideState:
    """Saved copies of tensors, gradients, optimizer states and generators that existed before a recording.

    A tensor is copied just before an op first changes it. Changes of Python objects, such as an iterator that advances,
    are not seen.
    """

    def __init__(self, place: Place, ledger: Ledger) -> None:
        """Save optimizers before their first update from now on; `save_before` saves what ops change."""
        self._ledger = ledger
        self._arguments: dict[Any, list[tuple[int, str]]] = {}
        """By op: (position, name) of the arguments that it writes."""
        self._contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id() of a tensor: the tensor, and a copy of its elements."""
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """By id() of a tensor: the tensor, and its ``.grad``."""
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """By id() of a generator: the generator, and its state."""
        self._optimizers: dict[
            int, tuple[weakref.ref[torch.optim.Optimizer], dict[Any, Any], list[dict[str, Any]]]
        ] = {}
        """By id() of an optimizer: the optimizer, its state, and its groups' options."""
        place.on_optimizer_step = self._save_optimizer

    def save_before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save the tensors, gradients and generators that an op is about to change."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._generators.setdefault(id(value), (value, value.get_state()))
            for tensor in _tensors(value):
                if tensor.requires_grad and tensor.is_leaf and self._is_outside(tensor):
                    self._gradients.setdefault(id(tensor), (tensor, tensor.grad))
        for position, name in self._written_arguments(func):
            for tensor in _tensors(args[position] if position < len(args) else kwargs.get(name)):
                self._save_content(tensor)

    def restore(self) -> None:
        """Restore all saved state; to be called after the recording."""
        with torch.inference_mode():  # a step may have created some of the tensors in that mode
            for content, saved in self._contents.values():
                content.copy_(saved)
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

    def _written_arguments(self, func: Any) -> list[tuple[int, str]]:
        """Return (position, name) of each argument that an op writes, also statistics of norms."""
        arguments = self._arguments.get(func)
        if arguments is None:
            statistics = [(at, name) for at, name in _torch.tensor_arguments(func) if name in _STATISTICS]
            arguments = self._arguments[func] = [*_torch.written_arguments(func), *statistics]
        return arguments

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor existed before the run: no op of the run allocated it."""
        entry = self._ledger.find(tensor)
        return entry is None or entry.op is None

    def _save_content(self, tensor: torch.Tensor) -> None:
        """Copy a tensor's whole storage (for a wrapper subclass, those of the inner tensors), if it existed before the
        run and is not saved yet."""
        for part in _torch.inner_tensors(tensor).values():
            if part.layout != torch.strided or not self._is_outside(part):
                continue
            storage = part.untyped_storage()
            key = _torch.storage_key(storage)
            if key not in self._contents:
                content = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._contents[key] = content, content.clone()

    def _save_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer's state and options before its first update. Tensors in the state are not copied here: ops
        that write them save their contents."""
        if id(optimizer) in self._optimizers:
            return
        state = {key: _copied(value) for key, value in optimizer.state.items()}
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._optimizers[id(optimizer)] = weakref.ref(optimizer), state, groups


def _copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists that shares all other values, such as tensors."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an op's argument: the argument itself, or the items of a list."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item
