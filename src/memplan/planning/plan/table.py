"""The table of a plan's decisions: its columns and rows, once for `print(plan)` and once for the report."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.planning.plan.decision import Decision

_WIDTH, _SHOWN = 120, 12


@dataclass(frozen=True)
class DecisionColumn:
    """A column of the table: its text for one decision, and for several of one lever together."""

    header: str
    cell: Callable[[Decision], str]
    sum: Callable[[Sequence[Decision]], str]
    longest: int | None = None
    """Characters of a cell at most; None where all of it is needed."""
    right: bool = False
    keeps_end: bool = False
    """Layers differ at their end."""

    def cut(self, text: str) -> str:
        """Return a cell's text, no longer than the column allows."""
        if self.longest is None or len(text) <= self.longest:
            return text
        return f"...{text[3 - self.longest :]}" if self.keeps_end else f"{text[: self.longest - 3]}..."

    def padded(self, text: str, width: int) -> str:
        """Return a cell as wide as its column."""
        return text.rjust(width) if self.right else text.ljust(width)


def _bytes(decisions: Iterable[Decision]) -> str:
    return format_bytes(sum(one.bytes for one in decisions))


def _seconds(decisions: Iterable[Decision]) -> str:
    seconds = sum(one.seconds for one in decisions)
    return format_seconds(seconds) if seconds else "-"


def _lever(decision: Decision) -> str:
    return decision.lever if decision.grade == "exact" else f"{decision.lever}, {decision.grade}"


COLUMNS = (
    DecisionColumn("value", lambda one: printable(str(one.scope)), lambda group: "", 22),
    DecisionColumn("layer", lambda one: printable(one.layer), lambda group: "", 28, keeps_end=True),
    DecisionColumn("bytes", lambda one: _bytes([one]), _bytes, right=True),
    DecisionColumn("decision", _lever, lambda group: group[0].lever),
    DecisionColumn("cost", lambda one: _seconds([one]), _seconds, right=True),
)


def parted(decisions: Sequence[Decision], top: int) -> tuple[list[Decision], list[Decision]]:
    """Return what the table shows, and what it sums up: the step's decisions, the largest of the rest; the others.

    Args:
        decisions: of a plan.
        top: how many of the values' decisions are shown; 0 for all.
    """
    whole = [one for one in decisions if one.scope.kind == "step"]
    rest = [one for one in decisions if one.scope.kind != "step"]
    rest.sort(key=lambda one: -one.bytes)  # of the same size in the order in which they are made
    shown = top or len(rest)
    return [*whole, *rest[:shown]], rest[shown:]


def by_lever(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Return the decisions of each lever, the one with the most bytes first."""
    groups: dict[str, list[Decision]] = {}
    for one in decisions:
        groups.setdefault(one.lever, []).append(one)
    return sorted(groups.values(), key=lambda group: (-sum(one.bytes for one in group), group[0].lever))


def lines_of(decisions: Sequence[Decision]) -> list[str]:
    """Return the lines of the table as plain text, reasons in its last column; none where nothing is decided."""
    shown, left = parted(decisions, _SHOWN)
    if not shown:
        return []
    rows = [[one.header for one in COLUMNS], *([one.cut(one.cell(row)) for one in COLUMNS] for row in shown)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [""]
    for row, reason in zip(rows, ("reason", *(printable(one.reason) for one in shown)), strict=True):
        head = "".join(f"{one.padded(cell, width)}  " for one, cell, width in zip(COLUMNS, row, widths, strict=True))
        first, *more = textwrap.wrap(reason, _WIDTH - len(head)) or [""]
        lines.extend([(head + first).rstrip(), *(" " * len(head) + line for line in more)])
    if left:
        counts = ", ".join(f"{len(group)} {group[0].lever} ({_bytes(group)})" for group in by_lever(left))
        lines.extend(textwrap.wrap(f"... {len(left)} more, {_bytes(left)}: {counts}", _WIDTH, subsequent_indent="    "))
    return lines
