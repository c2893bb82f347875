"""A saved sweep, read again. Nothing in it is trusted: a file can come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.errors import InputError
from memplan.planning import plan_json
from memplan.planning.plan_json import Unreadable
from memplan.studies.fits import Crossing, Fit, Line, Square
from memplan.studies.points import KNOWN
from memplan.studies.sweep import FORMAT, KEYS, SCHEMA, SIZES, Sweep

_AXIS = {"axis": str, "at": Mapping}
_NUMBERS = {"fixed": float, "slope": float, "residual": float}


def loads(text: str, source: str = "The text") -> Sweep:
    """The sweep that `Sweep.to_json` wrote, equal to it where the values of its axes are numbers, texts and tuples.

    Args:
        text: JSON.
        source: what to call it in an error.

    Raises:
        InputError: not JSON, no sweep, of another schema version, or with bytes that cannot be.
    """
    try:
        return _sweep(plan_json.parse(text))
    except Unreadable as error:
        raise InputError(
            f"{source} is no sweep that can be used: {error}",
            expected=f"a sweep of schema version {SCHEMA}, as memplan sweep --json writes it",
            do="Sweep again, or read it with the memplan that wrote it",
        ) from None


def _sweep(plain: Any) -> Sweep:
    data = _fields(
        plain, "it",
        {"format": str, "schema": int, "title": str, "device": str, "axes": Mapping, "points": int, "rows": tuple,
         "fits": tuple, "crossings": tuple, "notes": tuple},
    )  # fmt: skip
    if (data["format"], data["schema"]) != (FORMAT, SCHEMA):
        raise Unreadable(f"its format is {data['format']!r:.40}, schema version {data['schema']!r:.20}")
    axes = {name: _typed(values, tuple, f"axes[{name!r}]") for name, values in data["axes"].items()}
    rows = [_row(row, axes, f"rows[{number}]") for number, row in enumerate(data["rows"])]
    if data["points"] < len(rows):
        raise Unreadable(f"it has {len(rows)} rows of {data['points']} points")
    return Sweep(
        data["title"], data["device"], axes, rows,
        tuple(_fit(fit, f"fits[{number}]") for number, fit in enumerate(data["fits"])),
        tuple(_crossing(one, f"crossings[{number}]") for number, one in enumerate(data["crossings"])),
        tuple(_typed(note, str, "notes") for note in data["notes"]), data["points"],
    )  # fmt: skip


def _row(plain: Any, axes: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A row, whose parts add up to its peak."""
    ok = isinstance(plain, Mapping) and plain.get("status") == "ok"
    kinds = dict.fromkeys(KEYS, str) | (dict.fromkeys(SIZES, int) if ok else {})
    if not isinstance(plain, Mapping) or set(plain) != {*axes, *kinds} or plain["status"] not in ("ok", "failed"):
        raise Unreadable(f"{place} is not what a row is")
    row = dict(plain) | _fields({name: plain[name] for name in kinds}, place, kinds)
    wrong = [name for name in SIZES if ok and row[name] < 0]
    total = sum(row[name] for name in (*KNOWN, "rounding", "workspace_low")) if ok else 0
    if wrong or (ok and (total != row["peak"] or row["reserved"] - row["peak"] != row["fragmentation"])):
        raise Unreadable(f"{place} has bytes that do not add up")
    return row


def _fit(plain: Any, place: str) -> Fit:
    kinds = _AXIS | {"unit": str, "values": tuple, "power": int, "lines": Mapping, "residual": float, "square": None}
    data = _fields(plain, place, {**kinds, "least": int, "holds": bool})
    if data["power"] not in (1, 2, 3) or "peak" not in data["lines"] or not data["values"]:
        raise Unreadable(f"{place} is not what a fit is")
    lines = {name: Line(**_fields(line, f"{place}.lines", _NUMBERS)) for name, line in data["lines"].items()}
    square = data["square"]
    if square is not None:
        square = Square(**_fields(square, f"{place}.square", _NUMBERS | {"square": float}))
    del data["holds"]
    return Fit(**data | {"lines": lines, "square": square})


def _crossing(plain: Any, place: str) -> Crossing:
    data = _fields(plain, place, _AXIS | {"below": str, "above": str, "between": tuple, "value": None})
    if len(data["between"]) != 2 or not isinstance(data["value"], (int, float, type(None))):
        raise Unreadable(f"{place} is not what a crossing is")
    return Crossing(**data)


def _fields(plain: Any, place: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with these keys and no others, each of its kind; None: of any."""
    data = plan_json.frozen(plain, place)
    if not isinstance(data, Mapping) or set(data) != set(kinds):
        names = sorted(set(kinds) ^ set(data)) if isinstance(data, Mapping) else []
        raise Unreadable(f"{place} lacks or adds {names[0]!r:.40}" if names else f"{place} is no mapping")
    return {name: _typed(data[name], kind, f"{place}.{name}") for name, kind in kinds.items()}


def _typed(value: Any, kind: Any, place: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise Unreadable(f"{place} is {value!r:.40}, not {'a list' if kind is tuple else f'of type {kind.__name__}'}")
    return value
