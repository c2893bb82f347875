"""Free tensors: fake tensors of a recording that a traced model reads from closures or globals.

They become constants of the graph. AOTAutograd refuses constants without data, so each is replaced by an uninitialized
tensor while the model is traced. Nothing writes it, so it takes no physical memory.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch


class FreeTensors:
    """The free tensors of a model, and the constants that replace them."""

    def __init__(self) -> None:
        self._constants: dict[int, torch.Tensor] = {}
        """The constant that replaces a free tensor, by id() of the free tensor."""
        self._originals: dict[int, torch.Tensor] = {}
        """The free tensor, by id() of its constant. It is kept alive, so that no other tensor gets its id."""

    def replace_free(self, arguments: Any) -> Any:
        """Return the arguments of a function with each free tensor replaced by its constant."""
        leaves, spec = _torch.tree_flatten(arguments)
        if not any(map(_is_free, leaves)):
            return arguments
        return _torch.tree_unflatten([self._constant_for(leaf) for leaf in leaves], spec)

    def original(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the free tensor that a constant of the graph replaces; other constants are returned unchanged."""
        return self._originals.get(id(constant), constant)

    def _constant_for(self, leaf: Any) -> Any:
        """Return the constant that replaces a free tensor, always the same; other leaves are returned unchanged."""
        if not _is_free(leaf):
            return leaf
        if id(leaf) not in self._constants:
            with _torch.no_modes():
                constant = leaf.constant  # the real tensor, if the fake tensor's values are known
                if constant is None:
                    constant = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                if leaf.requires_grad:
                    constant.requires_grad_()
            self._constants[id(leaf)] = constant
            self._originals[id(constant)] = leaf
        return self._constants[id(leaf)]


def _is_free(leaf: Any) -> bool:
    """Return whether a leaf is a fake tensor of a recording: its mode is memplan's `FakeMode`. Fake tensors of the
    capture itself have a mode of torch's own class."""
    return type(leaf) is _torch.FakeTensor and isinstance(leaf.fake_mode, _torch.FakeMode)
