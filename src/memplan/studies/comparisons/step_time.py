"""How long a recorded step takes by its work alone: for each op max(FLOPs / rate, bytes / bandwidth) + a call.

The rates are those of `memplan.planning.graph.roofline`, FLOPs by torch's own formulas. No kernel reaches either rate:
what the seconds are good for is to hold two steps against each other. Of ops that are neither products, convolutions
nor attention only the bytes count.
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

_HALVES = {"convolution": 1.0, "attention": 2.5}
"""FLOPs of an op's whole derivative over those of the op: a convolution's for each gradient, attention's for all three
(five products after two)."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_NAMESPACES = ("aten", "prims")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of the first step of a trace."""

    seconds: float
    flops: int
    bytes: int


def rates_for(device: str) -> tuple[Rates, str] | None:
    """Return the rates of the device of a trace, and what to call them; None where they are not known."""
    if device == HOST:
        return CPU, "roofline of two CPU cores"
    try:
        card = find(device)
    except DeviceError:
        return None
    return (rates_of(card), f"roofline of {card.name}") if card.bandwidth and card.rates else None


def step_time(trace: Trace, rates: Rates) -> StepTime | None:
    """Estimate seconds, FLOPs and bytes of the first step; None where a trace does not say how its ops were called."""
    if not trace.forms:
        return None
    works = list(_works(trace))
    seconds = sum(rates.seconds(work) for work in works)
    return StepTime(seconds, sum(work.flops for work in works), sum(work.bytes for work in works))


def _works(trace: Trace) -> Iterator[Work]:
    forms = {form.op: form for form in trace.forms}
    flops: dict[int, int] = {}
    known: dict[tuple[str, str], int] = {}
    for op in trace.ops:
        if op.step != 0 or op.phase == "build" or _is_view(op):
            continue
        form = forms.get(op.index)
        if form is not None:
            flops[op.index] = known[op.name, op.layer] = _forward_flops(trace, op, form)
        elif op.recomputed:
            flops[op.index] = known.get((op.name, op.layer), 0)
        elif op.gradient_of is not None:
            flops[op.index] = _backward_flops(op, trace.ops[op.gradient_of], flops)
        yield Work(flops.get(op.index, 0), _moved(trace, op, form), _rate(trace, op), _is_foreign(op))


def _is_view(op: Op) -> bool:
    """Return whether it runs no kernel: all that it gives lies where it read."""
    found = _op(op.name)
    mutable = found is not None and _torch.is_mutable(found)
    return not mutable and set(op.writes) <= {read.storage for read in op.reads}


def _op(name: str) -> Any:
    """Return torch's op of a name such as ``aten.mm.default``; None where it has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if _torch.is_op(found) else None


def _is_foreign(op: Op) -> bool:
    return op.name.partition(".")[0] not in _NAMESPACES


def _forward_flops(trace: Trace, op: Op, form: Form) -> int:
    formula, found = _torch.flop_formula(op.name), _op(op.name)
    if formula is None or found is None:
        return 0
    try:
        return _by_formula(formula, found, form)
    except Exception:  # torch's formulas check nothing, and the form in a file need not be one of that op
        return 0


def _by_formula(formula: Callable[..., Any], found: Any, form: Form) -> int:
    tensors: dict[str, list[Any]] = {}
    for name, view in form.reads:
        tensors.setdefault(name, []).append(_shaped(view))
    args: list[Any] = []
    for argument in _torch.arguments(found):
        if argument.kwarg_only:
            break
        given = tensors.get(argument.name)
        args.append(given[0] if given else form.option(argument.name, argument.default_value))
    made = [_shaped(view) for view in form.writes]
    return int(formula(*args, out_val=made[0] if len(made) == 1 else tuple(made)))


def _backward_flops(op: Op, source: Op, flops: dict[int, int]) -> int:
    """Return the FLOPs of an op of a derivative formula, from those of the op that it derives."""
    forward, base = flops.get(source.index, 0), op.name.split(".")[1]
    if base in _PRODUCTS:
        return forward  # a product of the same three sizes in another order
    if base == "convolution_backward":
        return forward * len({"input", "weight"}.intersection(source.needs_grad))
    return int(forward * _HALVES["attention"]) if "attention" in base else 0


def _moved(trace: Trace, op: Op, form: Form | None) -> int:
    """Return bytes of what it reads and writes; of a view, the part that it looks at."""
    if form is None:
        storages = [*{read.storage for read in op.reads}, *dict.fromkeys(op.writes)]
        return sum(trace.storages[number].bytes for number in storages)
    reads = {view.storage: view for _, view in form.reads}
    return sum(_bytes(trace, view) for view in (*reads.values(), *form.writes))


def _bytes(trace: Trace, view: View) -> int:
    elements = math.prod(size for size, stride in zip(view.shape, view.strides, strict=True) if stride or not size)
    if view.storage < 0:  # measured, and not joined to an allocation
        return elements * torch.float32.itemsize
    storage = trace.storages[view.storage]
    return min(elements * _itemsize(storage.dtype), storage.bytes)


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    return found.itemsize if isinstance(found, torch.dtype) else torch.float32.itemsize


def _rate(trace: Trace, op: Op) -> str:
    """Return the dtype whose FLOP/s count: a float32 convolution runs as TF32 where a card has it, as torch does by
    default."""
    storages = [read.storage for read in op.reads if read.name != "bias"] or list(op.writes)
    found = trace.storages[storages[0]].dtype if storages else "float32"
    return "tf32" if found == "float32" and "conv" in op.name else found or "float32"


def _shaped(view: View) -> torch.Tensor:
    """Return a tensor without memory, for the formulas to look at."""
    return torch.empty(view.shape, device="meta")
