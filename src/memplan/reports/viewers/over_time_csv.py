"""Memory over time as CSV: a row for each allocation or free, a column for each cause."""

from __future__ import annotations

import csv
import io

from memplan._text import printable
from memplan.explanation.model import Explanation
from memplan.explanation.over_time import course_of
from memplan.trace.trace import Trace, at_least

_EVERY = 1 << 62
"""A limit of moments that no step reaches."""


def dumps(trace: Trace, explanation: Explanation, settings: str | None = None) -> str:
    """Return the memory timeline of a step as CSV, in bytes. The categories of a row add up to ``allocated``.

    Args:
        trace: of the step.
        explanation: of the same step.
        settings: the caching allocator's settings that were simulated.

    Example:
        >>> dumps(trace, explanation).splitlines()[0]
        'tick,step,phase,op,layer,at,allocated,reserved,weight,...'
    """
    course = course_of(at_least(trace), explanation.timeline, settings, moments=_EVERY)
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["tick", "step", "phase", "op", "layer", "at", "allocated", "reserved", *course.causes])
    for moment, tick in enumerate(course.ticks):
        op_index = course.ops[moment]
        op = course.op_rows[op_index] if op_index >= 0 else None
        # steps count from 1, as in reports; building the model has no number
        head = ["", "build", "", "", ""] if op is None else [
            op.step + 1 if op.step >= 0 else "", op.phase, op.name, op.layer, op.where or ""
        ]  # fmt: skip
        levels = (course.allocated[moment], course.reserved[moment])
        rows.writerow([tick, *map(_safe, head), *levels, *(column[moment] for column in course.causes.values())])
    return out.getvalue()


def _safe(text: object) -> object:
    """Return a cell without control characters, quoted so that no spreadsheet evaluates it as a formula."""
    if not isinstance(text, str):
        return text
    return printable(f"'{text}" if text[:1] in tuple("=+-@\t\r") else text)
