"""Report of `memplan guard`, a step compared with its baseline."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan.reports.compare import by_cause
from memplan.reports.document import Document, Line, Part, Section, document, notes
from memplan.studies.comparisons.comparison import headline, signed
from memplan.studies.guarding.outcome import Change, Outcome


def report(outcome: Outcome, top: int = 12) -> Document:
    """Return the verdict, the bytes by category, the ``top`` changes, 0 for all, and remarks."""
    now, changed = outcome.now, bool(outcome.changes)
    kind = "training step" if now.train else "inference"
    head: list[Part] = [f"{headline(outcome.comparison)}."] if outcome.before.peak != now.peak else []
    return document(
        f"{now.title}: {kind} on {now.device}",
        [*head, Line(verdict(outcome), "bad" if outcome.grew else "")],
        [by_cause(outcome.comparison, ("baseline", "now", "more"))] if changed else [],
        Section(tuple(_changes(outcome.changes, top)), "By layer, at the peak"),
        notes(outcome.notes),
    )


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


def _changes(changes: tuple[Change, ...], top: int) -> Iterator[Part]:
    """Yield the largest changes by layer, and the sum of the others."""
    shown = changes[:top] if top else changes
    for change in shown:
        yield Line(f"{change}{f' ({change.where})' if change.where else ''}", indent=2)
    hidden = changes[len(shown) :]
    if hidden:
        difference = signed(sum(change.difference for change in hidden))
        yield Line(f"and {len(hidden)} more: {difference}", "dim", indent=2)
