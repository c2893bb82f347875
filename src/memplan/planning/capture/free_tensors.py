"""Tensors without data that a model reads from closures or globals, which become constants of the graph.

AOTAutograd refuses constants without data, so each is replaced by an uninitialized tensor while the model is traced.
Nothing writes it, so it takes no physical memory.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch


class FreeTensors:
    """Free tensors without data of a model, and their replacements."""

    def __init__(self) -> None:
        self._constants: dict[int, torch.Tensor] = {}
        """The constant that replaces a tensor, by id() of the tensor."""
        self._originals: dict[int, torch.Tensor] = {}
        """Kept alive, as their ids are known."""

    def replace_free(self, arguments: Any) -> Any:
        """Return the arguments of a function with each free tensor without data replaced by its constant."""
        leaves, spec = _torch.tree_flatten(arguments)
        if not any(map(_is_recorded, leaves)):
            return arguments
        return _torch.tree_unflatten([self._constant_for(leaf) for leaf in leaves], spec)

    def original(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the free tensor that a constant of the graph stands for; other constants are returned unchanged."""
        return self._originals.get(id(constant), constant)

    def _constant_for(self, leaf: Any) -> Any:
        """Return the constant that replaces a free tensor, one for each; other leaves are returned unchanged."""
        if not _is_recorded(leaf):
            return leaf
        if id(leaf) not in self._constants:
            with _torch.no_modes():
                constant = leaf.constant
                if constant is None:
                    constant = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                self._constants[id(leaf)] = constant.requires_grad_() if leaf.requires_grad else constant
            self._originals[id(self._constants[id(leaf)])] = leaf
        return self._constants[id(leaf)]


def _is_recorded(leaf: Any) -> bool:
    """Return whether a leaf is a tensor of memplan's recordings, and not of the capture itself."""
    return type(leaf) is _torch.FakeTensor and isinstance(leaf.fake_mode, _torch.FakeMode)
