"""The immutable records that make up a trace, the same for recorded and measured steps.

Time in a trace is a clock of allocator events: every allocation and every free of a storage is a tick, and an op
spans the ticks ``start < t <= end``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from memplan._json import SignedInt
from memplan.cudnn.questions import ExecutionPlan

Phase = Literal["build", "forward", "backward", "optimizer"]

Cause = Literal[
    "weight",
    "buffer",
    "input",
    "parameter_gradient",
    "activation_gradient",
    "optimizer_state",
    "saved",
    "activation",
    "temporary",
    "workspace",
    "gathered_weight",
    "communication",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

CallKind = Literal["empty_cache", "synchronize"]

HOST = "cpu"
ON_CARD = "cuda:0"
"""Devices of storages. In a step for a card, storages on the host do not count."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op reads: the name of the op's argument, and the storage behind it."""

    name: str
    storage: int


@dataclass(frozen=True, slots=True)
class Op:
    """An aten op as dispatched, after autograd and autocast and before its kernel."""

    index: int
    name: str
    """Overload name, e.g. ``aten.convolution.default``."""
    phase: Phase
    step: SignedInt
    """0-based; -1 while building."""
    layer: str
    """Path of the innermost running module, the class name for a root module, "" outside of modules."""
    where: str | None
    """``file:line`` of the innermost frame outside of torch; for a backward op, that of its forward op."""
    start: int
    end: int
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]
    """Storages of the op's results, whether allocated here, written in place or viewed."""
    needs_grad: tuple[str, ...] = ()
    """Forward ops: names of the arguments for which a gradient will be computed."""
    gradient_of: int | None = None
    """Backward ops: index of the forward op whose derivative formula this op is a part of."""
    recomputed: bool = False
    """Whether it is a forward op that runs during the backward pass, as under checkpointing."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A forward op whose derivative formula reads a storage, with the storage's role in that op."""

    op: int
    role: str
    """An argument's name (``input``), ``result``, or ``kept`` for neither (a temporary of an autograd Function)."""
    read_as: str = ""
    """Name of the argument under which the backward op reads it (``indices``, ``save_mean``)."""


@dataclass(frozen=True, slots=True)
class Storage:
    """An allocation; several tensors can share it."""

    id: int
    bytes: int
    cause: Cause
    born: int
    died: int | None
    """Tick of the free; None if it is still allocated at the end."""
    op: int | None = None
    """Index of the op that allocated it, if any."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Shape of the first tensor in this storage."""
    device: str = HOST
    name: str = ""
    """Name of the parameter or buffer in it, or of the parameter whose gradient it is; else ""."""
    sharers: tuple[Sharer, ...] = ()
    low: int | None = None
    """The least bytes, if the size is only known as the interval from ``low`` to ``bytes``; else None."""
    stream: int = 0
    """On a card: the stream of the allocation. In a private pool of CUDA graphs: the stream, plus the number of the
    pool (from 1) times `PRIVATE_POOL`."""
    used_on: tuple[SignedInt, ...] = ()
    """Other streams that use it (`record_stream`), -1 if unknown: when freed, it is reused only after their work."""


PRIVATE_POOL = 1 << 12
"""See `Storage.stream`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of the step's models, with the parameters and buffers that it owns directly."""

    name: str
    kind: str
    weights: tuple[int, ...] = ()
    """Storages of its own parameters; tied parameters belong to every owner."""
    buffers: tuple[int, ...] = ()
    made: str | None = None
    """``file:line`` that created it, if that was while building and it has parameters or buffers."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the step to the card's allocator, with a tick of its own."""

    tick: int
    kind: CallKind


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """A call of autograd's engine, with the ticks at which it began and ended."""

    step: SignedInt
    start: int
    end: int
    keeps: Literal["", "retain_graph", "create_graph"]
    """The flag of the call that keeps the graph; "" if the graph is freed."""
    nested: bool
    """Whether it ran within another pass, as in reentrant checkpointing."""
    where: str | None
    """``file:line``."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Peaks of torch's own memory counters of a card, in bytes, since their last reset."""

    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Engines:
    """cuDNN's plans for an op with a workspace: the first, then ever smaller plans that torch tries if memory runs
    out."""

    storage: int
    plans: tuple[ExecutionPlan, ...]


@dataclass(frozen=True, slots=True)
class ExpectedSize:
    """A storage whose bytes are the expected workspace of a convolution or of a recurrent network.

    With all expected sizes at ``low`` (or at ``high``), the allocated peak is at the lower (or upper) end of the band
    that contains the real peak in 95 % of steps.
    """

    storage: int
    low: int
    high: int


