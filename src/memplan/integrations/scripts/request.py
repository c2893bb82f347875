"""What is asked of a script, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.loaders import Rules
from memplan.trace.program_facts import Facts
from memplan.trace.recording.followed.line_watch import Followed
from memplan.trace.trace import Trace


@dataclass(frozen=True)
class Request:
    """What is asked of a script."""

    command: Command
    device: str | None = None
    steps: int = 2
    really: bool = False
    """Whether it runs for real, here."""
    rules: Rules = field(default_factory=Rules)
    writes: bool = False
    """Whether it may write, connect and start programs."""
    shows: bool = False
    """Whether what it prints is shown."""
    limit: float = 300.0
    """Seconds after which it is ended."""
    assume: tuple[tuple[str, float], ...] = ()
    cudnn: str | bool | None = None
    lines: tuple[Followed, ...] = ()
    """Functions to follow line by line besides those that are decorated."""


@dataclass(frozen=True)
class Ran:
    """A script's recorded steps, and what else it did."""

    command: Command
    trace: Trace
    facts: Facts
