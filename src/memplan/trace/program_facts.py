"""What a program did besides its step: how it ended, what it loaded, what was held back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["steps", "script", "exit", "no update", "time"]
"""After the steps asked for; with the script itself; by its sys.exit; since nothing updated; since it took too long."""
HeldKind = Literal["file", "removed", "changed", "checkpoint", "network", "process"]
"""A file or folder written; removed; with another mode, owner or times; a checkpoint; a connection; a program."""


@dataclass(frozen=True)
class Held:
    """Something that the script would have done to the world, and that was not done."""

    kind: HeldKind
    what: str
    """The path, the address or the command."""
    where: str | None
    """``file:line`` of the script's."""
    count: int = 1


@dataclass(frozen=True)
class Batch:
    """What a loader gave first."""

    size: int | None
    """Leading dimension of its tensors, if they have one."""
    text: str
    """Its tensors, as "32x3x224x224, 32 (int64)"."""
    where: str | None
    """``file:line`` where it was asked for."""
    taken: int
    """Batches taken of the loader."""
    length: int | None
    """Batches that the loader has, None where it does not say."""
    cut: bool
    """Whether it was ended before its end, since its batches are alike and train nothing."""
    given: bool = False
    """Whether the user described the batch instead."""


@dataclass(frozen=True)
class Facts:
    """What a script did besides its step."""

    ending: Ending
    updates: int
    """Updates of the optimizer that was updated least often."""
    code: int | str | None
    """What the script called sys.exit with, if it did."""
    batches: tuple[Batch, ...]
    held: tuple[Held, ...]
    lines: int
    """Lines that it printed."""
    absent: tuple[str, ...] = ()
    """Classes of the data sets whose data are not there."""
    really: bool = False
    """Whether it ran for real."""
    protection: str = ""
    """What kept its effects from the system: namespaces, landlock, none."""
    unlisted: int = 0
    """Effects beyond those in ``held``, of which only so many are listed."""
    unwritten: tuple[tuple[str, str], ...] = ()
    """Files that it was allowed to write, and that could not be written, with why."""

    @property
    def batch_size(self) -> int | None:
        """Size of the first training batch."""
        sizes = [one.size for one in self.batches if one.size is not None]
        training = [one.size for one in self.batches if one.size is not None and not one.cut]
        return (training or sizes or [None])[0]
