"""The joint graph as plain data: forward and backward of a step as one list of ops, before it is split.

A value is a tensor. One that an op makes in memory of its own *owns* that memory, under its own id; a view names
the value that owns what it looks into (``base``). Ops are functional: none changes a value that another one reads.
What a step changes (running statistics) is listed in ``mutations`` and written back by the schedule.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from memplan.trace.records import HOST

Kind = Literal["parameter", "buffer", "input", "constant", "tangent", "result", "encoded", "host"]
"""Where a value comes from. ``tangent``: the gradient of an output, handed in when backward begins; ``encoded``: the
form that a lever keeps of another value (see KeptForm), which no op of the graph makes; ``host``: such a form in host
memory, of no bytes on the device."""

RESIDENT: tuple[Kind, ...] = ("parameter", "buffer", "input", "constant")
"""Kinds of values that exist before the step and stay: a schedule never frees or overwrites them."""

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Place of a value in an op's arguments."""

    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph."""

    id: int
    """Index in ``graph.values``."""
    name: str
    """Unique, and fit for a variable's name: that of the graph's node."""
    kind: Kind
    base: int
    """Id of the value that owns the memory: its own, unless it is a view."""
    bytes: int
    """Bytes of the memory that it owns; 0 for a view."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    op: int | None = None
    """Index of the op that makes it; None for what is handed in."""
    path: str = ""
    """Name in the model of a parameter or buffer; index of an input or tangent."""
    hooked: bool = False
    """Whether a parameter has hooks that run once its gradient was added to ``.grad``, and may change it."""
    place: str = HOST
    """Device in torch's words: ``cpu``, ``cuda:0``."""

    @property
    def is_view(self) -> bool:
        """Return whether another value owns its memory."""
        return self.base != self.id

    @property
    def held(self) -> bool:
        """Return whether its bytes stay when a schedule frees it: of a single number, as a loss, ``backward()`` itself
        holds the gradient until it returns."""
        return self.kind == "tangent" and not self.shape

    @property
    def own_bytes(self) -> int:
        """Bytes of a tensor of this shape in memory of its own, as its gradient is: whatever memory it shares."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class GraphOp:
    """One call of the graph."""

    index: int
    """Index in ``graph.ops``; ops are in an order in which they can run, forward before backward."""
    target: str
    """``aten.relu.default``: looked up under ``torch.ops``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Keyword arguments, with Ref in place of tensors, at any depth."""
    phase: Phase
    outputs: tuple[int | None, ...]
    """Ids of the results in order; None for one that nobody reads or that is no tensor."""
    multiple: bool
    """Whether the call gives a tuple, not one tensor."""
    reads: tuple[int, ...]
    """Bases of what its kernel really reads: an argument that a mask makes idle is not among them."""
    makes: tuple[int, ...]
    """Ids of the results that own memory, in order."""
    discarded: int = 0
    """Bytes of results that nobody reads: there while the op runs, freed with its end."""
    scratch: int = 0
    """Bytes that the kernel holds beyond its results while it runs; below 0 where it frees what it reads as it goes."""
    overwrites: tuple[int, ...] = ()
    """Bases among its reads whose memory its first result can take over, bit for bit the same (levers.in_place): the
    whole of that memory, of the same size and layout."""
    seconds: float = 0.0
    random: bool = False
    """Whether it draws random numbers: then it runs once, never again."""
    once: bool = False
    """Whether it must not be recomputed for another reason: it has an effect, or is not deterministic."""
    layer: str = ""
    where: str | None = None
    """``file:line`` of the user's code; of a backward op, that of its forward op."""
    gradient_of: int | None = None
    """Index of the forward op whose derivative a backward op computes, where it is known."""
    scratch_into: int | None = None
    """``scratch`` where its first result takes over memory piece by piece; None: as ``scratch``."""
    holds: tuple[int, ...] = ()
    """Ids of values whose very memory it reads, whatever it is given: they are neither made again nor encoded."""
    again: GraphOp | None = None
    """A cheaper op that makes its first result again, bit for bit, of what is kept anyway. Then that result alone is
    made again, and by that op. It has the same index."""

    @property
    def rerun(self) -> GraphOp:
        """Return the op that runs where its results are made again: mostly itself."""
        return self if self.again is None else self.again

    @property
    def scratch_saved(self) -> int:
        """Bytes of scratch that it does not take where its first result takes over memory; they can be negative."""
        return 0 if self.scratch_into is None else self.scratch - self.scratch_into

    @property
    def is_view(self) -> bool:
        """Return whether it only looks into memory that is there: it costs nothing and is not scheduled.

        What has an effect and no result (a check of a matrix) is none.
        """
        return not self.makes and not self.discarded and not self.once


