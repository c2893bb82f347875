"""A step as data: immutable values that know nothing of the stage that made them.

Time in a trace is a clock of allocator events: every birth and every death of a storage is one tick, and an op
spans the ticks ``start < t <= end``. So a recorded step, which knows only between which ops a storage lives, and a
measured one, which knows every event of the allocator, are the same kind of value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from memplan._json import SignedInt
from memplan.cudnn.questions import ExecutionPlan

SCHEMA = 2
"""Version of the JSON form. Raised whenever a reader of the old form would misread the new one."""

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
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

CallKind = Literal["empty_cache", "synchronize"]

HOST = "cpu"
ON_CARD = "cuda:0"
"""Devices of storages: a step for a card has some in the host's memory, which do not count."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op reads: the name of the op's argument, and the storage behind it."""

    name: str
    storage: int


@dataclass(frozen=True, slots=True)
class Op:
    """One aten op as it was dispatched, after autograd and autocast and before its kernel."""

    index: int
    name: str
    """Overload name, e.g. ``aten.convolution.default``."""
    phase: Phase
    step: SignedInt
    """0-based; -1 while building."""
    layer: str
    """Path of the innermost module that was running, the class name for a root module, "" outside of modules."""
    where: str | None
    """``file:line`` of the innermost frame outside of torch; for a backward op, that of its forward op."""
    start: int
    end: int
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]
    """Storages that the op's results lie in, whether born here, written in place or viewed."""
    needs_grad: tuple[str, ...] = ()
    """Forward ops: names of the arguments for which a gradient will be computed."""
    gradient_of: int | None = None
    """Backward ops: index of the forward op whose derivative formula this op is a part of."""
    recomputed: bool = False
    """A forward op that runs (again) during the backward pass, as under checkpointing."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A forward op whose derivative formula reads a storage, and in which role it met it."""

    op: int
    role: str
    """An argument's name (``input``), ``result``, or ``kept`` where it was neither (a function's own temporary)."""
    read_as: str = ""
    """Name of the argument under which the backward op reads it (``indices``, ``save_mean``)."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation; several tensors can share it."""

    id: int
    bytes: int
    cause: Cause
    born: int
    died: int | None
    """Tick of the release; None while it is held at the end."""
    op: int | None = None
    """Index of the op that it was born in, if any."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of the first tensor seen on it."""
    device: str = HOST
    name: str = ""
    """Name of the parameter or buffer that it holds (for gradients: whose gradient), else ""."""
    sharers: tuple[Sharer, ...] = ()
    low: int | None = None
    """Where nobody can say how much it takes: the least, in bytes; ``bytes`` are the most. None: exactly ``bytes``."""
    stream: int = 0
    """On a card: the stream whose pool it comes from."""
    used_on: tuple[int, ...] = ()
    """Other streams that it was used on (`record_stream`): freed, it waits for them."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of the step's models, with the parameters and buffers that it owns directly."""

    name: str
    kind: str
    weights: tuple[int, ...] = ()
    """Storages of its own parameters (tied ones are named by every owner)."""
    buffers: tuple[int, ...] = ()
    made: str | None = None
    """``file:line`` of the call that made it, where it was made while building and has parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """Something that the step asked of the card's allocator, at a tick of its own."""

    tick: int
    kind: CallKind


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """A call of autograd's engine, with the ticks at which it began and was over."""

    step: SignedInt
    start: int
    end: int
    keeps: Literal["", "retain_graph", "create_graph"]
    """The flag of the call that keeps its graph; "" where it is freed."""
    nested: bool
    """Whether it ran within another one, as reentrant checkpointing does."""
    where: str | None
    """``file:line``."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What torch's own counters of a card said: the peaks in bytes since they were reset."""

    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Engines:
    """What cuDNN runs in a workspace: its first plan, and the plans that torch tries where there is no room for it.

    Of ``plans`` each takes less than the one before.
    """

    storage: int
    plans: tuple[ExecutionPlan, ...]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the recording had to assume, and where.

    ``kernel``: which kernel an op takes on the card, and why. ``bound``: how large a result is that depends on values.
    ``sparse``: how many elements a sparse tensor has. ``library``: an op of a library or of the user's, whose kernel
    may take more than its results. ``dry``: what an emulated card does not know.
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
    """Negative where a measurement could not join it to an allocation; still the same for the same storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


Option = int | float | bool | str | None | tuple[Any, ...]
"""An argument of an op that is no tensor: a number, a text, or a list of such."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a forward op of the first step was called: what it read and gave, as views, and its other arguments.

    ``reads`` and ``writes`` of the op itself say which storages these are; this says which parts of them, in which
    shape, so that what happens to the positions of a tensor can be followed (`memplan.checks.fields`).
    """

    op: int
    reads: tuple[tuple[str, View], ...]
    writes: tuple[View, ...]
    options: tuple[tuple[str, Option], ...]

    def option(self, name: str, default: Option = None) -> Any:
        """Return the value of an argument that is no tensor; the default where the op has none of that name."""
        return next((value for known, value in self.options if known == name), default)

    def read(self, name: str) -> View | None:
        """Return the first tensor given for an argument."""
        return next((view for known, view in self.reads if known == name), None)


@dataclass(frozen=True, slots=True)
class Returned:
    """What a module that was called from outside of all modules returned in the first step: its tensors, in order.

    ``after`` is the number of ops that had begun by then.
    """

    layer: str
    after: int
    tensors: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Runs of a line that began at one tick and ended at another."""

    line: int
    start: int
    end: int
    hits: int
    """0 where a generator goes on in the middle of a line."""
    cut: bool = False
    """Whether it was running when nothing more was watched."""


@dataclass(frozen=True, slots=True)
class FunctionLines:
    """A function that was followed line by line. What it calls belongs to the line that calls it."""

    name: str
    file: str
    source: tuple[tuple[int, str], ...]
    """Numbers of its lines and their text; a statement over several lines counts for its first."""
    spans: tuple[LineSpan, ...]
