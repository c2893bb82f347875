"""How results show themselves in notebooks. What draws them lies above them all: the package itself puts it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_draw: Callable[[object], str] | None = None


def draw_with(draw: Callable[[object], str]) -> None:
    """Draw every result as HTML by a function."""
    global _draw
    _draw = draw


class Displayed:
    """A result that Jupyter shows as HTML, and a terminal's IPython as it prints."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return None if _draw is None else _draw(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._repr_pretty_ = _pretty  # IPython takes a class's own __repr__ before an inherited _repr_pretty_


def _pretty(result: object, printer: Any, cycle: bool) -> None:
    printer.text(str(result))
