"""Findings and changes as remarks on lines of the source, which other formats are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from memplan._text import printable, whole_number
from memplan.checks.finding import Finding
from memplan.checks.registry import CHECKS
from memplan.studies.comparisons.comparison import headline
from memplan.studies.guarding.outcome import Outcome
from memplan.studies.guarding.taken import slashed

Level = Literal["error", "warning", "note"]
GROWTH = "memory-growth"
"""Rule of what a step takes more than its baseline."""
RULES: dict[str, str] = {check.id: check.title for check in CHECKS} | {
    GROWTH: "The step takes more memory than its baseline"
}
"""Every rule, and what it is about in a line."""
_DRIVE = re.compile(r"[A-Za-z]:/")


@dataclass(frozen=True, slots=True)
class Annotation:
    """A remark on a line of the source."""

    rule: str
    level: Level
    message: str
    layer: str = ""
    where: str | None = None
    """``file:line``."""
    target: str = ""
    """What was looked at: the place where no line is known."""
    bytes: int = 0
    also: tuple[str, ...] = field(default=())
    """Further sentences: advice, reasons."""

    @property
    def text(self) -> str:
        """Return all sentences as printable text of one line; the first one can begin with a name."""
        also = (f"{part[:1].upper()}{part[1:]}" for part in self.also if part)
        return printable(" ".join(f"{part.rstrip('.')}." for part in (self.message, *also)))

    @property
    def place(self) -> tuple[str, int] | None:
        """Return the file, with forward slashes, and the line; None where there is neither a line nor a file."""
        path, _, line = (self.where or "").rpartition(":")
        if path and (number := whole_number(line)):
            return slashed(path).removeprefix("./"), number
        path = self.target.rpartition(":")[0]
        return (slashed(path).removeprefix("./"), 1) if path.endswith(".py") else None


def is_absolute(path: str) -> bool:
    """Return whether a path with forward slashes is absolute, on Linux or on Windows."""
    return path.startswith("/") or _DRIVE.match(path) is not None


def of_findings(target: str, findings: Sequence[Finding], failing: Sequence[str]) -> list[Annotation]:
    """Return an annotation for each finding; those of a ``failing`` severity are errors."""
    found = []
    for one in findings:
        level: Level = "error" if one.severity in failing else "warning" if one.severity == "warning" else "note"
        message = one.message if one.message.startswith("cuDNN") else one.message[:1].upper() + one.message[1:]
        found.append(Annotation(one.id, level, message, one.layer, one.where, target, one.bytes, one.advice))
    return found


def of_outcome(outcome: Outcome) -> list[Annotation]:
    """Return an annotation for the step, and one for each change that makes it larger; none where it did not grow."""
    return list(_grown(outcome)) if outcome.grew else []


def _grown(outcome: Outcome) -> Iterator[Annotation]:
    target = outcome.now.target
    yield Annotation(
        GROWTH, "error", f"{outcome.now.title} on {outcome.now.device}: {headline(outcome.comparison)}",
        target=target, bytes=outcome.now.peak - outcome.before.peak, also=outcome.notes,
    )  # fmt: skip
    for change in outcome.changes:
        if change.difference > 0 and change.where:
            yield Annotation(GROWTH, "warning", str(change), change.layers[0], change.where, target, change.difference)
