"""Roofline estimate of a recorded step's time: per op, max(FLOPs / rate, bytes / bandwidth) + call overhead.

The rates are those of `memplan.planning.graph.roofline`; FLOPs of products, convolutions and attention are counted by
torch's formulas, those of other ops ignored. No kernel reaches these rates: the seconds only serve to compare steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.devices import find
from memplan.errors import DeviceError
from memplan.planning.graph.roofline import CPU, Rates, Work, rates_of
from memplan.trace.records import HOST, Form, Op, View
from memplan.trace.trace import Trace

_ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward: five matrix products after two."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_NAMESPACES = ("aten", "prims", "fsdp", "c10d", "_c10d_functional")
"""Of torch's own ops. Of a collective one only the bytes that it reads and writes count, not the time on a link."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimates for the first step of a trace."""

    seconds: float
    flops: int
    bytes: int


def rates_for(device: str) -> tuple[Rates, str] | None:
    """Return the rates of a device, and their title for reports; None if unknown."""
    if device == HOST:
        return CPU, "roofline of two CPU cores"
    try:
        card = find(device)
    except DeviceError:
        return None
    return (rates_of(card), f"roofline of {card.name}") if card.bandwidth and card.rates else None


def step_time(trace: Trace, rates: Rates) -> StepTime | None:
    """Estimate seconds, FLOPs and bytes of the first step; None if the trace has no call signatures (`Trace.forms`)."""
    if not trace.forms:
        return None
    works = list(_works(trace))
    seconds = sum(rates.seconds(work) for work in works)
    return StepTime(seconds, sum(work.flops for work in works), sum(work.bytes for work in works))


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of c10d's collective operations in the first step; a ring of r ranks sends (r - 1) / r of them."""

    sharded: int
    """Gathered from shards, and reduced to shards: `fully_shard`."""
    reduced: int
    """Twice what is reduced to all: `DistributedDataParallel`, and copies of shards."""


def sent_bytes(trace: Trace) -> Sent:
    """Return the bytes that ranks exchange by c10d's operations to share weights and gradients, in the first step.

    Those of `DTensor` are counted by `exchanged_bytes`.
    """
    sharded = reduced = 0
    for op in trace.ops:
        namespace, _, name = op.name.partition(".")
        if op.step != 0 or op.phase == "build" or namespace != "c10d":
            continue
        size = _largest_operand(trace, op)
        if "gather" in name or "reduce_scatter" in name:
            sharded += size
        elif name.startswith("allreduce"):
            reduced += 2 * size
    return Sent(sharded, reduced)


def exchanged_bytes(trace: Trace) -> int:
    """Return the bytes of `DTensor`'s collective operations in the first step: what each gathers or reduces to shards,
    twice what it reduces to all. A ring of r ranks sends (r - 1) / r of them."""
    total = 0
    for op in trace.ops:
        namespace, _, name = op.name.partition(".")
        if op.step != 0 or op.phase == "build" or namespace != "_c10d_functional" or name.startswith("wait_tensor"):
            continue
        total += _largest_operand(trace, op) * (2 if name.startswith("all_reduce") else 1)
    return total


def _largest_operand(trace: Trace, op: Op) -> int:
    """Return the bytes of the largest storage that an op reads or writes: the whole of what ranks share."""
    storages = {*(read.storage for read in op.reads), *op.writes}
    return max((trace.storages[number].bytes for number in storages), default=0)


def _works(trace: Trace) -> Iterator[Work]:
    """Yield the work of each kernel of the first step: its FLOPs, the bytes that it moves and the dtype of its rate."""
    forms = {form.op: form for form in trace.forms}
    flops: dict[int, int] = {}
    forward_flops: dict[tuple[str, str], int] = {}
    for op in trace.ops:
        if op.step != 0 or op.phase == "build" or _runs_no_kernel(op):
            continue
        form = forms.get(op.index)
        if form is not None:
            flops[op.index] = forward_flops[op.name, op.layer] = _forward_flops(op, form)
        elif op.recomputed:  # as many as the op of this name and layer in the forward pass
            flops[op.index] = forward_flops.get((op.name, op.layer), 0)
        elif op.gradient_of is not None:
            flops[op.index] = _backward_flops(op, trace.ops[op.gradient_of], flops)
        is_foreign = op.name.partition(".")[0] not in _NAMESPACES
        source = None if op.gradient_of is None else forms.get(op.gradient_of)
        bytes_moved = _bytes_moved(trace, op, form, source)
        yield Work(flops.get(op.index, 0), bytes_moved, _rate_dtype(trace, op), is_foreign)


