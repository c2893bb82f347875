"""Reports of findings, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.checks import border_erosion
from memplan.checks.border_patch import fix_of
from memplan.checks.finding import Finding
from memplan.reports.output import Field, Page, name_field, print_parts
from memplan.trace.trace import Trace

_COLOURS = {"warning": "bold yellow", "info": "bold"}


def print_findings(title: str, findings: Sequence[Finding], file: TextIO | None = None, top: int = 12) -> None:
    """Print findings to a file, stdout by default; ``top`` rows of long tables, 0 for all. See `print_parts`."""
    print_parts(lambda page: render(title, findings, page, top), file)


def render(title: str, findings: Sequence[Finding], page: Page, top: int = 12) -> list[RenderableType]:
    """Return the parts of the report as rich renderables, in order."""
    parts: list[RenderableType] = [Text(f"{printable(title)}: {_count(findings)}", "bold")]
    for finding in findings:
        parts += ["", *_finding(finding, top, page)]
    return parts


def print_fixes(trace: Trace, findings: Sequence[Finding], file: TextIO | None = None) -> None:
    """Print a patch or a wrapper for each border-erosion warning, or that there is none to fix.

    Args:
        trace: of the checked step.
        findings: of that step.
        file: where to print; stdout by default.
    """
    fixes = [
        fix_of(finding, trace)
        for finding in findings
        if finding.id == border_erosion.ID and finding.severity == "warning"
    ]
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
    location = ", ".join(printable(part) for part in (finding.layer, finding.where) if part)
    cost = f"  {format_bytes(finding.bytes)}" if finding.bytes > 0 else ""
    yield Text(f"{finding.severity} {finding.id}{cost}", _COLOURS[finding.severity])
    if location:
        yield Padding(Text(f"at {location}", "dim"), (0, 0, 0, 2))
    message = printable(finding.message)
    if not message.startswith("cuDNN"):
        message = message[:1].upper() + message[1:]
    yield Padding(Text(message + "."), (0, 0, 0, 2))
    rows: list[dict[str, Any]] = finding.details.get("layers", [])
    if len(rows) > 1:
        yield Padding(_layers(rows, top, page.narrower(2)), (0, 0, 0, 2))
    for advice in finding.advice:
        yield Padding(Text(f"- {printable(advice)}"), (0, 0, 0, 2))


def _layers(rows: list[dict[str, Any]], top: int, page: Page) -> Table:
    """Draw the layers of a finding, those that cost most first."""
    fields = [name_field("layer", lambda row: printable(row["layer"]) or "-")]
    if any("lost" in row for row in rows):
        fields.append(Field("lost on each side, in pixels", lambda row: _lost(row["lost"])))
    if any("bytes" in row for row in rows):
        fields.append(Field("bytes", lambda row: format_bytes(row["bytes"]), right=True))
    fields.append(Field("where", lambda row: printable(row["where"] or "-"), shrinks_to=16, from_left=True, drop=1))
    return page.rows(sorted(rows, key=_cost, reverse=True), fields, top)


def _cost(row: dict[str, Any]) -> float:
    return row["bytes"] if "bytes" in row else sum(sum(sides) for sides in row.get("lost", ()))


def _lost(sides: Sequence[Sequence[float]]) -> str:
    """Return pixels lost on each side by dimension, such as "1 x 1", or "0+1" if the two sides differ."""
    return " x ".join(f"{a:g}" if a == b else f"{a:g}+{b:g}" for a, b in sides)
