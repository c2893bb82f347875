"""Request and result of a run of a script."""

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
    """How to run a script, and what to compute from its trace."""

    command: Command
    device: str | None = None
    steps: int = 2
    really: bool = False
    """Whether to run real kernels and measure."""
    rules: Rules = field(default_factory=Rules)
    writes: bool = False
    """Whether the script may write files, connect and start programs."""
    unprotected: bool = False
    """Whether to run the script even if no sandbox is available."""
    shows: bool = False
    """Whether to show the script's output."""
    limit: float = 300.0
    """Time limit in seconds."""
    room: Room | None = None
    """Budget for the largest batch or the planned script; None: only record the step."""
    plan: tuple[tuple[str, Any], ...] | None = None
    """Options for planning the model, instead of a search for the largest batch."""
    fits: Callable[[Any], None] | None = None
    """Called with the model before its first training call."""
    most: int | None = None
    """The largest batch to try."""
    settings: str | None = None
    """Settings of the card's caching allocator."""
    assume: tuple[tuple[str, float], ...] = ()
    cudnn: str | bool | None = None
    contribute: str | None = None
    """File for a contribution of this machine's GPU measurements."""
    phases: bool = False
    """Whether to follow the script through its phases, instead of ``steps`` updates."""
    batches: int | None = None
    """With ``phases``: length to which loaders are shortened; None: not at all."""
    multiple: int = 1
    """Number of batches that an update accumulates. A multiple of it is left out of each loader, so that the last
    update accumulates as many batches as in a whole run; loaders may be longer than ``batches`` by less than that."""
    world: int | None = None
    """Number of ranks that torchrun starts, of which the script is ``rank``; None: it runs as under python."""
    rank: int = 0
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of the script, beside this process's."""
    lines: tuple[Followed, ...] = ()
    """Functions to follow line by line, in addition to decorated functions."""


@dataclass(frozen=True)
class RunResult:
    """Recorded steps of a script, and the facts about its run."""

    command: Command
    trace: Trace
    facts: Facts
    largest: Largest | None = None
    """The largest batch, if requested."""
    fitting: Fitting | None = None
    """The planned model, if requested."""


class ScriptEnded(StepError):
    """A script that ended before it called a model. ``code`` is the argument of sys.exit, None if the script did not
    call it; ``said`` its output."""

    def __init__(self, name: str, code: int | str | None, said: str = "") -> None:
        """``code``: argument of sys.exit, None if the script did not call it; ``said``: what it printed."""
        how = "" if code is None else f" with exit code {code}"
        super().__init__(
            f"{name} ended{how} before it called a model",
            expected="a script that trains, or runs, a torch.nn.Module",
            do="Run it under python to see what it does; its arguments come after its name",
        )
        self.name, self.code, self.said = name, code, said
