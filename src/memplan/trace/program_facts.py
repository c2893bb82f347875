"""Facts about a program run as a whole: how it ended, what it loaded, which of its effects were sandboxed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["steps", "script", "exit", "no update", "time"]
"""The requested steps were run; the script ended; it called sys.exit; no optimizer updated; it took too long."""
HeldKind = Literal["file", "removed", "changed", "checkpoint", "network", "process"]
"""A file or folder written; removed; with changed mode, owner or times; a checkpoint; a connection; a program."""


@dataclass(frozen=True)
class Held:
    """An effect of the script on files, network or processes that was prevented."""

    kind: HeldKind
    what: str
    """The path, the address or the command."""
    where: str | None
    """``file:line`` in the script."""
    count: int = 1


@dataclass(frozen=True)
class Batch:
    """The first batch of a data loader."""

    size: int | None
    """Leading dimension of its tensors, if they have one."""
    text: str
    """Its tensors, as "32x3x224x224, 32 (int64)"."""
    where: str | None
    """``file:line`` that requested it."""
    taken: int
    """Number of batches that the script read from the loader."""
    length: int | None
    """Number of batches of the loader; None if unknown."""
    cut: bool
    """Whether the loader was stopped early, since its batches are alike and train nothing."""
    given: bool = False
    """Whether the user described the batch instead."""


@dataclass(frozen=True)
class Facts:
    """Facts about a run of a script."""

    ending: Ending
    updates: int
    """Number of updates by the optimizer with the fewest."""
    code: int | str | None
    """Argument of the script's call of sys.exit, if any."""
    batches: tuple[Batch, ...]
    held: tuple[Held, ...]
    lines: int
    """Number of lines that it printed."""
    absent: tuple[str, ...] = ()
    """Classes of data sets whose data are missing on this machine."""
    really: bool = False
    """Whether it ran on real tensors."""
    protection: str = ""
    """Mechanism of the sandbox: namespaces, landlock, none."""
    unlisted: int = 0
    """Number of prevented effects that ``held`` does not list."""
    unwritten: tuple[tuple[str, str], ...] = ()
    """(path, reason) of permitted files that could not be written."""

    @property
    def batch_size(self) -> int | None:
        """Size of the first training batch."""
        sizes = [batch.size for batch in self.batches if batch.size is not None]
        training = [batch.size for batch in self.batches if batch.size is not None and not batch.cut]
        return (training or sizes or [None])[0]
