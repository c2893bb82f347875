"""Columns and rows of the table of a plan's decisions, for `print(plan)` and for the report."""

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
    """A column of the table, with the text of its cell for a decision, and for a group of decisions of the same
    lever."""

    header: str
    cell: Callable[[Decision], str]
    sum: Callable[[Sequence[Decision]], str]
    longest: int | None = None
    """Most characters of a cell; None for no limit."""
    right: bool = False
    keeps_end: bool = False
    """Whether texts that are too long lose their beginning: names of layers differ at their end."""

    def cut(self, text: str) -> str:
        """Return a cell's text, no longer than the column allows."""
        if self.longest is None or len(text) <= self.longest:
            return text
        return f"...{text[3 - self.longest :]}" if self.keeps_end else f"{text[: self.longest - 3]}..."

    def padded(self, text: str, width: int) -> str:
        """Return a cell as wide as its column."""
        return text.rjust(width) if self.right else text.ljust(width)


def _bytes(decisions: Iterable[Decision]) -> str:
    return format_bytes(sum(decision.bytes for decision in decisions))


def _seconds(decisions: Iterable[Decision]) -> str:
    seconds = sum(decision.seconds for decision in decisions)
    return format_seconds(seconds) if seconds else "-"


def _lever(decision: Decision) -> str:
    return decision.lever if decision.grade == "exact" else f"{decision.lever}, {decision.grade}"


COLUMNS = (
    DecisionColumn("value", lambda decision: printable(str(decision.scope)), lambda group: "", 22),
    DecisionColumn("layer", lambda decision: printable(decision.layer), lambda group: "", 28, keeps_end=True),
    DecisionColumn("bytes", lambda decision: _bytes([decision]), _bytes, right=True),
    DecisionColumn("decision", _lever, lambda group: group[0].lever),
    DecisionColumn("cost", lambda decision: _seconds([decision]), _seconds, right=True),
)


def split_shown(decisions: Sequence[Decision], top: int) -> tuple[list[Decision], list[Decision]]:
    """Split a plan's decisions into those the table shows and those it only sums up.

    Shown are the decisions about the whole step, then the largest others.

    Args:
        decisions: of a plan.
        top: how many of the others are shown; 0 for all.
    """
    step = [decision for decision in decisions if decision.scope.kind == "step"]
    others = [decision for decision in decisions if decision.scope.kind != "step"]
    others.sort(key=lambda decision: -decision.bytes)  # stable: of the same size in the order of the step
    shown = top or len(others)
    return [*step, *others[:shown]], others[shown:]


def by_lever(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Group the decisions by lever, the lever with the most bytes first."""
    groups: dict[str, list[Decision]] = {}
    for decision in decisions:
        groups.setdefault(decision.lever, []).append(decision)
    return sorted(groups.values(), key=lambda group: (-sum(decision.bytes for decision in group), group[0].lever))


def lines_of(decisions: Sequence[Decision]) -> list[str]:
    """Return the lines of the table as plain text, with the reasons as last column; none without decisions."""
    shown, left = split_shown(decisions, _SHOWN)
    if not shown:
        return []
    rows = [[column.header for column in COLUMNS]]
    rows += [[column.cut(column.cell(decision)) for column in COLUMNS] for decision in shown]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [""]
    for row, reason in zip(rows, ("reason", *(printable(decision.reason) for decision in shown)), strict=True):
        cells = zip(COLUMNS, row, widths, strict=True)
        head = "".join(f"{column.padded(cell, width)}  " for column, cell, width in cells)
        first, *more = textwrap.wrap(reason, _WIDTH - len(head)) or [""]
        lines.extend([(head + first).rstrip(), *(" " * len(head) + line for line in more)])
    if left:
        counts = ", ".join(f"{len(group)} {group[0].lever} ({_bytes(group)})" for group in by_lever(left))
        lines.extend(textwrap.wrap(f"... {len(left)} more, {_bytes(left)}: {counts}", _WIDTH, subsequent_indent="    "))
    return lines
