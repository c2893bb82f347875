"""Read explanations from JSON; files are untrusted, so everything is validated."""

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
"""Keys that commands add: facts about a script, and a comparison of predicted and measured peaks."""


def loads(text: str, source: str = "The text") -> Explanation:
    """Read an explanation from JSON text. Its timeline has the peaks, but not the events.

    Args:
        text: JSON, as `memplan explain --json` writes it.
        source: its name in error messages.

    Raises:
        InputError: the text is not JSON, no explanation, or of another schema version.

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
    """Check whether plain data looks like an explanation."""
    return isinstance(plain, Mapping) and isinstance(plain.get("timeline"), Mapping) and "by_cause" in plain


def explanation_of(plain: Any) -> Explanation:
    """Return the explanation from the plain data of `Explanation.to_dict`.

    Raises:
        Unreadable: the data is no explanation, or its numbers contradict each other.
    """
    _json.check_format(plain, FORMAT, SCHEMA)
    fields = {key: value for key, value in plain.items() if key not in ("format", "schema", "course", *BESIDE)}
    if isinstance(fields.get("timeline"), dict):
        fields["timeline"] = {"events": [], **fields["timeline"]}
    explanation = _json.from_plain(Explanation, fields, "it")
    causes = {
        *explanation.by_cause, *explanation.by_cause_reserved, *explanation.by_cause_most,
        *(row.cause for row in explanation.holders),
    }  # fmt: skip
    if unknown := causes - LABELS.keys():
        raise Unreadable(f"the cause {min(unknown)!r:.40} is unknown")
    peak = explanation.timeline.peak_allocated
    if sum(explanation.by_cause.values()) != peak:
        raise Unreadable(f"it.by_cause does not add up to the peak of {peak} bytes")
    scaling = explanation.scaling
    if scaling is not None and not (scaling.lines and scaling.batches and len(scaling.batches) == len(scaling.peaks)):
        raise Unreadable("it.scaling has no lines, or not a peak for each batch")
    if plain.get("course") is not None:
        course = course_from(plain["course"], "it.course")
        if max(course.allocated, default=0) != peak:
            raise Unreadable("it.course has another peak than it.timeline")
        explanation = replace(explanation, course=course)
    return explanation
