"""What a model of the user's was called with and is updated by, as descriptions: no tensor of the user's is held."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.trace.spec import Spec
from memplan.trace.step import copy_module

_PLAIN = (int, float, bool, type(None))


class Unknown(Exception):
    """An argument that is neither a tensor, a number nor a container of such."""


def described(value: Any) -> Any:
    """Return an argument with a description for each tensor.

    Raises:
        Unknown: it is something that cannot be described.
    """
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return type(value)([described(one) for one in value])
    if isinstance(value, Mapping):
        return {key: described(one) for key, one in value.items()}
    raise Unknown(f"a {type(value).__name__}")


def text_of(value: Spec) -> str:
    """Return a description as `memplan.spec` takes it."""
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return sizes if value.dtype is torch.float32 else f"{sizes}:{str(value.dtype)[6:]}"


def copied(module: nn.Module) -> nn.Module:
    """Return a copy without hooks: what the user's would store, they would store in the user's own objects."""
    made = copy_module(module)
    for part in made.modules():
        _torch.remove_hooks(part)
    return made


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options that another optimizer of its class takes: Adam's defaults have one that AdamW does not."""
    taken = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in taken}


def maker(kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a callable of the parameters that makes an optimizer."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, **options)

    make.__qualname__ = kind.__qualname__
    return make
