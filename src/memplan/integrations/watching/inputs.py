"""What the model was called with last, as shapes: a watch holds no tensor of the user's."""

from __future__ import annotations

from typing import Any

from torch import nn

from memplan.integrations.described_calls import Unknown, described, text_of
from memplan.trace.spec import Spec


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
            self._args = tuple([described(one) for one in args])
            self._kwargs = {name: described(one) for name, one in kwargs.items()}
        except Exception:  # whatever a user's container raises: then nothing is known of this call
            self._args, self._kwargs = None, {}


def _text(value: Any) -> str | None:
    return text_of(value) if isinstance(value, Spec) else None