HostKind = Literal["pinned", "shared"]
"""Host memory that torch's CPU allocator does not allocate: page-locked for copies to a card; shared by processes."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group of several ranks that includes the recorded rank."""

    ranks: tuple[int, ...]
    piped: bool = False
    """Whether this rank sends to or receives from single ranks of the group, as stages of a pipeline do."""
    stages: tuple[int, ...] = ()
    """Indices of this rank's `PipelineStage` objects in the group."""


@dataclass(frozen=True, slots=True)
class HostStorage:
    """A storage on the host that torch's CPU allocator does not allocate."""

    storage: int
    kind: HostKind


@dataclass(frozen=True, slots=True)
class LoaderUse:
    """A pass of the script over a data loader (with persistent workers: all passes).

    A recording loads batches in its own process; a real run's workers prefetch ``workers * prefetch`` more batches.
    """

    where: str | None
    """``file:line`` that iterates over the loader."""
    start: int
    end: int | None
    """Ticks at which the workers start and end; None: at the end of the recording."""
    workers: int
    prefetch: int
    """Batches that each worker loads ahead."""
    start_method: str
    """Start method of the workers: fork, spawn, forkserver; "" without workers."""
    pinned: bool
    """Whether batches are copied to pinned memory."""
    data_set: int
    """Number that identifies the data set."""
    arrays: int
    """Bytes of numpy arrays in the data set, which are no storages."""
    tensors: tuple[int, ...]
    """Storages on the host of tensors in the data set."""
    batch: tuple[int, ...]
    """Bytes of each storage of the largest batch."""
    loads: tuple[tuple[int, int], ...]
    """Ticks ``start < tick <= end`` of loading each batch."""
    exhausted: tuple[int, ...]
    """Ticks at which all batches were loaded; with persistent workers, more loads can follow."""
    length: int | None
    """Number of batches of the loader; None if unknown."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption of a recording, and the line where it was made.

    ``kernel``: the kernel that the card runs for an op, and why. ``bound``: the size of a result that depends on
    values. ``sparse``: the number of elements of a sparse tensor. ``library``: an op of a library or of the user, whose
    kernel may allocate more than its results. ``dry``: an answer of the emulated driver that may be wrong.
    """

    kind: Literal["scalar", "branch", "bound", "compiled", "host", "kernel", "sparse", "library", "dry"]
    text: str
    where: str | None
    count: int = 1


def loud(assumptions: Iterable[Assumption]) -> list[Assumption]:
    """Return the assumptions that, if wrong, change figures or let the real step fail."""
    return [
        assumption
        for assumption in assumptions
        if assumption.kind in ("branch", "bound", "host", "sparse", "library", "dry")
    ]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a window on its storage; sizes, strides and offset in elements."""

    storage: SignedInt
    """Negative if a measurement could not match it to an allocation; then still unique per storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


Option = int | float | bool | str | None | tuple[Any, ...]
"""A non-tensor argument of an op: a number, a string, or a tuple of these."""


@dataclass(frozen=True, slots=True)
class Form:
    """The arguments and results of a forward op's call in the first step: tensors as views, and other arguments.

    Unlike `Op.reads` and `Op.writes`, views have the accessed part of a storage and its shape (`memplan.checks.fields`
    tracks positions by them).
    """

    op: int
    reads: tuple[tuple[str, View], ...]
    writes: tuple[View, ...]
    options: tuple[tuple[str, Option], ...]

    def option(self, name: str, default: Option = None) -> Any:
        """Return the value of a non-tensor argument, or the default if the op has no argument of this name."""
        return next((value for known, value in self.options if known == name), default)

    def read(self, name: str) -> View | None:
        """Return the first tensor of an argument, or None."""
        return next((view for known, view in self.reads if known == name), None)


@dataclass(frozen=True, slots=True)
class Returned:
    """The tensors that an outermost module call returned in the first step, in order.

    ``after``: number of ops that began before the module returned.
    """

    layer: str
    after: int
    tensors: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Executions of a line with the same start and end ticks."""

    line: int
    start: int
    end: int
    hits: int
    """0 where a generator resumes in the middle of a line."""
    cut: bool = False
    """Whether the line was still running when the recording stopped."""


@dataclass(frozen=True, slots=True)
class FunctionLines:
    """A function followed line by line. What it calls belongs to the calling line."""

    name: str
    file: str
    source: tuple[tuple[int, str], ...]
    """(number, text) of its lines; spans of a statement over several lines are those of its first."""
    spans: tuple[LineSpan, ...]
