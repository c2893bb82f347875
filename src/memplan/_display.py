"""How results show themselves: as text that steers no terminal, and in notebooks.

What draws them in notebooks lies above them all: the package itself puts it here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memplan._text import printable_lines

_MOST = 400
"""Characters of a ``repr``, which debuggers and lists of results show."""
_draw: Callable[[object], str] | None = None


def draw_with(draw: Callable[[object], str]) -> None:
    """Draw every result as HTML by a function."""
    global _draw
    _draw = draw


class Printed:
    """A value whose texts can come from a file or from another library: no character of them steers a terminal."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("__str__", "__repr__"):
            if name in vars(cls):
                setattr(cls, name, _cleaned(vars(cls)[name], _MOST if name == "__repr__" else None))


def _cleaned(write: Callable[[Any], str], most: int | None) -> Callable[[Any], str]:
    @functools.wraps(write)
    def cleaned(value: Any) -> str:
        text = write(value)
        return printable_lines(text if most is None or len(text) <= most else f"{text[: most - 3]}...")

    return cleaned


class Displayed(Printed):
    """A result that Jupyter shows as HTML, and a terminal's IPython as it prints; elsewhere by its first line."""

    __slots__ = ()

    def __repr__(self) -> str:
        first = str(self).partition("\n")[0]
        return f"<{type(self).__name__}: {first:.{_MOST - 40}}>"

    def _repr_html_(self) -> str | None:
        return None if _draw is None else _draw(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._repr_pretty_ = _pretty  # IPython takes a class's own __repr__ before an inherited _repr_pretty_


def _pretty(result: object, printer: Any, cycle: bool) -> None:
    printer.text(str(result))
