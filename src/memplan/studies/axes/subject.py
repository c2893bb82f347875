"""The step that a study varies, in parts that axes can change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from memplan.errors import InputError
from memplan.studies.axes.changed_layers import LayerChange, change_layers
from memplan.studies.axes.sliding_window import Window, sliding_build
from memplan.trace.recording.boundaries import Programs, Runs
from memplan.trace.step import StepOptions, build_of, copy_module, title_of


@dataclass(frozen=True)
class Subject:
    """A step: a module or a callable, the callable's arguments, the options of the step, and changes of layers."""

    what: Any
    options: StepOptions
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the callable."""
    changes: tuple[LayerChange, ...] = ()
    """Applied in order after the module is made."""
    window: Window | None = None
    """Run inference of a volume in overlapping patches instead of a step; the input is then a patch."""

    def build(self, *, on_card: bool) -> Runs:
        """Return the ``build`` or program for `record` and `measure`."""
        if isinstance(self.what, Programs):
            return self.what.program(**self.arguments)
        make = Maker(self.what, self.arguments, self.changes)
        if self.window is not None:
            return sliding_build(make, self.options, self.window, on_card=on_card)
        return build_of(self.what if make.plain else make, self.options, on_card=on_card)

    def with_arguments(self, **arguments: Any) -> Subject:
        """Return a copy with these arguments of the callable set."""
        return replace(self, arguments={**self.arguments, **arguments})

    @property
    def title(self) -> str:
        """Name for messages and reports: of the class, or of the callable; of a partial, that of its function."""
        return title_of(self.what, otherwise=type(self.what).__name__)

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the callable's parameters by name; empty for a module, or a callable without a signature."""
        if isinstance(self.what, nn.Module):
            return {}
        try:
            return inspect.signature(self.what).parameters
        except (TypeError, ValueError):
            return {}


@dataclass(frozen=True)
class Maker:
    """A picklable callable that makes the subject's module with its changed layers, or its step."""

    what: Callable[..., Any]
    arguments: Mapping[str, Any]
    changes: tuple[LayerChange, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.title)  # messages name callables by it

    @property
    def title(self) -> str:
        """Name for messages and reports."""
        return getattr(self.what, "__qualname__", type(self.what).__name__)

    @property
    def plain(self) -> bool:
        """Whether there are no arguments and no changes, so that ``what`` can be used instead."""
        return not self.arguments and not self.changes

    def __call__(self) -> Any:
        """Return the module with its changed layers, or the step. Raises InputError if there are changes, and the
        callable returns no module."""
        model = copy_module(self.what) if isinstance(self.what, nn.Module) else self.what(**self.arguments)
        if not self.changes:
            return model
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.title} returns a step, whose layers cannot be reached",
                expected="a target that returns the module, where layers are to be changed",
                do="Name the callable that makes the module, and describe its inputs",
            )
        return change_layers(model, self.changes)
