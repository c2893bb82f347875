"""Tensors without data that a model reads and that are neither its own nor its inputs: of a closure, or a global.

Of a model with data these are constants of the graph. AOTAutograd refuses constants without data, so each has an
uninitialized tensor in its place while the model is traced. Nothing writes it, so it takes no memory.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch


class FreeTensors:
    """The tensors without data that a model was seen to read, and those in their place."""

    def __init__(self) -> None:
        self._instead: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        """Kept alive, as their ids are known."""

    def replaced(self, arguments: Any) -> Any:
        """Return the arguments of a function with tensors that can be constants. What is traced is not fake itself."""
        leaves, spec = _torch.tree_flatten(arguments)
        if not any(map(_is_recorded, leaves)):
            return arguments
        return _torch.tree_unflatten([self._of(leaf) for leaf in leaves], spec)

    def original(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a constant stands for."""
        return self._originals.get(id(constant), constant)

    def _of(self, leaf: Any) -> Any:
        if not _is_recorded(leaf):
            return leaf
        if id(leaf) not in self._instead:
            with _torch.no_modes():
                known = leaf.constant
                made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if known is None else known
                self._instead[id(leaf)] = made.requires_grad_() if leaf.requires_grad else made
            self._originals[id(self._instead[id(leaf)])] = leaf
        return self._instead[id(leaf)]


def _is_recorded(leaf: Any) -> bool:
    """Return whether it is a tensor of memplan's recordings, and not one that a capture itself has made."""
    return type(leaf) is _torch.FakeTensor and isinstance(leaf.fake_mode, _torch.FakeMode)
