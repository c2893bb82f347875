"""The joint graph as plain data: the forward and backward ops of a step in a single list, before it is partitioned.

A value is a tensor. It either *owns* its memory or is a view; ``base`` is the id of the value that owns the memory. Ops
are functional: none changes a value that another op reads. Tensors that the step changes (running statistics) are
listed in ``mutations``, and the schedule writes them back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch

from memplan.trace.records import HOST

Kind = Literal["parameter", "buffer", "input", "constant", "tangent", "result", "encoded", "host"]
"""Origin of a value. ``tangent``: the gradient of an output, an input of the backward pass; ``encoded``: a form in
which a lever saves another value (see SavedForm), made by no op of the graph; ``host``: such a form in host memory,
without bytes on the device."""

RESIDENT: tuple[Kind, ...] = ("parameter", "buffer", "input", "constant")
"""Kinds of values that exist before the step and stay: a schedule never frees or overwrites them."""

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A value as an argument of an op."""

    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph."""

    id: int
    """Index in ``graph.values``."""
    name: str
    """Unique, and a valid Python identifier: the name of the graph's node."""
    kind: Kind
    base: int
    """Id of the value that owns the memory: its own id unless it is a view."""
    bytes: int
    """Bytes of memory that it owns; 0 for a view."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    op: int | None = None
    """Index of the op that makes it; None for resident values and tangents."""
    path: str = ""
    """Name of a parameter or buffer in the model; index of an input or tangent."""
    hooked: bool = False
    """Whether a parameter has hooks that run after its gradient was added to ``.grad``, and may change the
    parameter."""
    place: str = HOST
    """Device as torch names it: ``cpu``, ``cuda:0``."""

    @property
    def is_view(self) -> bool:
        """Whether another value owns its memory."""
        return self.base != self.id

    @property
    def kept_by_backward(self) -> bool:
        """Whether its memory stays allocated after a schedule frees it: ``backward()`` itself holds the gradient of a
        0-d output, such as a loss, until it returns."""
        return self.kind == "tangent" and not self.shape

    @property
    def contiguous_bytes(self) -> int:
        """Bytes of a contiguous copy of it, or of its gradient: from shape and dtype alone, also for views."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class GraphOp:
    """A call in the graph."""

    index: int
    """Index in ``graph.ops``, which are in an order in which they can run, forward before backward."""
    target: str
    """Name of the op under ``torch.ops``: ``aten.relu.default``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Keyword arguments; here and in ``args``, tensors are Refs, at any depth."""
    phase: Phase
    outputs: tuple[int | None, ...]
    """Ids of the results in order; None for a result that nothing reads or that is no tensor."""
    returns_tuple: bool
    """Whether the call returns a tuple of tensors, not a tensor."""
    reads: tuple[int, ...]
    """Bases of the tensors that its kernel really reads: without arguments that a mask makes unused."""
    makes: tuple[int, ...]
    """Ids of the results that own memory, in order."""
    discarded: int = 0
    """Bytes of results that nothing reads: they are live only while the op runs."""
    discarded_by_output: tuple[int, ...] = ()
    """The same of each result, in the order of ``outputs``: 0 for results that are read, and for views. (): a single
    result, the last, has all of ``discarded``."""
    scratch: int = 0
    """Bytes of workspace in addition to the results while the kernel runs; negative if it frees its operands on the
    way."""
    overwrites: tuple[int, ...] = ()
    """Bases among its reads that its first result can overwrite with the same bits (levers.in_place): memory of the
    same size and layout."""
    seconds: float = 0.0
    random: bool = False
    """Whether it draws random numbers: such ops are never recomputed."""
    must_run_once: bool = False
    """Whether it must not be recomputed for another reason: it has a side effect, or is not deterministic."""
    layer: str = ""
    where: str | None = None
    """``file:line`` of the user's code; for a backward op, that of its forward op."""
    gradient_of: int | None = None
    """Index of the forward op whose derivative a backward op computes; None if unknown, and for forward ops."""
    in_place_scratch: int | None = None
    """``scratch`` if its first result overwrites an operand piece by piece; None: the same as ``scratch``."""
    requests: tuple[int, ...] = ()
    """The requests whose peak is ``scratch``, in order: a number above 0 of bytes, or below 0 to free the memory of the
    request with that number, from 1; (): a single request."""
    requests_before_results: int = 0
    """How many of ``requests``, from the first on, are made before the results are allocated."""
    held_values: tuple[int, ...] = ()
    """Ids of values that it reads through a reference of its own, not its arguments: they are neither recomputed nor
    encoded."""
    call: int | None = None
    """Number of the call of a torch function in the trace that it is part of; None if unknown, and for passes' own."""
    cheaper_recompute: GraphOp | None = None
    """A cheaper op that recomputes its first result, bit for bit, from values that are saved anyway. If set, only that
    result is recomputed, and by this op. It has the same index."""

    @property
    def recompute_op(self) -> GraphOp:
        """The op that recomputes its results: ``cheaper_recompute``, or itself."""
        return self if self.cheaper_recompute is None else self.cheaper_recompute

    @property
    def scratch_saved(self) -> int:
        """Bytes of scratch that it saves if its first result overwrites an operand; can be negative."""
        return 0 if self.in_place_scratch is None else self.scratch - self.in_place_scratch

    @property
    def is_view(self) -> bool:
        """Whether all its results are views: it costs nothing and is not scheduled.

        An op with a side effect and no result (a check of a matrix) is no view.
        """
        return not self.makes and not self.discarded and not self.must_run_once


