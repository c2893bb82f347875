"""Findings and memory growth as annotations of source lines, from which SARIF, GitHub and JUnit output are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from memplan._text import printable, whole_number
from memplan.checks.finding import Finding
from memplan.checks.registry import CHECKS
from memplan.reports.check import message_of
from memplan.studies.comparisons.comparison import headline
from memplan.studies.guarding.outcome import Outcome
from memplan.studies.guarding.recorded_figures import with_forward_slashes

Level = Literal["error", "warning", "note"]
GROWTH = "memory-growth"
"""Rule of a step whose memory grew over its baseline."""
RULES: dict[str, str] = {check.id: check.title for check in CHECKS} | {
    GROWTH: "The step takes more memory than its baseline"
}
"""By rule, a short description."""
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
    """Target of the check; its file is the location if no source line is known."""
    bytes: int = 0
    also: tuple[str, ...] = field(default=())
    """Further sentences: advice, reasons."""

    @property
    def text(self) -> str:
        """Return all sentences as a line of printable text. The message's first letter stays: it can be a name."""
        also = (f"{part[:1].upper()}{part[1:]}" for part in self.also if part)
        return printable(" ".join(f"{part.rstrip('.')}." for part in (self.message, *also)))

    @property
    def place(self) -> tuple[str, int] | None:
        """Return (file with forward slashes, line); line 1 if only the file is known, None if not even that."""
        path, _, line = (self.where or "").rpartition(":")
        if path and (number := whole_number(line)):
            return with_forward_slashes(path).removeprefix("./"), number
        path = self.target.rpartition(":")[0]  # of "file.py:name"
        return (with_forward_slashes(path).removeprefix("./"), 1) if path.endswith(".py") else None


def is_absolute(path: str) -> bool:
    """Return whether a path with forward slashes is absolute, on Linux or on Windows."""
    return path.startswith("/") or _DRIVE.match(path) is not None


def annotations_of_findings(target: str, findings: Sequence[Finding], failing: Sequence[str]) -> list[Annotation]:
    """Return an annotation for each finding; those whose severity is in ``failing`` are errors."""
    annotations = []
    for finding in findings:
        level: Level = "warning" if finding.severity == "warning" else "note"
        if finding.severity in failing:
            level = "error"
        subject = (finding.layer, finding.where, target)
        annotations.append(Annotation(finding.id, level, message_of(finding), *subject, finding.bytes, finding.advice))
    return annotations


def annotations_of_outcome(outcome: Outcome) -> list[Annotation]:
    """Return an error for a step that grew and a warning for each located change that adds bytes; [] if none grew."""
    if not outcome.grew:
        return []
    target = outcome.now.target
    step = Annotation(
        GROWTH, "error", f"{outcome.now.title} on {outcome.now.device}: {headline(outcome.comparison)}",
        target=target, bytes=outcome.now.peak - outcome.before.peak, also=outcome.notes,
    )  # fmt: skip
    changes = [
        Annotation(GROWTH, "warning", str(change), change.layers[0], change.where, target, change.difference)
        for change in outcome.changes
        if change.difference > 0 and change.where
    ]
    return [step, *changes]