@dataclass(frozen=True, slots=True)
class KeptForm:
    """A form in which a lever keeps a forward value for the backward pass, instead of the value itself.

    It is *stored* in the forward pass and *fetched* back in the backward pass. Both are actions of the schedule, after
    the last forward op that reads the value and before the first backward op that needs it; or copies that run beside
    the ops, where ``copy_seconds`` is given.
    """

    lever: str
    """Name of the lever (see `memplan.planning.levers.registry`)."""
    value: int
    kept: int
    """Id of the value that stands for it, of kind ``encoded`` or ``host``: its bytes are held between the passes."""
    how: str = ""
    """What else the lever needs to know: a codec."""
    store_seconds: float = 0.0
    fetch_seconds: float = 0.0
    store_scratch: int = 0
    fetch_scratch: int = 0
    """Bytes that each action holds while it runs, beside what it reads and makes."""
    whole: bool = True
    """Whether the value can be fetched from it. If not, it serves its ``direct`` readers only."""
    direct: tuple[int, ...] = ()
    """Backward ops that read the kept form itself, instead of the value (a ReLU's gradient and its bits)."""
    direct_scratch: int = 0
    """Bytes that each of these holds beyond its results then, in place of its own scratch."""
    direct_seconds: float = 0.0
    """Seconds that its ``direct`` readers take more, together, than with the value itself."""
    also_reads: tuple[int, ...] = ()
    """Values (bases) that fetching reads beside the kept form: made before the value, by other ops or handed in. Then
    the value is the only result of its op, and is fetched where that op would run again."""
    copy_seconds: float | None = None
    """Seconds of a copy in either direction, which runs beside the ops and is waited for; None: no copy."""

    @property
    def is_copied(self) -> bool:
        """Return whether copies that run beside the ops store and fetch it."""
        return self.copy_seconds is not None

    @property
    def use_seconds(self) -> float:
        """Seconds that keeping the value in this form adds to the ops, without fetching it."""
        return self.store_seconds + self.direct_seconds


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a step as one graph."""

    values: tuple[Value, ...]
    ops: tuple[GraphOp, ...]
    outputs: tuple[int, ...]
    """Values that the forward pass returns, in order."""
    gradients: tuple[tuple[int, int], ...]
    """(value that a gradient is of, the gradient), parameters and inputs."""
    mutations: tuple[tuple[int, int], ...] = ()
    """(value handed in, the value that is written into it), of buffers mostly."""
    forms: tuple[KeptForm, ...] = ()
    """Forms in which values may be kept, lever by lever in the order of the registry."""
    torch: str = ""

    @cached_property
    def forward_ops(self) -> tuple[GraphOp, ...]:
        """Ops of the forward pass that are more than views, in order."""
        return tuple(op for op in self.ops if op.phase == "forward" and not op.is_view)

    @cached_property
    def backward_ops(self) -> tuple[GraphOp, ...]:
        """Ops of the backward pass that are more than views, in order."""
        return tuple(op for op in self.ops if op.phase == "backward" and not op.is_view)

    @cached_property
    def maker(self) -> dict[int, GraphOp]:
        """Return the op that makes each value that owns memory."""
        return {value: op for op in self.ops for value in op.makes}

    @cached_property
    def form(self) -> dict[int, KeptForm]:
        """Each kept form by the id of the value that stands for it."""
        return {form.kept: form for form in self.forms}

    @cached_property
    def ranked_forms(self) -> tuple[KeptForm, ...]:
        """Kept forms by rank: of several whole forms chosen for one value, the first is used. Copies come last."""
        levers = list(dict.fromkeys(form.lever for form in self.forms))
        return tuple(sorted(self.forms, key=lambda form: (form.is_copied, levers.index(form.lever), form.value)))

    def forms_by(self, lever: str) -> tuple[KeptForm, ...]:
        """Return the kept forms of one lever."""
        return tuple(form for form in self.forms if form.lever == lever)

    @cached_property
    def irreplaceable(self) -> frozenset[int]:
        """Bases of what ops hold on to (see GraphOp)."""
        return frozenset(self.base(value) for op in self.ops for value in op.holds)

    @cached_property
    def is_on_card(self) -> bool:
        """Return whether the step runs on a CUDA card: then what is in host memory takes no bytes."""
        return any(value.place != HOST for value in self.values)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of ops, shapes, dtypes and how they are connected; without costs, places and forms in host memory."""
        digest = hashlib.sha256()
        for value in self.values:
            if value.kind == "host":
                continue
            parts = (value.kind, value.base, value.bytes, value.shape, value.stride, value.dtype, value.path)
            digest.update(repr(parts).encode())
        for op in self.ops:
            call = (op.target, op.args, sorted(op.kwargs.items()))
            digest.update(repr((call, op.phase, op.outputs, op.reads)).encode())
        digest.update(repr((self.outputs, self.gradients, self.mutations)).encode())
        return digest.hexdigest()

    def base(self, value: int) -> int:
        """Return the id of the value that owns the memory of another."""
        return self.values[value].base


def refs(arguments: Any) -> Iterator[int]:
    """Yield the values in an op's arguments, in order, at any depth."""
    found: list[int] = []
    _collect(arguments, found)
    return iter(found)


def _collect(arguments: Any, found: list[int]) -> None:
    if isinstance(arguments, Ref):
        found.append(arguments.value)
    elif isinstance(arguments, (tuple, list)):
        for part in arguments:
            _collect(part, found)
    elif isinstance(arguments, dict):
        for part in arguments.values():
            _collect(part, found)


def map_refs(arguments: Any, change: Callable[[int], Any]) -> Any:
    """Return the arguments with every Ref replaced by ``change(its value)``."""
    if isinstance(arguments, Ref):
        return change(arguments.value)
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(map_refs(part, change) for part in arguments)
    if isinstance(arguments, dict):
        return {name: map_refs(part, change) for name, part in arguments.items()}
    return arguments


def recomputable(graph: JointGraph) -> frozenset[int]:
    """Return the forward values that may be recomputed: of an op without randomness or effect, not returned, not
    held."""
    fixed = output_bases(graph) | graph.irreplaceable
    again = (op.rerun for op in graph.forward_ops if not (op.random or op.once))
    return frozenset(value for op in again for value in op.makes if value not in fixed)


def output_bases(graph: JointGraph) -> set[int]:
    """Return the ids of the values whose memory the forward pass returns."""
    return {graph.base(value) for value in graph.outputs}
