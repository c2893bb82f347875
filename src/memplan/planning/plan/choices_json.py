"""Write and read the choices of a saved plan: value names in a list for each lever, and flags for gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan import _json
from memplan._json import Unreadable
from memplan.planning.levers.registry import LEVERS, RELEASE_GRADIENTS, UPDATE_EARLY
from memplan.planning.schedule.actions import Choices

_FLAGS = ((UPDATE_EARLY.field, "updates_early"), (RELEASE_GRADIENTS.field, "accumulates"))
"""(name in JSON, field of `GradientUse`)."""
_ALWAYS = ("recompute", "encode")
"""Lists that every plan has. A plan that is older than a lever lacks the lever's list."""


def to_plain(choices: Choices, names: Mapping[str, int]) -> dict[str, Any]:
    """Return choices as plain data for `json.dumps`: for each lever a list of the names of its values.

    ``names``: ids of values by name.
    """
    name_of = {value: name for name, value in names.items()}
    plain = _json.to_plain(choices)
    gradient_use = plain.pop("gradients")
    del plain["saved_forms"]
    if not choices.order:  # as in plans that are older than orders
        del plain["order"]
    levers = sorted({*_ALWAYS, "offload", *dict(choices.saved_forms)})
    values_of_lever = {lever: choices.saved_by(lever) for lever in levers} | {"recompute": choices.recompute}
    for lever, values in values_of_lever.items():
        plain[lever] = [name_of[value] for value in sorted(values)]
    return plain | {name: gradient_use[field] for name, field in _FLAGS}


def by_id(plain: Any, names: Mapping[str, int]) -> dict[str, Any]:
    """Turn the data of `to_plain` into a mapping of `Choices`' fields, with ids for names. Raises Unreadable.

    ``names``: ids of values by name.
    """
    if not isinstance(plain, dict):
        raise Unreadable("is no mapping").within(".choices")
    fields = dict(plain)
    levers = dict.fromkeys((*_ALWAYS, *(lever.name for lever in LEVERS if lever.name in plain)))
    values_of_lever = {lever: _value_ids(lever, fields.pop(lever, None), names) for lever in levers}
    fields["recompute"] = values_of_lever.pop("recompute")
    fields["saved_forms"] = [[lever, value] for lever, values in values_of_lever.items() for value in values]
    fields["gradients"] = {field: fields.pop(name) for name, field in _FLAGS if name in fields}
    return fields


def _value_ids(lever: str, values: Any, names: Mapping[str, int]) -> list[int]:
    """Return the ids of the values that a saved plan lists for a lever. Raises Unreadable."""
    if not isinstance(values, list):
        raise Unreadable(f"has no list {lever!r}").within(".choices")
    unknown = [name for name in values if not isinstance(name, str) or name not in names]
    if unknown:
        raise Unreadable(f"names {_json.shown(unknown[0])}, which is none of its values").within(".choices")
    return [names[name] for name in values]
