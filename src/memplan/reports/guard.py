"""Reports of `memplan guard`, a step compared with its baseline, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.reports.compare import by_cause
from memplan.reports.output import Page, print_parts
from memplan.studies.comparisons.comparison import headline, signed
from memplan.studies.guarding.outcome import Change, Outcome


def print_outcome(outcome: Outcome, file: TextIO | None = None, top: int = 12) -> None:
    """Print an outcome to a file, stdout by default; ``top`` changes, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(outcome, page, top), file)


def render(outcome: Outcome, page: Page, top: int = 12) -> list[RenderableType]:
    """Return the parts of the report as rich renderables, in order."""
    now = outcome.now
    kind = "training step" if now.train else "inference"
    parts: list[RenderableType] = [Text(f"{printable(now.title)}: {kind} on {printable(now.device)}", "bold")]
    if outcome.before.peak != now.peak:
        parts.append(Text(f"{headline(outcome.comparison)}."))
    parts.append(Text(verdict(outcome), "bold red" if outcome.grew else ""))
    if outcome.changes:
        parts += ["", by_cause(outcome.comparison, page, ("baseline", "now", "more"))]
        parts += ["", Text("By layer, at the peak", "bold"), *_changes(outcome.changes, top)]
    notes = [Text(f"note: {printable(note)}") for note in outcome.notes]
    return parts + (["", *notes] if notes else [])


def verdict(outcome: Outcome) -> str:
    """Return a sentence that says whether the step's memory is within the tolerance of its baseline."""
    before, now = outcome.before, outcome.now
    if now.peak - before.peak > outcome.allowed:
        return f"It takes more than the baseline and {format_bytes(outcome.allowed)} of tolerance. --update accepts it."
    if outcome.grew:
        more = format_bytes(now.reserved - before.reserved)
        return (
            f"The allocator holds {more} more than in the baseline, {format_bytes(now.reserved)}, and "
            f"{format_bytes(outcome.allowed_reserved)} is the tolerance. --update accepts it."
        )
    if now.peak < before.peak:
        return "It takes less than the baseline. --update keeps that."
    return f"{format_bytes(now.peak)} peak, as in the baseline." if now.peak == before.peak else "Within the tolerance."


def _changes(changes: tuple[Change, ...], top: int) -> Iterator[RenderableType]:
    shown = changes[:top] if top else changes
    for change in shown:
        place = f" ({change.where})" if change.where else ""
        yield Padding(Text(f"{printable(str(change))}{printable(place)}"), (0, 0, 0, 2))
    hidden = changes[len(shown) :]
    if hidden:
        difference = signed(sum(change.difference for change in hidden))
        yield Padding(Text(f"and {len(hidden)} more: {difference}", "dim"), (0, 0, 0, 2))
