"""Findings and checks, as immutable values; `memplan.reports` prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

from memplan._display import Displayed
from memplan._json import Saved, by_field
from memplan.checks.mended.changed_step import Remaker
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
        place = ", ".join(part for part in (self.layer, self.where) if part)
        return f"{self.severity} {self.id}{f' ({place})' if place else ''}: {self.message}"


@dataclass(frozen=True, slots=True)
class Findings(Saved):
    """The findings about a step, as JSON has them."""

    FORMAT: ClassVar[str] = "memplan.findings"

    target: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """The step that a check examines.

    Args:
        trace: the recorded step.
        card: the card that it was recorded for; None for the CPU.
        remaker: records and plans the step of a changed model; None if there is only a trace.
        context: pixels on each side of the input that are declared to be context only.
    """

    trace: Trace
    card: Device | None = None
    remaker: Remaker | None = None
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
