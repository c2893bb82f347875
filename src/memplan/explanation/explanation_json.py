"""The JSON form of an explanation, checked when it is read: a file can come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memplan import _json
from memplan._json import Unreadable
from memplan.errors import InputError
from memplan.explanation.course import course_from
from memplan.explanation.model import FORMAT, LABELS, SCHEMA, Explanation

BESIDE = ("script", "beside")
"""Keys that commands add: facts of a script, and what was measured beside what was predicted."""


def loads(text: str, source: str = "The text") -> Explanation:
    """Read the JSON text of an explanation; its timeline has the peaks, and not the events.

    Args:
        text: JSON, as `memplan explain --json` writes it.
        source: what to call it in an error.

    Raises:
        InputError: not JSON, no explanation, or of another schema version.

    Example:
        >>> loads(dumps(explanation)).by_cause == explanation.by_cause
        True
    """
    try:
        return explanation_of(_json.parse(text))
    except Unreadable as error:
        raise InputError(
            f"{source} is no explanation that can be used: {error}",
            expected=f"an explanation of schema version {SCHEMA}, as memplan explain --json writes it",
            do="Explain the step again, or read it with the memplan that wrote it",
        ) from None


def is_explanation(plain: Any) -> bool:
    """Return whether plain data looks like an explanation."""
    return isinstance(plain, Mapping) and isinstance(plain.get("timeline"), Mapping) and "by_cause" in plain


def explanation_of(plain: Any) -> Explanation:
    """Return the explanation of `Explanation.to_dict`. Raises Unreadable."""
    _json.check_format(plain, FORMAT, SCHEMA)
    fields = {key: value for key, value in plain.items() if key not in ("format", "schema", "course", *BESIDE)}
    if isinstance(fields.get("timeline"), dict):
        fields["timeline"] = {"events": [], **fields["timeline"]}
    found = _json.from_plain(Explanation, fields, "it")
    causes = {*found.by_cause, *found.by_cause_reserved, *found.by_cause_most, *(row.cause for row in found.holders)}
    if unknown := causes - LABELS.keys():
        raise Unreadable(f"the cause {min(unknown)!r:.40} is unknown")
    _check_sums(found)
    scaling = found.scaling
    if scaling is not None and not (scaling.lines and scaling.batches and len(scaling.batches) == len(scaling.peaks)):
        raise Unreadable("it.scaling has no lines, or not a peak for each batch")
    if plain.get("course") is not None:
        course = course_from(plain["course"], "it.course")
        found = replace(found, course=course)
        if max(course.allocated, default=0) != found.timeline.peak_allocated:
            raise Unreadable("it.course has another peak than it.timeline")
    return found


def _check_sums(found: Explanation) -> None:
    peak = found.timeline.peak_allocated
    if sum(found.by_cause.values()) != peak:
        raise Unreadable(f"it.by_cause does not add up to the peak of {peak} bytes")