def _runs_no_kernel(op: Op) -> bool:
    """Return whether an op runs no kernel: its result is not initialized, or it makes views and writes nothing."""
    _, _, name = op.name.partition(".")
    if name.partition(".")[0] in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
        return True
    torch_op = _torch_op(op.name)
    mutable = torch_op is not None and _torch.is_mutable(torch_op)
    return not mutable and set(op.writes) <= {read.storage for read in op.reads}


def _torch_op(name: str) -> Any:
    """Return torch's op of this name; None if there is none here."""
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part, None)
    return op if _torch.is_op(op) else None


def _forward_flops(op: Op, form: Form) -> int:
    """Return the FLOPs of a forward op by torch's formula; 0 if there is none."""
    formula, torch_op = _torch.flop_formula(op.name), _torch_op(op.name)
    if formula is None or torch_op is None:
        return 0
    try:
        return _flops_of_formula(formula, torch_op, form)
    except Exception:  # torch's formulas check nothing, and the form in a file need not be one of that op
        return 0


def _flops_of_formula(formula: Callable[..., Any], torch_op: Any, form: Form) -> int:
    """Return the FLOPs of a recorded call by torch's formula, on meta tensors of the call's shapes."""
    tensors: dict[str, list[Any]] = {}
    for name, view in form.reads:
        tensors.setdefault(name, []).append(torch.empty(view.shape, device="meta"))
    args: list[Any] = []
    for argument in _torch.arguments(torch_op):
        if argument.kwarg_only:
            break
        inputs = tensors.get(argument.name)
        args.append(inputs[0] if inputs else form.option(argument.name, argument.default_value))
    outputs = [torch.empty(view.shape, device="meta") for view in form.writes]
    return int(formula(*args, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))


def _backward_flops(op: Op, source: Op, flops: dict[int, int]) -> int:
    """Return the FLOPs of a backward op, from those of its forward op ``source``. ``flops``: by index of the op."""
    forward, base = flops.get(source.index, 0), op.name.split(".")[1]
    if base in _PRODUCTS:
        return forward  # a product of the same three sizes in another order
    if base == "convolution_backward":  # a convolution for each gradient
        return forward * len({"input", "weight"}.intersection(source.needs_grad))
    return int(forward * _ATTENTION_BACKWARD) if "attention" in base else 0


def _bytes_moved(trace: Trace, op: Op, form: Form | None, source: Form | None) -> int:
    """Return the bytes that an op reads and writes; of views, only the elements that they cover.

    Args:
        form: shapes of the op's operands and results; None if they were not recorded.
        source: those of the forward op whose gradient ``op`` computes: what both read, they read in the same views.
    """
    if form is not None:
        reads = {view.storage: view for _, view in form.reads}
        return sum(_view_bytes(trace, view) for view in (*reads.values(), *form.writes))
    storages = [*{read.storage for read in op.reads}, *dict.fromkeys(op.writes)]
    sizes = {number: trace.storages[number].bytes for number in storages}
    if source is not None:
        sizes |= {view.storage: _view_bytes(trace, view) for _, view in source.reads if view.storage in sizes}
    if op.name.startswith("aten.copy_."):  # into a part of a bucket, or from one
        return 2 * min(sizes.values(), default=0)
    return sum(sizes[number] for number in storages)


def _view_bytes(trace: Trace, view: View) -> int:
    """Return the bytes of a view's distinct elements; those of expanded dimensions count once."""
    # expanded dimensions have stride 0; one of size 0 makes the view empty
    elements = math.prod(size for size, stride in zip(view.shape, view.strides, strict=True) if stride or not size)
    if view.storage < 0:  # measured, and not joined to an allocation
        return elements * torch.float32.itemsize
    storage = trace.storages[view.storage]
    dtype = getattr(torch, storage.dtype, None)
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize
    return min(elements * itemsize, storage.bytes)


def _rate_dtype(trace: Trace, op: Op) -> str:
    """Return the dtype whose FLOP/s apply: float32 convolutions run as TF32, torch's default on cards that have it."""
    storages = [read.storage for read in op.reads if read.name != "bias"] or list(op.writes)
    dtype = trace.storages[storages[0]].dtype if storages else "float32"
    return "tf32" if dtype == "float32" and "conv" in op.name else dtype or "float32"
