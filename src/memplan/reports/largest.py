"""Report of `memplan.largest`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan._text import counted, format_seconds
from memplan.reports.document import Document, Field, Section, Table, document, notes, table_of
from memplan.studies.capacity.largest import Largest, Tried

_REASONS = 3
"""How many different failure reasons are printed; the JSON has all."""


def report(result: Largest) -> Document:
    """Return the answer and a table of the values tried, then both again with plans."""
    planned: tuple[Section, ...] = ()
    if result.planned is not None:
        added = "" if result.planned.answer is None else _added_time(result.planned.answer)
        cost = f"; it adds {added} to a step, estimated" if added else ""
        lines = list(_failures(result.planned))
        if result.room.target.card is not None:
            lines.append("Plans count allocated bytes, with the CPU's kernels.")
        planned = (Section((_table(result.planned), *lines), f"Planned: {_answer(result.planned)}{cost}"),)
    return document(
        f"{result.title}: {_answer(result)}", [_table(result), *_remarks(result)], *planned, notes(result.notes, "dim")
    )


def _answer(result: Largest) -> str:
    """Return the answer as a sentence: the largest value that fits, the next value and why it does not, the number of
    recordings or plans. ``result.value`` is 0 if nothing fits."""
    room = f"in {result.room.title}"
    if result.value == 0:
        return f"not even {result.axis} {result.least.value} fits {room}: {result.largest_parts(result.least)}"
    sizes = f" ({'x'.join(map(str, result.sizes))})" if result.sizes else ""
    count = counted(len(result.tried), "plan" if result.answer and result.answer.plan else "recording")
    count += f", of which {len(result.failed)} failed" if result.failed else ""
    next_trial = result.following
    if next_trial is None:
        return f"{result.axis} {result.value}{sizes} fits {room}, and is the largest value to try; {count}"
    why = "cannot be recorded" if next_trial.reason else "does not fit"
    return f"the largest {result.axis} {room} is {result.value}{sizes}; {next_trial.value} {why}; {count}"


def _remarks(result: Largest) -> Iterator[str]:
    """Yield remarks: the parts of memory that limit the next value, and why smaller values may not fit."""
    answer, next_trial = result.answer, result.following
    if next_trial is not None and next_trial.bytes is not None:
        yield f"At {result.axis} {next_trial.value}, what holds it up is {result.largest_parts(next_trial)}."
    if answer is not None and answer.bytes is not None and answer.bytes.aggregation:
        model_bytes = answer.bytes.peak - answer.bytes.aggregation - answer.bytes.causes["input"]
        yield (
            f"Of the peak, the aggregation of the volume and its count of patches hold "
            f"{format_bytes(answer.bytes.aggregation)}, the volume {format_bytes(answer.bytes.causes['input'])}, the "
            f"model and its patches {format_bytes(model_bytes)}."
        )
    if result.likely is not None and answer is not None and answer.bytes is not None and answer.bytes.needs_band:
        yield fit_at_upper_end(result.axis, result.value, result.likely, answer.bytes.needs_band[1])
    if answer is not None and answer.need > result.room.limit:
        yield beyond_the_limit(result.axis, result.value, answer.bytes and answer.bytes.needs_band)
    if result.unsteady is not None:
        smaller, larger = result.unsteady
        yield (
            f"Memory does not grow steadily: {result.axis} {smaller} needs more than {larger}, or alone does not fit. "
            "Smaller values than the answer may not fit, and larger ones may: memplan sweep shows them."
        )
    yield from _failures(result)
    if result.value == 0 and result.least.bytes is not None and result.least.bytes.aggregation:
        yield "The aggregation can lie on the host: sliding_window_inference(..., device='cpu', sw_device='cuda')."


def fit_at_upper_end(axis: str, value: int, likely: int, most: int) -> str:
    """Return a sentence that says whether the answer still fits with the upper end of its need's 95 % band.

    Args:
        axis, value: the answer, such as batch 24.
        likely: the largest value that fits with the upper end; 0 if none does.
        most: bytes of the upper end.
    """
    size = f"{format_bytes(most)}, the upper end of its 95 % band,"
    if likely == value:
        return f"With {size} {axis} {value} fits, too."
    if not likely:
        return f"With {size} {axis} {value} does not fit, nor does any smaller one."
    return f"With {size} {axis} {value} does not fit; about {likely} does."


def beyond_the_limit(axis: str, value: int, band: tuple[int, int] | None) -> str:
    """Return the sentence on an answer that reserves more than the limit. ``band`` is the 95 % band of its need in
    bytes, None for a need that is known exactly."""
    text = f"At {axis} {value} torch gives cached segments back to keep the limit: it fits"
    if band is None:
        return f"{text}."
    return f"{text} with the expected bytes. Not recorded: the upper end of its 95 % band, {format_bytes(band[1])}."


def _failures(result: Largest) -> Iterator[str]:
    """Yield why values failed, grouped by reason; first the reason of ``result.end``, the value after the answer."""
    if any(trial.value % result.step for trial in result.failed):
        yield f"Values between the multiples of {result.step} fail, so only these were looked at."
    by_reason: dict[str, list[Tried]] = {}
    for trial in sorted(result.failed, key=lambda trial: (trial.value != result.end, trial.value)):
        without_sizes = re.sub(r"\d+", "", trial.reason)
        by_reason.setdefault(without_sizes, []).append(trial)
    groups = list(by_reason.values())
    for group in groups[:_REASONS]:
        first, *others = (str(trial.value) for trial in group)
        also = f", and so at {', '.join(others)}" if others else ""
        yield f"Failed at {result.axis} {first}{also}: {group[0].reason}."
    if len(groups) > _REASONS:
        yield f"... {len(groups) - _REASONS} more reasons, all of them with --json."


def _table(result: Largest) -> Table:
    """Return a row for each value tried, smallest first: its need, and whether it fits."""
    fields = [Field(result.axis, lambda trial: str(trial.value), right=True, number=lambda trial: trial.value)]
    recorded = [trial.bytes for trial in result.tried if trial.bytes is not None]
    if any(trial.plan is not None for trial in result.tried):
        fields += [Field("least budget", _need, right=True), Field("added time", _added_time, right=True)]
    else:
        fields.append(_bytes_field("peak", "peak"))
        if result.room.target.card is not None:
            if any(sizes.peak_high != sizes.peak for sizes in recorded):
                fields.append(_bytes_field("with workspaces", "peak_high"))
            fields.append(Field("reserved, with context", _need, right=True))
    return table_of(sorted(result.tried, key=lambda trial: trial.value), [*fields, Field("", _verdict)])


def _bytes_field(header: str, name: str) -> Field:
    """Return a column of attribute ``name`` of the recorded bytes, empty for values that could not be recorded."""
    size = lambda trial: 0 if trial.bytes is None else getattr(trial.bytes, name)  # noqa: E731
    return Field(
        header, lambda trial: "" if trial.bytes is None else format_bytes(size(trial)), right=True, number=size
    )


def _need(trial: Tried) -> str:
    """Return the bytes to compare with the limit as text; "" for a value that could not be recorded."""
    return "" if trial.reason else format_bytes(trial.need)


def _verdict(trial: Tried) -> str:
    return "failed" if trial.reason else "fits" if trial.fits else "does not fit"


def _added_time(trial: Tried) -> str:
    """Return the time that the plan for a value adds to a step, with its share; "" without a plan."""
    plan = trial.plan
    if plan is None or plan.seconds is None:
        return ""
    share = f" ({100 * plan.seconds / plan.step_seconds:.1f} %)" if plan.step_seconds else ""
    return f"{format_seconds(plan.seconds)}{share}"
