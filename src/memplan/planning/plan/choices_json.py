"""Choices in a saved plan: values by their names, in a list for each lever that keeps values; flags for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan import _json
from memplan._json import Unreadable
from memplan.planning.levers.registry import LEVERS, RELEASE_GRADIENTS, UPDATE_EARLY
from memplan.planning.schedule.actions import Choices

_FLAGS = ((UPDATE_EARLY.field, "updates"), (RELEASE_GRADIENTS.field, "adds"))
"""Names in JSON of the fields of `GradientUse`."""
_ALWAYS = ("recompute", "encode")
"""Lists that every plan has. Plans of before a lever lack its list."""


def to_plain(choices: Choices, names: Mapping[str, int]) -> dict[str, Any]:
    """Return choices as what `json.dumps` takes."""
    name_of = {value: name for name, value in names.items()}
    plain = _json.to_plain(choices)
    use = plain.pop("gradients")
    del plain["kept_as"]
    for lever, values in _lists(choices).items():
        plain[lever] = [name_of[value] for value in sorted(values)]
    return plain | {name: use[field] for name, field in _FLAGS}


def _lists(choices: Choices) -> dict[str, frozenset[int]]:
    kept = {lever: choices.kept_by(lever) for lever in sorted({*_ALWAYS, "offload", *dict(choices.kept_as)})}
    return kept | {"recompute": choices.recompute}


def by_id(plain: Any, names: Mapping[str, int]) -> dict[str, Any]:
    """Return what `to_plain` wrote, with ids for names, by the fields of `Choices`. Raises Unreadable."""
    if not isinstance(plain, dict):
        raise Unreadable("choices are missing")
    rest = dict(plain)
    levers = [lever.name for lever in LEVERS if lever.name in plain or lever.name in _ALWAYS]
    lists = {name: _values(name, rest.pop(name, None), names) for name in dict.fromkeys((*_ALWAYS, *levers))}
    rest["recompute"] = lists.pop("recompute")
    rest["kept_as"] = [[lever, value] for lever, values in lists.items() for value in values]
    rest["gradients"] = {field: rest.pop(name) for name, field in _FLAGS if name in rest}
    return rest


def _values(chosen: str, given: Any, names: Mapping[str, int]) -> list[int]:
    if not isinstance(given, list):
        raise Unreadable(f"choices has no list {chosen!r}")
    odd = [name for name in given if not isinstance(name, str) or name not in names]
    if odd:
        raise Unreadable(f"choices names {_json.shown(odd[0])}, which is none of its values")
    return [names[name] for name in given]
