"""Memory over time as CSV: a row for each allocation or free, a column for each cause."""

from __future__ import annotations

import csv
import io

from memplan._text import printable
from memplan.explanation.model import Explanation
from memplan.explanation.over_time import course_of
from memplan.trace.trace import Trace, at_least

_EVERY = 1 << 62


def dumps(trace: Trace, explanation: Explanation, settings: str | None = None) -> str:
    """Return every moment of a step as CSV. Bytes; the causes of a row add up to ``allocated``.

    Args:
        trace: the step.
        explanation: of it.
        settings: of the caching allocator, as they were simulated.

    Example:
        >>> dumps(trace, explanation).splitlines()[0]
        'tick,step,phase,op,layer,at,allocated,reserved,weight,...'
    """
    course = course_of(at_least(trace), explanation.timeline, settings, moments=_EVERY)
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["tick", "step", "phase", "op", "layer", "at", "allocated", "reserved", *course.causes])
    for place, tick in enumerate(course.ticks):
        number = course.ops[place]
        op = course.op_rows[number] if number >= 0 else None
        # steps from 1, as reports number them; building has none
        head = ["", "build", "", "", ""] if op is None else [
            op.step + 1 if op.step >= 0 else "", op.phase, op.name, op.layer, op.where or ""
        ]  # fmt: skip
        levels = (course.allocated[place], course.reserved[place])
        rows.writerow([tick, *map(_safe, head), *levels, *(column[place] for column in course.causes.values())])
    return out.getvalue()


def _safe(text: object) -> object:
    """Return a cell without control characters that no spreadsheet takes for a formula."""
    if not isinstance(text, str):
        return text
    return printable(f"'{text}" if text[:1] in tuple("=+-@\t\r") else text)
