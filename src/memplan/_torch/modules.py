"""Read and replace what a module holds itself.

Seen in torch 2.11, 2.13 and 2.15: ``nn.Module._parameters``, ``._buffers`` and ``._modules`` in the module's own
``__dict__``, as plain dicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

_TENSORS = ("_parameters", "_buffers")
_FIXED = (*_TENSORS, "_modules")


@dataclass(frozen=True, slots=True)
class OwnState:
    """Contents of one module: parameters and buffers by name, and every other attribute, submodules aside."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]
    hooks: dict[str, dict[int, Any]]
    """Hooks by table. The tables stay where they are: handles that remove hooks refer to them."""


def pre_hooks(module: nn.Module) -> list[Any]:
    """Return a module's own forward pre-hooks. Seen in torch 2.11 and 2.13: ``_forward_pre_hooks``."""
    return list(module._forward_pre_hooks.values())


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Seen in torch 2.11, 2.13 and 2.15, each a dict by the number of a hook; ``_is_full_backward_hook`` is a flag."""


def count_hooks(module: nn.Module) -> int:
    """Count how many hooks of a module's own run in a step, before or after its forward or backward pass."""
    return sum(len(getattr(module, name)) for name in _HOOKS if not name.endswith(("_with_kwargs", "_always_called")))


def copy_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks of a module that run in a step to another that takes its place."""
    for name in _HOOKS:
        getattr(new, name).update(getattr(old, name))
    new._is_full_backward_hook = old._is_full_backward_hook


def own_state(module: nn.Module) -> OwnState:
    """Return what a module holds now."""
    own = vars(module)
    attributes = {name: value for name, value in own.items() if name not in _FIXED}
    hooks = {name: dict(own[name]) for name in _HOOKS}
    return OwnState(dict(own["_parameters"]), dict(own["_buffers"]), attributes, hooks)


def set_own_state(module: nn.Module, state: OwnState) -> None:
    """Make a module hold this. Names that stay keep their order."""
    own = vars(module)
    for name, new in zip(_TENSORS, (state.parameters, state.buffers), strict=True):
        _become(own[name], new)
    _become(own, state.attributes, _FIXED)
    for name, hooks in state.hooks.items():
        if dict(own[name]) != hooks:
            own[name].clear()
            own[name].update(hooks)


def _become(old: dict[str, Any], new: dict[str, Any], fixed: tuple[str, ...] = ()) -> None:
    old.update(new)
    for name in old.keys() - new.keys() - set(fixed):
        del old[name]
