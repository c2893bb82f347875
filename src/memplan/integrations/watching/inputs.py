"""The arguments of a model's last call, with specs in place of tensors, so that no tensor stays alive."""

from __future__ import annotations

from typing import Any

from torch import nn

from memplan.integrations.described_calls import Unknown, specs_of, text_of
from memplan.trace.spec import Spec


class LastInputs:
    """Records the arguments of a model's last call, by a hook."""

    def __init__(self, model: nn.Module) -> None:
        self._args: tuple[Any, ...] | None = None
        """Positional arguments with a `Spec` for each tensor; None before the first call."""
        self._kwargs: dict[str, Any] = {}
        """Keyword arguments, likewise."""
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)
        """Removes the hook."""

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def specs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the last call, with a `Spec` for each tensor. Raises Unknown
        if the model was not called, or with an argument that is no tensor, number or container of these."""
        if self._args is None:
            raise Unknown("the model was not called yet")
        return self._args, self._kwargs

    def texts(self) -> list[str]:
        """Return the tensor arguments as options of `memplan fit`; other arguments have no option and are left out."""
        inputs = [f"--input {text_of(value)}" for value in self._args or () if isinstance(value, Spec)]
        kwargs = [f"--kwarg {name}={text_of(value)}" for name, value in self._kwargs.items() if isinstance(value, Spec)]
        return inputs + kwargs

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the model's call: store its arguments as specs."""
        try:
            self._args = tuple([specs_of(value) for value in args])
            self._kwargs = {name: specs_of(value) for name, value in kwargs.items()}
        except Exception:  # a user's container may raise anything: this call stays unknown
            self._args, self._kwargs = None, {}
