"""The largest value that fits, on the terminal and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.reports.output import Field, Page, print_parts
from memplan.studies.capacity.largest import Largest, Tried

FORMAT = "memplan.largest"
SCHEMA = 1
_REASONS = 3
"""Reasons of failures that are listed; the rest is in the JSON file."""


def dumps(found: Largest) -> str:
    """Write the search and its answer as JSON text. All sizes are bytes."""
    data = {"format": FORMAT, "schema": SCHEMA, **to_dict(found)}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def to_dict(found: Largest) -> dict[str, Any]:
    """Return plain data: the value, what it has to fit into, and every recording, in order."""
    data: dict[str, Any] = {
        "title": found.title,
        "axis": found.axis,
        "value": found.value,
        "following": found.end,
        "sizes": list(found.sizes),
        "device": found.room.target.name,
        "limit": found.room.limit,
        "workspace": found.room.case,
        "step": found.step,
        "tried": [_tried(one) for one in found.tried],
        "notes": list(found.notes),
    }
    return data | ({"planned": to_dict(found.planned)} if found.planned else {})


def print_largest(found: Largest, file: TextIO | None = None) -> None:
    """Print the largest value that fits to a file, stdout by default. See `print_parts`."""
    print_parts(lambda page: parts(found, page), file)


def parts(found: Largest, page: Page) -> Iterator[RenderableType]:
    """Yield the report: the answer, what was recorded to find it, and after planning the same."""
    yield Text(f"{printable(found.title)}: {_answer(found)}", "bold")
    yield _table(found, page)
    yield from (Text(line) for line in _remarks(found))
    if found.planned is not None:
        yield Text(f"\nPlanned: {_answer(found.planned)}{_time(found.planned)}", "bold")
        yield _table(found.planned, page)
        yield from (Text(line) for line in _failures(found.planned))
        if found.room.target.card is not None:
            yield Text("Plans count allocated bytes, with the CPU's kernels.")
    if found.notes:
        yield Text("")
        yield from (Text(f"note: {printable(note)}", "dim") for note in found.notes)


def _answer(found: Largest) -> str:
    place = f"in {found.room.title}"
    if found.value == 0:
        return f"not even {found.axis} {found.least.value} fits {place}: {found.held_by(found.least)}"
    sizes = f" ({'x'.join(map(str, found.sizes))})" if found.sizes else ""
    count = f"{len(found.tried)} {'plan' if found.answer and found.answer.plan else 'recording'}"
    count += "s" * (len(found.tried) > 1)
    count += f", of which {len(found.failed)} failed" if found.failed else ""
    following = found.following
    if following is None:
        return f"{found.axis} {found.value}{sizes} fits {place}, and is the largest value to try; {count}"
    why = "cannot be recorded" if following.reason else "does not fit"
    return f"the largest {found.axis} {place} is {found.value}{sizes}; {following.value} {why}; {count}"


def _remarks(found: Largest) -> Iterator[str]:
    answer, following = found.answer, found.following
    if following is not None and following.bytes is not None:
        yield f"At {found.axis} {following.value}, what holds it up is {found.held_by(following)}."
    if answer is not None and answer.bytes is not None and answer.bytes.aggregation:
        rest = answer.bytes.peak - answer.bytes.aggregation - answer.bytes.causes["input"]
        yield (
            f"Of the peak, the aggregation of the volume and its count of patches hold "
            f"{format_bytes(answer.bytes.aggregation)}, the volume {format_bytes(answer.bytes.causes['input'])}, the "
            f"model and its patches {format_bytes(rest)}."
        )
    if answer is not None and answer.need > found.room.limit:
        yield "Where that is more than the limit, the allocator gives cached segments back: it was recorded to fit."
    if found.unsteady is not None:
        few, many = found.unsteady
        yield (
            f"Memory does not grow steadily: {found.axis} {few} needs more than {many}, or alone does not fit. Smaller "
            "values than the answer may not fit, and larger ones may: memplan sweep shows them."
        )
    yield from _failures(found)
    if found.value == 0 and found.least.bytes is not None and found.least.bytes.aggregation:
        yield "The aggregation can lie on the host: sliding_window_inference(..., device='cpu', sw_device='cuda')."


def _failures(found: Largest) -> Iterator[str]:
    """Say why values failed, the next value first."""
    if any(one.value % found.step for one in found.failed):
        yield f"Values between the multiples of {found.step} fail, so only these were looked at."
    alike: dict[str, list[Tried]] = {}
    for one in sorted(found.failed, key=lambda one: (one.value != found.end, one.value)):
        alike.setdefault(re.sub(r"\d+", "", one.reason), []).append(one)  # but for the sizes that it names
    reasons = list(alike.values())
    for ones in reasons[:_REASONS]:
        first, *others = (str(one.value) for one in ones)
        also = f", and so at {', '.join(others)}" if others else ""
        yield f"Failed at {found.axis} {first}{also}: {printable(ones[0].reason)}."
    if len(reasons) > _REASONS:
        yield f"... {len(reasons) - _REASONS} more reasons, all of them with --json."


def _table(found: Largest, page: Page) -> Table:
    """Draw a row for each value that was recorded or planned."""
    fields = [Field(found.axis, lambda one: str(one.value), right=True)]
    if any(one.plan is not None for one in found.tried):
        fields += [Field("least budget", _need, right=True), Field("added time", _added, right=True)]
    else:
        fields.append(_bytes_field("peak", "peak"))
    if found.room.target.card is not None and len(fields) == 2:
        fields += [_bytes_field("with workspaces", "peak_high"), Field("reserved, with context", _need, right=True)]
    return page.rows(sorted(found.tried, key=lambda one: one.value), [*fields, Field("", _verdict)])


def _bytes_field(header: str, name: str) -> Field:
    return Field(header, lambda one: "" if one.bytes is None else format_bytes(getattr(one.bytes, name)), right=True)


def _need(one: Tried) -> str:
    return "" if one.reason else format_bytes(one.need)


def _verdict(one: Tried) -> str:
    return "failed" if one.reason else "fits" if one.fits else "does not fit"


def _added(one: Tried) -> str:
    plan = one.plan
    if plan is None or plan.seconds is None:
        return ""
    share = f" ({100 * plan.seconds / plan.step_seconds:.1f} %)" if plan.step_seconds else ""
    return f"{format_seconds(plan.seconds)}{share}"


def _time(found: Largest) -> str:
    added = _added(found.answer) if found.answer is not None else ""
    return f"; it adds {added} to a step, estimated" if added else ""


def _tried(one: Tried) -> dict[str, Any]:
    if one.reason:
        return {"value": one.value, "fits": False, "reason": one.reason}
    data: dict[str, Any] = {"value": one.value, "fits": one.fits, "reason": "", "need": one.need}
    if one.bytes is not None:
        data |= one.bytes.row() | {"aggregation": one.bytes.aggregation}
    if one.plan is not None:
        plan = one.plan
        data |= {"least_budget": plan.least, "seconds": plan.seconds, "step_seconds": plan.step_seconds}
    return data
