"""What the model was called with last, as shapes: a watch holds no tensor of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memplan.trace.spec import Spec

_PLAIN = (int, float, bool, type(None))


class Unknown(Exception):
    """An argument that is neither a tensor, a number nor a container of such."""


class LastInputs:
    """Follows the calls of a model from outside."""

    def __init__(self, model: nn.Module) -> None:
        self._args: tuple[Any, ...] | None = None
        self._kwargs: dict[str, Any] = {}
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def specs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with descriptions for tensors.

        Raises:
            Unknown: the model was not called, or with something that cannot be described.
        """
        if self._args is None:
            raise Unknown("the model was not called yet")
        return self._args, self._kwargs

    def texts(self) -> list[str]:
        """Return the options of `memplan fit` that describe them; without what it has no option for."""
        found = [f"--input {text}" for text in map(_text, self._args or ()) if text]
        return found + [f"--kwarg {name}={text}" for name, one in self._kwargs.items() if (text := _text(one))]

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._args = tuple([_described(one) for one in args])
            self._kwargs = {name: _described(one) for name, one in kwargs.items()}
        except Exception:  # whatever a user's container raises: then nothing is known of this call
            self._args, self._kwargs = None, {}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return type(value)([_described(one) for one in value])
    if isinstance(value, Mapping):
        return {key: _described(one) for key, one in value.items()}
    raise Unknown(f"a {type(value).__name__}")


def _text(value: Any) -> str | None:
    if not isinstance(value, Spec):
        return None
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return sizes if value.dtype is torch.float32 else f"{sizes}:{str(value.dtype)[6:]}"
