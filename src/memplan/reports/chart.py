"""Reproducible matplotlib charts: the same bytes for the same data."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING

from memplan._text import printable
from memplan.errors import InputError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def check_drawable(path: str, option: str) -> None:
    """Check early that a chart can be written to a file of this name. Raises InputError if the name ends in none of
    `FORMATS`, and UsageError if matplotlib is not installed."""
    name = PurePath(path)
    if name.suffix.lower() not in FORMATS:
        raise InputError(f"{option} {name.name}", expected=f"a name that ends in {', '.join(FORMATS)}", do="Rename it")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{option} draws with matplotlib, which is not installed",
            expected="memplan's extra charts",
            do="Install it: pip install 'memplan[charts]'",
        )


def picture(draw: Callable[[], Figure], path: str) -> bytes:
    """Return the content of a chart file in the format of the path's suffix. ``draw`` makes the figure."""
    import matplotlib

    suffix = PurePath(path).suffix.lower().removeprefix(".")
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[suffix]
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "memplan"}):
        draw().savefig(buffer, format=suffix, metadata=undated)
    return buffer.getvalue()


def unit_of(largest: float) -> tuple[int, str]:
    """Return (size, name) of the unit for an axis up to ``largest`` bytes, such as (1 << 20, "MiB")."""
    return next(((size, name) for size, name in _UNITS if largest >= size), _UNITS[-1])


def plain(text: str) -> str:
    """Return the text printable and with ``$`` escaped, so that matplotlib parses no math in it."""
    return printable(text).replace("$", r"\$")
