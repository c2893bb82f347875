"""Read sweeps from JSON. Everything is validated: the file can come from anyone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memplan import _json
from memplan._json import Json, Unreadable
from memplan.errors import InputError
from memplan.studies.sweeps.engine_changes import EngineChange
from memplan.studies.sweeps.fits import LABELS, Crossing, Fit
from memplan.studies.sweeps.points import KNOWN

FORMAT = "memplan.sweep"
SCHEMA = 1
KEYS = ("status", "reason")
"""Keys of a row that are neither axes nor bytes: ``ok`` or ``failed``, and the reason."""
SIZES = (
    "peak", "peak_high", "reserved", "reserved_high", "needs", "needs_high", *KNOWN, "rounding", "workspace_low",
    "workspace_high", "fragmentation",
)  # fmt: skip
"""Keys of a row that did not fail, with bytes."""


@dataclass(frozen=True)
class SweepFile:
    """Fields of a saved sweep, in the order of its JSON."""

    format: str
    schema: int
    title: str
    device: str
    axes: Mapping[str, tuple[Json, ...]]
    points: int
    rows: tuple[Mapping[str, Json], ...]
    fits: tuple[Fit, ...]
    crossings: tuple[Crossing, ...]
    notes: tuple[str, ...]
    engine_changes: tuple[EngineChange, ...] = ()


def loads(text: str, source: str = "The text") -> SweepFile:
    """Read the JSON text of a sweep and check that its rows add up.

    Args:
        text: JSON.
        source: name of the text in errors.

    Raises:
        InputError: not JSON, not a sweep, of another schema version, or damaged.
    """
    try:
        return _checked(_json.parse(text))
    except Unreadable as error:
        raise InputError(
            f"{source} is no sweep that can be used: {error}",
            expected=f"a sweep of schema version {SCHEMA}, as memplan sweep --json writes it",
            do="Sweep again, or read it with the memplan that wrote it",
        ) from None


def _checked(plain: Any) -> SweepFile:
    _json.check_format(plain, FORMAT, SCHEMA)
    for fit in plain["fits"] if isinstance(plain.get("fits"), list) else ():
        if isinstance(fit, dict):
            fit.pop("holds", None)  # computed from the other fields
    file = _json.from_plain(SweepFile, plain, "it")
    try:
        values = {name: frozenset(known) for name, known in file.axes.items()}
    except TypeError:
        raise Unreadable("it.axes has a mapping as a value") from None
    for number, row in enumerate(file.rows):
        _check_row(row, values, f"it.rows[{number}]")
    for number, fit in enumerate(file.fits):
        if fit.power not in (1, 2, 3) or "peak" not in fit.lines or not fit.values:
            raise Unreadable(f"it.fits[{number}] has no line of the peak, no values, or a power above 3")
    for number, crossing in enumerate(file.crossings):
        if unknown := {crossing.below, crossing.above} - LABELS.keys():
            raise Unreadable(f"it.crossings[{number}] names the part {min(unknown)!r:.40}, which is unknown")
    if file.points < len(file.rows):
        raise Unreadable(f"it has {len(file.rows)} rows of {file.points} points")
    return file


def _is_among(value: Any, known: frozenset[Any]) -> bool:
    try:
        return value in known
    except TypeError:  # not hashable: it is or contains a mapping
        return False


def _check_row(row: Mapping[str, Any], axes: Mapping[str, frozenset[Any]], place: str) -> None:
    """Raise Unreadable unless a row has the right keys, known values, and parts that add up to its peak."""
    status = _json.from_plain(str, row.get("status"), f"{place}.status")
    if status not in ("ok", "failed"):
        raise Unreadable(f"{place}.status is {status!r:.40}, not ok or failed")
    sizes = SIZES if status == "ok" else ()
    wrong = sorted({*axes, *KEYS, *sizes} ^ row.keys())
    if wrong:
        raise Unreadable(f"{place} {'has an unknown' if wrong[0] in row else 'lacks'} {wrong[0]!r:.40}")
    for name, known in axes.items():
        if not _is_among(row[name], known):
            raise Unreadable(f"{place}.{name} is {_json.shown(row[name])}, which is no value of that axis")
    _json.from_plain(str, row["reason"], f"{place}.reason")
    for name in sizes:
        _json.from_plain(int, row[name], f"{place}.{name}")
    if status == "ok":
        parts = sum(row[name] for name in (*KNOWN, "rounding", "workspace_low"))
        if (parts, row["reserved"]) != (row["peak"], row["peak"] + row["fragmentation"]):
            raise Unreadable(f"{place} has bytes that do not add up")
