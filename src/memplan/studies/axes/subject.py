"""The subject of a study: a step in parts, so that an axis can change one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from memplan.errors import InputError
from memplan.studies.axes.changed_layers import LayerChange, change_layers
from memplan.studies.axes.sliding_window import Window, windowed
from memplan.trace.recording.boundaries import Programs, Runs
from memplan.trace.step import StepOptions, build_of, copy_module


@dataclass(frozen=True)
class Subject:
    """A step: a module, or a callable and its arguments; what it is called with; what is changed of its layers."""

    what: Any
    options: StepOptions
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the callable."""
    changes: tuple[LayerChange, ...] = ()
    """Of the module, applied in order after it was made."""
    window: Window | None = None
    """Inference of a volume in overlapping patches, instead of a step: the first input is one patch."""

    def build(self, *, on_card: bool) -> Runs:
        """Return the ``build``, or the program, that `record` and `measure` take."""
        if isinstance(self.what, Programs):
            return self.what.program(**self.arguments)
        made = Maker(self.what, self.arguments, self.changes)
        if self.window is not None:
            return windowed(made, self.options, self.window, on_card=on_card)
        return build_of(self.what if made.plain else made, self.options, on_card=on_card)

    def with_arguments(self, **arguments: Any) -> Subject:
        """Return the same with other arguments of the callable."""
        return replace(self, arguments={**self.arguments, **arguments})

    @property
    def title(self) -> str:
        """Name for messages and reports."""
        if isinstance(self.what, nn.Module):
            return type(self.what).__name__
        name = getattr(self.what, "__qualname__", None) or getattr(getattr(self.what, "func", None), "__qualname__", "")
        return name or type(self.what).__name__

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the callable's parameters by name; none of a module, nor where Python cannot see them."""
        if isinstance(self.what, nn.Module):
            return {}
        try:
            return inspect.signature(self.what).parameters
        except (TypeError, ValueError):
            return {}


@dataclass(frozen=True)
class Maker:
    """A callable that makes the subject's module, or its step; it can be sent to another process."""

    what: Callable[..., Any]
    arguments: Mapping[str, Any]
    changes: tuple[LayerChange, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.title)  # what messages call it, as they do a function

    @property
    def title(self) -> str:
        """Name for messages and reports."""
        return getattr(self.what, "__qualname__", type(self.what).__name__)

    @property
    def plain(self) -> bool:
        """Return whether it adds nothing to the callable, or the module."""
        return not self.arguments and not self.changes

    def __call__(self) -> Any:
        """Return the module with its changed layers, or the step."""
        made = copy_module(self.what) if isinstance(self.what, nn.Module) else self.what(**self.arguments)
        if not self.changes:
            return made
        if not isinstance(made, nn.Module):
            raise InputError(
                f"{self.title} returns a step, whose layers cannot be reached",
                expected="a target that returns the module, where layers are to be changed",
                do="Name the callable that makes the module, and describe its inputs",
            )
        return change_layers(made, self.changes)
