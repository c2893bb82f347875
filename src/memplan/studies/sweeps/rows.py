"""The keys of a sweep's rows, and what must hold in the rows of a saved sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memplan._json import Unreadable, read_part, shown
from memplan.studies.sweeps.points import KNOWN

KEYS = ("status", "reason")
"""Keys of a row that are neither axes nor bytes: ``ok`` or ``failed``, and the reason."""
SIZES = (
    "peak", "peak_high", "reserved", "reserved_high", "needs", "needs_high", *KNOWN, "rounding", "workspace_low",
    "workspace_high", "fragmentation",
)  # fmt: skip
"""Keys of a row that did not fail, with bytes."""


def check_rows(rows: Sequence[Mapping[str, Any]], axes: Mapping[str, tuple[Any, ...]]) -> None:
    """Check that rows have the right keys and values of axes, and that their bytes add up. Raises Unreadable."""
    try:
        values = {name: frozenset(known) for name, known in axes.items()}
    except TypeError:
        raise Unreadable("has a mapping as a value").within(".axes") from None
    for number, row in enumerate(rows):
        try:
            _check_row(row, values)
        except Unreadable as error:
            raise error.within(f".rows[{number}]") from None


def _is_among(value: Any, known: frozenset[Any]) -> bool:
    """Return whether a value is one of ``known``; False for a value that is not hashable."""
    try:
        return value in known
    except TypeError:  # it is or contains a mapping
        return False


def _check_row(row: Mapping[str, Any], axes: Mapping[str, frozenset[Any]]) -> None:
    """Raise Unreadable if a row lacks a key, has a value that its axis lacks, or bytes that do not add up."""
    status = read_part(str, row.get("status"), ".status")
    if status not in ("ok", "failed"):
        raise Unreadable(f"is {status!r:.40}, not ok or failed").within(".status")
    sizes = SIZES if status == "ok" else ()
    wrong = sorted({*axes, *KEYS, *sizes} ^ row.keys())
    if wrong:
        raise Unreadable(f"{'has an unknown' if wrong[0] in row else 'lacks'} {wrong[0]!r:.40}")
    for name, known in axes.items():
        if not _is_among(row[name], known):
            raise Unreadable(f"is {shown(row[name])}, which is no value of that axis").within(f".{name}")
    read_part(str, row["reason"], ".reason")
    for name in sizes:
        read_part(int, row[name], f".{name}")
    if status == "ok":
        parts = sum(row[name] for name in (*KNOWN, "rounding", "workspace_low"))
        if (parts, row["reserved"]) != (row["peak"], row["peak"] + row["fragmentation"]):
            raise Unreadable("has bytes that do not add up")
