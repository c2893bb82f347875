"""How results show themselves: by their report, as text that steers no terminal and in notebooks.

The reports lie above all results: the package itself names their module here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from memplan._text import printable_lines

_MOST = 400
"""Characters of a ``repr``, which debuggers and lists of results show."""


class Reports(Protocol):
    """Writes the report of any result."""

    def text_of(self, result: object) -> str:
        """Return the report as text of 80 columns."""
        ...

    def html_of(self, result: object) -> str:
        """Return the report as HTML for a notebook."""
        ...


_reports: Callable[[], Reports]


def draw_with(reports: Callable[[], Reports]) -> None:
    """Set the function that imports the module of the reports. It is called when a result is shown."""
    global _reports
    _reports = reports


class Printed:
    """A value whose texts can come from a file or from another library: no character of them steers a terminal."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Make the texts of a subclass's own ``__str__`` and ``__repr__`` printable."""
        super().__init_subclass__()
        for name in ("__str__", "__repr__"):
            if name in vars(cls):
                setattr(cls, name, _cleaned(vars(cls)[name], _MOST if name == "__repr__" else None))


def _cleaned(write: Callable[[Any], str], most: int | None) -> Callable[[Any], str]:
    """Wrap a ``__str__`` or ``__repr__``: its text becomes printable, and at most ``most`` characters long."""

    @functools.wraps(write)
    def write_printable(value: Any) -> str:
        text = write(value)
        return printable_lines(text if most is None or len(text) <= most else f"{text[: most - 3]}...")

    return write_printable


class Displayed(Printed):
    """A result whose ``str`` is its report, as its command prints it in a pipe; Jupyter shows it as HTML. Its ``repr``
    is the first line."""

    __slots__ = ()

    def __str__(self) -> str:
        return _reports().text_of(self)

    def __repr__(self) -> str:
        first = str(self).partition("\n")[0]
        return f"<{type(self).__name__}: {first:.{_MOST - 40}}>"

    def _repr_html_(self) -> str:
        return _reports().html_of(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._repr_pretty_ = _pretty  # IPython takes a class's own __repr__ before an inherited _repr_pretty_


def _pretty(result: object, printer: Any, cycle: bool) -> None:
    printer.text(str(result))
