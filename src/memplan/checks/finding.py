"""Findings and checks, as immutable values; `memplan.reports` prints them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

from memplan._display import Displayed
from memplan._json import Saved, Signed, Unreadable, by_field, read_part
from memplan.checks.mended.changed_step import StepRecorder
from memplan.devices import Device
from memplan.trace.trace import Trace

Severity = Literal["info", "warning"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning")
"""In ascending order: ``info`` is worth knowing, ``warning`` has a cost that can be avoided."""


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Displayed):
    """A trap in a step, and where it is.

    ``bytes`` is what it costs at the peak, in bytes (of border erosion: what the missing padding saves); 0 where the
    cost is no memory. ``details`` are the numbers behind the message, by name; each check's page lists them.

    Example:
        >>> stack = nn.Sequential(*[nn.Conv2d(1, 1, 3) for _ in range(10)])
        >>> finding = memplan.check(stack, "1x1x128x128")[0]
        >>> finding.id, finding.details["lost"]
        ('border-erosion', [(10, 10), (10, 10)])
    """

    id: str
    severity: Severity
    layer: str
    """Path of the layer; "" for the whole step."""
    where: str | None
    """``file:line``."""
    bytes: int
    message: str
    advice: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return by_field(self)

    def __str__(self) -> str:
        location = ", ".join(part for part in (self.layer, self.where) if part)
        return f"{self.severity} {self.id}{f' ({location})' if location else ''}: {self.message}"


_ROW = {"layer": str | None, "where": str | None, "bytes": int, "lost": tuple[tuple[Signed, Signed], ...]}
"""Types of what reports show of ``details["layers"]``."""


@dataclass(frozen=True, slots=True)
class Findings(Saved):
    """The findings about a step, as JSON has them."""

    FORMAT: ClassVar[str] = "memplan.findings"

    target: str
    findings: tuple[Finding, ...]

    @classmethod
    def _prepared(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the plain data of a JSON file once ``details["layers"]`` of each finding is checked. Raises Unreadable
        if a row lacks a column that reports show, or its value has another type."""
        findings = plain.get("findings")
        for position, finding in enumerate(findings if isinstance(findings, list) else []):
            details = finding.get("details") if isinstance(finding, dict) else None
            rows = details.get("layers", []) if isinstance(details, dict) else []
            path = f".findings[{position}].details.layers"
            read_part(tuple[Mapping[str, Any], ...], rows, path)
            columns = {name for row in rows for name in row} | {"layer", "where"}
            shown = [name for name in _ROW if name in columns]
            for number, row in enumerate(rows):
                for name in shown:
                    if name not in row:
                        raise Unreadable(f"lacks {name!r}").within(f"{path}[{number}]")
                    read_part(_ROW[name], row[name], f"{path}[{number}].{name}")
        return plain


@dataclass(frozen=True, slots=True)
class Subject:
    """The step that a check examines. ``card`` is None for the CPU. ``recorder`` records and plans the step of a
    changed model, None if there is only a trace. ``context``: pixels on each side of the input that are declared to be
    context only."""

    trace: Trace
    card: Device | None = None
    recorder: StepRecorder | None = None
    context: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """A check for one trap; each is a module of `memplan.checks`."""

    id: str
    """As in ``Finding.id`` and ``--ignore``."""
    title: str
    """What the trap is, in a line."""
    find: Callable[[Subject], list[Finding]]
    """Returns the findings about a step; [] if it does not have the trap."""


def number(value: Fraction | float | int) -> int | float:
    """Return a number for JSON: an int if it is whole, else a float."""
    return int(value) if value == int(value) else float(value)