@dataclass(frozen=True, slots=True)
class SavedForm:
    """A form in which a lever saves a forward value for the backward pass, in place of the value itself.

    It is *stored* in the forward pass, after the last op that reads the value, and the value is *fetched* from it in
    the backward pass, before the first op that needs it. Both are actions of the schedule. With ``copy_seconds`` they
    are asynchronous copies to and from host memory."""

    lever: str
    """Name of the lever (see `memplan.planning.levers.registry`)."""
    value: int
    """Id of the forward value."""
    encoded: int
    """Id of the saved form, a value of kind ``encoded`` or ``host``: its bytes are live between the passes."""
    codec: str = ""
    """Further data of the lever: the name of a codec."""
    store_seconds: float = 0.0
    fetch_seconds: float = 0.0
    store_scratch: int = 0
    fetch_scratch: int = 0
    """Bytes of workspace of each action, in addition to the values it reads and makes."""
    can_restore_value: bool = True
    """Whether the value can be fetched from it. If not, it only serves its ``direct_readers`` readers."""
    direct_readers: tuple[int, ...] = ()
    """Backward ops that read the form itself in place of the value, as a ReLU's gradient reads its mask of bits."""
    direct_reader_scratch: int = 0
    """Scratch bytes of each of these ops when it reads the form."""
    direct_reader_requests: tuple[int, ...] = ()
    """The requests that this scratch consists of, as `GraphOp.requests`, if they are known."""
    direct_reader_extra_seconds: float = 0.0
    """Seconds that all ``direct_readers`` readers together take longer than with the value itself."""
    fetch_operands: tuple[int, ...] = ()
    """Other values (bases) that the fetch reads: they exist before the value. If there are any, the value is the only
    result of its op, and is fetched where that op would be recomputed."""
    copy_seconds: float | None = None
    """Seconds of an asynchronous copy in either direction; None: the form is not copied."""

    @property
    def is_copied(self) -> bool:
        """Whether asynchronous copies store and fetch it."""
        return self.copy_seconds is not None

    @property
    def use_seconds(self) -> float:
        """Seconds that storing the form and reading it directly add, without fetches."""
        return self.store_seconds + self.direct_reader_extra_seconds


def peak_of(requests: Sequence[int]) -> int:
    """Return the most bytes of `GraphOp.requests` that are live at once."""
    sizes = [request for request in requests if request > 0]
    changes = (request if request > 0 else -sizes[-request - 1] for request in requests)  # -1 frees the first
    return max(accumulate(changes, initial=0))


