"""Report of findings and of their fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memplan._bytes import format_bytes
from memplan._text import counted, printable
from memplan.checks import border_erosion
from memplan.checks.border_patch import fix_of
from memplan.checks.finding import Finding
from memplan.reports.document import (
    Document,
    Field,
    Line,
    Part,
    Style,
    Table,
    document,
    name_field,
    number_field,
    table_of,
)
from memplan.trace.trace import Trace

_STYLES: dict[str, Style] = {"warning": "warning", "info": "bold"}


def report(title: str, findings: Sequence[Finding], top: int = 12) -> Document:
    """Return a section for each finding; tables with ``top`` rows, 0 for all."""
    return document(f"{title}: {_count(findings)}", [], *(_finding(finding, top) for finding in findings))


def fixes(trace: Trace, findings: Sequence[Finding]) -> str:
    """Return a patch or a wrapper module for each warning of lost borders, or a line that there is none."""
    changes = [
        fix_of(finding, trace)
        for finding in findings
        if finding.id == border_erosion.ID and finding.severity == "warning"
    ]
    lines = [] if changes else ["", "--fix: no border is lost that padding could keep."]
    for fix in changes:
        if fix.kind != "patch":
            lines += ["", f"No patch: {printable(fix.why)}." + (" A wrapper instead:" if fix.text else "")]
        lines += ["", fix.text.rstrip("\n"), "", fix.proof]
    return "\n".join(lines)


def _count(findings: Sequence[Finding]) -> str:
    """Return the numbers of warnings and notes as text."""
    warnings = sum(finding.severity == "warning" for finding in findings)
    numbers = [(warnings, "warning"), (len(findings) - warnings, "note")]
    return ", ".join(counted(number, word) for number, word in numbers if number) or "nothing found"


def _finding(finding: Finding, top: int) -> Iterator[Part]:
    """Yield the parts of a finding: severity and cost, place, message, the layers that it is about, advice."""
    location = ", ".join(part for part in (finding.layer, finding.where) if part)
    cost = f"  {format_bytes(finding.bytes)}" if finding.bytes > 0 else ""
    yield Line(f"{finding.severity} {finding.id}{cost}", _STYLES[finding.severity])
    if location:
        yield Line(f"at {location}", "dim", indent=2)
    yield Line(f"{message_of(finding)}.", indent=2)
    rows: list[dict[str, Any]] = finding.details.get("layers", [])
    if len(rows) > 1:
        yield _layers(rows, top)
    yield from (Line(f"- {advice}", indent=2) for advice in finding.advice)


def message_of(finding: Finding) -> str:
    """Return the message, beginning with a capital letter unless that is a name."""
    message = finding.message
    return message if message.startswith("cuDNN") else message[:1].upper() + message[1:]


def _layers(rows: list[dict[str, Any]], top: int) -> Table:
    """Return a table of the layers of a finding, the largest cost first.

    Each row has the keys "layer" and "where", and may have "lost", pixels (before, after) by dimension, or "bytes".
    """
    fields = [name_field("layer", lambda row: row["layer"] or "-", layers=True)]
    if any("lost" in row for row in rows):
        fields.append(Field("lost on each side, in pixels", lambda row: _lost(row["lost"])))
    if any("bytes" in row for row in rows):
        fields.append(number_field("bytes", lambda row: row["bytes"]))
    fields.append(Field("where", lambda row: row["where"] or "-", shrinks_to=16, from_left=True, drop=1))
    return table_of(sorted(rows, key=_cost, reverse=True), fields, top, indent=2)


def _cost(row: dict[str, Any]) -> float:
    """Return the bytes of a layer's row; for a row without bytes, all pixels that the layer loses."""
    return row["bytes"] if "bytes" in row else sum(sum(sides) for sides in row.get("lost", ()))


def _lost(sides: Sequence[Sequence[float]]) -> str:
    """Return pixels lost (before, after) by dimension as text, such as "1 x 1", or "0+1" if the two sides differ."""
    return " x ".join(f"{before:g}" if before == after else f"{before:g}+{after:g}" for before, after in sides)
