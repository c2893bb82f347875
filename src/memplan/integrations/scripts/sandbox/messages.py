"""What passes between memplan, the supervisor of a script's process, and that process."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

MARK = b"memplan: a checkpoint of tensors without values "
"""How a checkpoint begins that a recording saved."""

NEXT = b"n"
"""What a script's process sends at the end of a run; the answer is the run's changes, as a line of JSON."""
TRACEBACK = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""Signal on which a script's process writes its traceback."""
SCRATCH = "scratch folder"
"""Name, among the reasons for which nothing was started, of the folder for what a script writes."""
LISTED = 10_000
"""Changes that are listed at most."""
Protection = Literal["namespaces", "landlock", "none"]
"""Protection of the real files: namespaces with an overlay; Landlock and seccomp alone; none, on request."""


@dataclass(frozen=True)
class Change:
    """A file, or a folder (its path ends with a slash), that a script changed in its view."""

    path: str
    kind: Literal["file", "removed", "changed", "checkpoint"]
    """Written, or made; removed; its mode, owner or times; a checkpoint of tensors without values."""


@dataclass(frozen=True)
class Changes:
    """What a script changed in its view."""

    rows: tuple[Change, ...] = ()
    more: int = 0
    """How many there are besides: beyond `LISTED`, or with paths too long to be read."""


@dataclass(frozen=True)
class Job:
    """A script to be run by a supervisor.

    Args:
        command: of the script's process; a `Setting` as JSON is added as its last argument.
        protections: to try, in this order.
        own_network: whether it is cut off from the network.
        commit: whether what it writes is written to the real files at the end of each run, but for checkpoints.
        seconds: after which it is ended.
        report: descriptor of a pipe for the outcome, as JSON (`Outcome`).
        answer: path of the script's answer, for the script's process.
        parent: number of the process that started this one.
    """

    command: tuple[str, ...]
    protections: tuple[Protection, ...]
    own_network: bool
    commit: bool
    seconds: float
    report: int
    answer: str
    parent: int


@dataclass(frozen=True)
class Outcome:
    """How a script's process ended. ``status``: as `os.waitpid` has it; None where nothing was started."""

    protection: Protection | None
    status: int | None = None
    over: bool = False
    """Whether its time was over."""
    reasons: tuple[tuple[str, str], ...] = ()
    """Why a protection could not be had, by its name."""
    room: int | None = None
    """Bytes that it could write, if it was ended since it wrote more."""
    unwritten: tuple[tuple[str, str], ...] = ()
    """Paths of files that were to be committed and could not be written, with why."""
    unwritten_more: int = 0
    """How many there are besides."""


@dataclass(frozen=True)
class Setting:
    """What a script's process is told of its protection."""

    protection: Protection
    temporary: str
    """A folder for its temporary files."""
    answer: str
    control: int | None = None
    """Descriptor of a socket to the process that lays its overlays."""