@dataclass(frozen=True)
class JointGraph:
    """The forward and backward pass of a step as a graph."""

    values: tuple[Value, ...]
    ops: tuple[GraphOp, ...]
    outputs: tuple[int, ...]
    """Values that the forward pass returns, in order."""
    gradients: tuple[tuple[int, int], ...]
    """(parameter or input, its gradient)."""
    mutations: tuple[tuple[int, int], ...] = ()
    """(resident value, the new value that is written into it): mostly buffers."""
    forms: tuple[SavedForm, ...] = ()
    """Forms in which values may be saved, by lever in the order of the registry."""
    torch: str = ""
    order: tuple[int, ...] = ()
    """Indices of ``backward_ops`` in the order in which they run; empty: as captured."""

    @cached_property
    def forward_ops(self) -> tuple[GraphOp, ...]:
        """Ops of the forward pass in order, without views."""
        return tuple(op for op in self.ops if op.phase == "forward" and not op.is_view)

    @cached_property
    def backward_ops(self) -> tuple[GraphOp, ...]:
        """Ops of the backward pass in the order in which they run, without views."""
        if self.order:
            return tuple(self.ops[index] for index in self.order)
        return tuple(op for op in self.ops if op.phase == "backward" and not op.is_view)

    def in_order(self, order: tuple[int, ...]) -> JointGraph:
        """Return the graph with its backward ops in this order (see ``order``)."""
        return self if order == self.order else replace(self, order=order)

    @cached_property
    def maker(self) -> dict[int, GraphOp]:
        """By value that owns memory: the op that makes it."""
        return {value: op for op in self.ops for value in op.makes}

    @cached_property
    def form_by_encoded(self) -> dict[int, SavedForm]:
        """Saved forms by ``SavedForm.encoded``."""
        return {form.encoded: form for form in self.forms}

    @cached_property
    def ranked_forms(self) -> tuple[SavedForm, ...]:
        """Saved forms by rank: if several whole forms are chosen for a value, the first is used. Copies come last."""
        levers = list(dict.fromkeys(form.lever for form in self.forms))  # in the order of the registry
        return tuple(sorted(self.forms, key=lambda form: (form.is_copied, levers.index(form.lever), form.value)))

    def forms_by(self, lever: str) -> tuple[SavedForm, ...]:
        """Return the saved forms of ``lever``."""
        return tuple(form for form in self.forms if form.lever == lever)

    @cached_property
    def irreplaceable(self) -> frozenset[int]:
        """Bases of the values in ``GraphOp.held_values``."""
        return frozenset(self.base(value) for op in self.ops for value in op.held_values)

    @cached_property
    def is_on_card(self) -> bool:
        """Whether the step runs on a CUDA card, so that values in host memory take no bytes on the device."""
        return any(value.place != HOST for value in self.values)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of ops, shapes, dtypes and connections; without costs, source lines and forms in host memory."""
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

    def call_of(self, op: GraphOp) -> int | None:
        """Return the number of the call of a torch function that a forward op is part of, or that a backward op is part
        of the derivative of; None if unknown."""
        if op.phase == "forward":
            return op.call
        return None if op.gradient_of is None else self.ops[op.gradient_of].call

    def base(self, value: int) -> int:
        """Return the id of the value that owns the memory of ``value``."""
        return self.values[value].base

    def layer_of(self, op: GraphOp) -> str:
        """Return the layer of an op; of a backward op, that of the forward op whose derivative it computes."""
        return op.layer or ("" if op.gradient_of is None else self.ops[op.gradient_of].layer)


def refs(arguments: Any) -> Iterator[int]:
    """Yield the values in an op's arguments, in order, at any depth."""
    if isinstance(arguments, Ref):
        yield arguments.value
    elif isinstance(arguments, (tuple, list)):
        for part in arguments:
            yield from refs(part)
    elif isinstance(arguments, dict):
        for part in arguments.values():
            yield from refs(part)


def map_refs(arguments: Any, change: Callable[[int], Any]) -> Any:
    """Return the arguments with every Ref replaced by ``change(its value)``."""
    if isinstance(arguments, Ref):
        return change(arguments.value)
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(map_refs(part, change) for part in arguments)
    if isinstance(arguments, dict):
        return {name: map_refs(part, change) for name, part in arguments.items()}
    return arguments


def recomputable_values(graph: JointGraph) -> frozenset[int]:
    """Return the forward values that may be recomputed: results of deterministic ops without side effects, except
    outputs and values in ``GraphOp.held_values``."""
    fixed = output_bases(graph) | graph.irreplaceable
    recompute_ops = (op.recompute_op for op in graph.forward_ops if not (op.random or op.must_run_once))
    return frozenset(value for op in recompute_ops for value in op.makes if value not in fixed)


def output_bases(graph: JointGraph) -> set[int]:
    """Return the ids of the values whose memory the forward pass returns."""
    return {graph.base(value) for value in graph.outputs}
