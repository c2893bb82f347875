"""Facts about a program run as a whole: how it ended, what it loaded, which of its effects were sandboxed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["steps", "script", "exit", "no update", "time", "passes"]
"""Why a run of a script ended: all requested steps ran; the script ended; it called sys.exit; no optimizer updated; the
time limit; two passes over the training data."""
HeldKind = Literal["file", "removed", "changed", "checkpoint", "network", "process"]
"""A file or folder written; removed; with changed mode, owner or times; a checkpoint saved; a connection; a program
started."""


@dataclass(frozen=True)
class Held:
    """An effect of a script on files, network or processes that the sandbox prevented."""

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
    """Leading dimension of the batch's tensors, if they share a leading dimension."""
    text: str
    """The batch's tensors, as "32x3x224x224, 32 (int64)"."""
    where: str | None
    """``file:line`` that requested the batch."""
    taken: int
    """Number of batches that the script read from the loader."""
    length: int | None
    """Number of batches of the loader; None if unknown."""
    cut: bool
    """Whether the loader was stopped early, since its batches are alike and train nothing."""
    given: bool = False
    """Whether the user described the batch, so that the loader was not read."""


@dataclass(frozen=True)
class RunPart:
    """A part of a script's whole run: a step of the run's trace.

    A part begins where a batch is loaded, a checkpoint is saved or loaded, or `generate` is called; without a loader,
    where a model is called after an update.
    """

    kind: Literal["work", "generate", "save", "load"] = "work"
    where: str | None = None
    """``file:line`` that iterates over the loader, saves, loads or generates."""
    calls: int = 0
    """Number of outermost calls of a model."""
    training_calls: int = 0
    """Number of those calls in training mode with gradients enabled."""
    graph_calls: int = 0
    """Number of those calls in evaluation mode with gradients enabled."""
    updates: int = 0
    """Number of optimizer updates."""
    loader: int | None = None
    """Number of the data set, in the order in which the script iterates over them; None without a loader."""
    loads: bool = False
    """Whether the part began with the request of a batch."""
    begins_pass: bool = False
    """Whether that batch was the first of a pass over the loader."""
    exhausted: bool = False
    """Whether the loader had no further batch, or was stopped early."""
    length: int | None = None
    """Number of batches of the whole loader; None if unknown."""
    batch_size: int | None = None
    """Number of samples in each of the loader's batches but the last; None if unknown."""
    last_batch: int | None = None
    """Number of samples in the loader's last batch."""

    @property
    def trains(self) -> bool:
        """Return whether a model was trained in this part."""
        return self.updates > 0 or self.training_calls > 0


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
    """Number of lines that the script printed."""
    absent: tuple[str, ...] = ()
    """Classes of data sets whose data are missing on this machine."""
    really: bool = False
    """Whether the script ran on real tensors."""
    protection: str = ""
    """Mechanism of the sandbox: namespaces, landlock, none."""
    unlisted: int = 0
    """Number of prevented effects that ``held`` does not list."""
    unwritten: tuple[tuple[str, str], ...] = ()
    """(path, reason) of permitted files that could not be written."""
    parts: tuple[RunPart, ...] = ()
    """For a whole run, a part for each step of its trace."""

    @property
    def batch_size(self) -> int | None:
        """Size of the first training batch."""
        sizes = [batch.size for batch in self.batches if batch.size is not None]
        # a loader is cut where its batches train nothing, as in validation
        training = [batch.size for batch in self.batches if batch.size is not None and not batch.cut]
        return (training or sizes or [None])[0]
