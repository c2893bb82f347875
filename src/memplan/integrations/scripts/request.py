"""What is asked of a script, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memplan.errors import StepError
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.loaders import Rules
from memplan.studies.capacity.largest import Largest
from memplan.studies.capacity.limit import Room
from memplan.trace.program_facts import Facts
from memplan.trace.recording.followed.line_watch import Followed
from memplan.trace.trace import Trace
from memplan.verification.fitting.outcome import Fitting


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
    unprotected: bool = False
    """Whether it runs where nothing can hold back what it writes, sends or starts."""
    shows: bool = False
    """Whether what it prints is shown."""
    limit: float = 300.0
    """Seconds after which it is ended."""
    room: Room | None = None
    """What the largest batch, or the script with a plan, has to fit; None: the step alone is asked for."""
    plan: tuple[tuple[str, Any], ...] | None = None
    """Options of a plan of its model, where that is asked for instead of the largest batch."""
    fits: Callable[[Any], None] | None = None
    """Called with the model before its first training call."""
    most: int | None = None
    """The largest batch to try."""
    settings: str | None = None
    """Of a card's caching allocator."""
    assume: tuple[tuple[str, float], ...] = ()
    cudnn: str | bool | None = None
    contribute: str | None = None
    """File for what this machine's GPU did, where it runs there."""
    lines: tuple[Followed, ...] = ()
    """Functions to follow line by line besides those that are decorated."""


@dataclass(frozen=True)
class Ran:
    """A script's recorded steps, and what else it did."""

    command: Command
    trace: Trace
    facts: Facts
    largest: Largest | None = None
    """The largest batch, where that was asked for."""
    fitting: Fitting | None = None
    """Its model planned, where that was asked for."""


class ScriptEnded(StepError):
    """A script that ended before it called a model.

    Args:
        name: what to call it.
        code: what it called sys.exit with; None where it did not.
        said: what it printed.
    """

    def __init__(self, name: str, code: int | str | None, said: str = "") -> None:
        how = "" if code is None else f" with exit code {code}"
        super().__init__(
            f"{name} ended{how} before it called a model",
            expected="a script that trains, or runs, a torch.nn.Module",
            do="Run it under python to see what it does; its arguments come after its name",
        )
        self.name, self.code, self.said = name, code, said
