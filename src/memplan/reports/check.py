"""Findings on the terminal and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.checks import border_erosion
from memplan.checks.border_patch import fix_of
from memplan.checks.model import Finding
from memplan.reports.columns import Column
from memplan.reports.output import PIPE_WIDTH, Page, print_parts
from memplan.trace.trace import Trace

_COLOURS = {"warning": "bold yellow", "info": "bold"}


def dumps(title: str, findings: Sequence[Finding]) -> str:
    """The findings as JSON text: the same text for the same findings. All sizes are bytes."""
    data = {"target": title, "findings": [finding.to_dict() for finding in findings]}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def print_findings(title: str, findings: Sequence[Finding], file: TextIO | None = None, top: int = 12) -> None:
    """Print findings: as wide as the terminal, or 80 columns without colours where ``file`` is not one.

    Args:
        title: what was looked at.
        findings: what was found.
        file: where to; stdout by default.
        top: how many layers to list for a finding; 0 for all.
    """
    print_parts(lambda page: render(title, findings, top, page.width, ascii_only=page.ascii_only), file)


def render(
    title: str, findings: Sequence[Finding], top: int = 12, width: int = PIPE_WIDTH, *, ascii_only: bool = False
) -> list[RenderableType]:
    """The parts of the report as rich renderables, in order."""
    page = Page(width, ascii_only)
    parts: list[RenderableType] = [Text(f"{printable(title)}: {_count(findings)}", "bold")]
    for finding in findings:
        parts += ["", *_finding(finding, top, page)]
    return parts


def print_fixes(trace: Trace, findings: Sequence[Finding], file: TextIO | None = None) -> None:
    """Print how to keep the border that findings name, or that none does.

    Args:
        trace: the step that was looked at.
        findings: what was found in it.
        file: where to; stdout by default.
    """
    fixes = [fix_of(f, trace) for f in findings if f.id == border_erosion.ID and f.severity == "warning"]
    lines = [] if fixes else ["", "--fix: no border is lost that padding could keep."]
    for fix in fixes:
        if fix.kind != "patch":
            lines += ["", f"No patch: {printable(fix.why)}." + (" A wrapper instead:" if fix.text else "")]
        lines += ["", fix.text.rstrip("\n"), "", fix.proof]
    out = sys.stdout if file is None else file
    out.write("\n".join(lines) + "\n")


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "nothing found"
    warnings = sum(finding.severity == "warning" for finding in findings)
    notes = len(findings) - warnings
    counted = [(warnings, "warning"), (notes, "note")]
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counted if count)


def _finding(finding: Finding, top: int, page: Page) -> Iterator[RenderableType]:
    place = ", ".join(printable(part) for part in (finding.layer, finding.where) if part)
    cost = f"  {format_bytes(finding.bytes)}" if finding.bytes > 0 else ""
    yield Text(f"{finding.severity} {finding.id}{cost}", _COLOURS[finding.severity])
    if place:
        yield Padding(Text(f"at {place}", "dim"), (0, 0, 0, 2))
    message = printable(finding.message)
    if not message.startswith("cuDNN"):
        message = message[:1].upper() + message[1:]
    yield Padding(Text(message + "."), (0, 0, 0, 2))
    rows: list[dict[str, Any]] = finding.details.get("layers", [])
    if len(rows) > 1:
        yield Padding(page.table(_columns(rows, top), len(rows[:top] if top else rows)), (0, 0, 0, 2))
    for advice in finding.advice:
        yield Padding(Text(f"- {printable(advice)}"), (0, 0, 0, 2))


def _columns(rows: list[dict[str, Any]], top: int) -> list[Column]:
    """The layers that a finding is about, those that cost most first, and how many more there are."""
    by_cost = sorted(rows, key=_cost, reverse=True)
    shown = by_cost[:top] if top else by_cost
    more = [f"... {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
    blank = [""] * len(more)
    columns = [
        Column("layer", (*(printable(row["layer"]) or "-" for row in shown), *more), shrinks_to=16, from_left=True)
    ]
    if any("lost" in row for row in rows):
        columns.append(Column("lost on each side, in pixels", (*(_lost(row["lost"]) for row in shown), *blank)))
    if any("bytes" in row for row in rows):
        columns.append(Column("bytes", (*(format_bytes(row["bytes"]) for row in shown), *blank), right=True))
    where = (*(printable(row["where"] or "-") for row in shown), *blank)
    return [*columns, Column("where", where, shrinks_to=16, from_left=True, drop=1)]


def _cost(row: dict[str, Any]) -> float:
    return row["bytes"] if "bytes" in row else sum(sum(sides) for sides in row.get("lost", ()))


def _lost(sides: Sequence[Sequence[float]]) -> str:
    """``1 x 1``; ``0+1`` where the two sides differ."""
    return " x ".join(f"{a:g}" if a == b else f"{a:g}+{b:g}" for a, b in sides)
