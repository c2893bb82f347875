"""Messages between memplan, the supervisor of a script's process, and that process."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

MARK = b"memplan: a checkpoint of tensors without values "
"""First bytes of a checkpoint saved in a recording."""

NEXT = b"n"
"""Request of a script's process at the end of a run; the answer is the run's `Changes` as a line of JSON."""
TRACEBACK = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""Signal on which a script's process writes its traceback."""
SCRATCH = "scratch folder"
"""Key in `Outcome.reasons` if the folder for the script's writes could not be created."""
LISTED = 10_000
"""Number of changes to list at most."""
Protection = Literal["namespaces", "landlock", "none"]
"""Protection of the real files: namespaces with an overlay; Landlock and seccomp alone; none, on request."""


@dataclass(frozen=True)
class Change:
    """A file, or a folder (its path ends with a slash), that a script changed in its view."""

    path: str
    kind: Literal["file", "removed", "changed", "checkpoint"]
    """``file``: a file that was written, or a folder that was created; ``changed``: mode, owner or times;
    ``checkpoint``: of tensors without values."""


@dataclass(frozen=True)
class Changes:
    """The changes that a script made in its view."""

    rows: tuple[Change, ...] = ()
    more: int = 0
    """Number of further changes: beyond `LISTED`, or with paths too long to be read."""


@dataclass(frozen=True)
class Job:
    """A script to be run by a supervisor.

    Args:
        command: command of the script's process; a `Setting` as JSON is added as the last argument.
        protections: protections to try, in this order.
        own_network: whether to cut the script off from the network.
        commit: whether to copy the script's writes, except checkpoints, to the real files at the end of each run.
        seconds: time limit, after which the script is ended.
        report: descriptor of a pipe for the `Outcome` as JSON.
        answer: path of the script's answer, for the script's process.
        parent: number of the process that started the supervisor.
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
    """How a script's process ended. ``status``: as of `os.waitpid`; None if no process was started."""

    protection: Protection | None
    status: int | None = None
    over: bool = False
    """Whether the time limit ended the process."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(protection, why it is not available)."""
    room: int | None = None
    """Limit in bytes of the script's writes, if the process was ended for exceeding it."""
    unwritten: tuple[tuple[str, str], ...] = ()
    """(path, reason) of files that could not be committed."""
    unwritten_more: int = 0
    """Number of further such files."""


@dataclass(frozen=True)
class Setting:
    """The protection of a script's process, and its paths and descriptors."""

    protection: Protection
    temporary: str
    """Folder for temporary files."""
    answer: str
    """Path of the answer."""
    control: int | None = None
    """Descriptor of a socket to the process that mounts the overlays."""
