"""Describes a model's call and its optimizer without keeping the user's tensors alive."""

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
    """An argument that is neither a tensor, a number, None, nor a list, tuple or mapping of these."""


def specs_of(value: Any) -> Any:
    """Return an argument with a `Spec` in place of each tensor; mappings become dicts. Raises Unknown if it contains a
    value of another type."""
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return type(value)([specs_of(item) for item in value])
    if isinstance(value, Mapping):
        return {key: specs_of(item) for key, item in value.items()}
    raise Unknown(f"a {type(value).__name__}")


def text_of(value: Spec) -> str:
    """Return a spec in the notation of `memplan.spec`, such as ``8x3x224x224:float16``."""
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return sizes if value.dtype is torch.float32 else f"{sizes}:{str(value.dtype)[6:]}"


def copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy of a module without its hooks, which would write into the user's objects."""
    copy = copy_module(module)
    for submodule in copy.modules():
        _torch.remove_hooks(submodule)
    return copy


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's defaults that its constructor accepts (AdamW's defaults include another option)."""
    parameters = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in parameters}


def optimizer_factory(kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a function that takes parameters and creates an optimizer of the class ``kind`` with these options."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, **options)

    make.__qualname__ = kind.__qualname__
    return make
