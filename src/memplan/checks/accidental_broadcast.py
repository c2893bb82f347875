"""Two tensors of one size that broadcast against each other, as predictions (N, 1) and targets (N) do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from memplan._bytes import format_bytes
from memplan._torch import dispatch
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import peak_of
from memplan.checks.op_names import base_name
from memplan.trace.records import Form, Op, View
from memplan.trace.trace import Trace

ID = "accidental-broadcast"
TITLE = "Tensors of one size are broadcast against each other"

_PAIRS = ("add", "sub", "mul", "div", "mse_loss", "smooth_l1_loss", "huber_loss")
_DATA = ("weight", "buffer", "optimizer_state")
_ATEN = torch.ops.aten
_Shape = tuple[int, ...]


def find(subject: Subject) -> list[Finding]:
    """Return one finding for all lines at which it happens."""
    trace = subject.trace
    found: dict[str | None, tuple[Op, _Shape, _Shape, _Shape]] = {}
    for form in trace.forms:
        op = trace.ops[form.op]
        for one, other, result in _broadcast(trace, op, form):
            found.setdefault(op.where, (op, one, other, result))
    if not found:
        return []
    mended = subject.remaker.record(around=_squeezed()) if subject.remaker is not None else None
    size = max(0, peak_of(trace) - peak_of(mended)) if isinstance(mended, Trace) else 0
    return [_finding(list(found.values()), size)]


def _broadcast(trace: Trace, op: Op, form: Form) -> Iterator[tuple[_Shape, _Shape, _Shape]]:
    """Yield the shapes of two operands and of what they give, where one has a size 1 that the other lacks."""
    if base_name(op.name) not in _PAIRS or len(form.reads) < 2 or not op.needs_grad:
        return
    views = [view for _, view in form.reads[:2]]
    causes = {trace.storages[view.storage].cause for view in views}
    if causes & set(_DATA) or views[0].storage == views[1].storage:
        return
    shapes = [_own_shape(view) for view in views]
    for one, other, view in ((*shapes, views[0]), (*shapes[::-1], views[1])):
        if lacks_one(one, other) and trace.storages[view.storage].shape == one:  # it was made so, not by unsqueeze
            yield one, other, tuple(torch.broadcast_shapes(one, other))


def _own_shape(view: View) -> _Shape:
    """Return the shape before broadcasting, which makes strides of 0."""
    sizes = [1 if stride == 0 and size > 1 else size for size, stride in zip(view.shape, view.strides, strict=True)]
    added = next((at for at, (size, whole) in enumerate(zip(sizes, view.shape, strict=True)) if size == whole), 0)
    return tuple(sizes[added:])


def lacks_one(one: _Shape, other: _Shape) -> bool:
    """Return whether a shape is another one without a size 1 in it, so that the two broadcast to a larger one."""
    if len(one) != len(other) + 1 or math.prod(one) != math.prod(other) or math.prod(one) == 1:
        return False
    if not any(size == 1 and (*one[:at], *one[at + 1 :]) == other for at, size in enumerate(one)):
        return False
    try:
        result = torch.broadcast_shapes(one, other)
    except RuntimeError:
        return False
    return math.prod(result) > math.prod(one)


def _squeezed() -> Any:
    """Return a context in which such pairs are brought to one shape first."""

    def matched(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        one, other = tensors
        if lacks_one(tuple(one.shape), tuple(other.shape)):
            return [one.reshape(other.shape), other]
        return [one, other.reshape(one.shape)] if lacks_one(tuple(other.shape), tuple(one.shape)) else tensors

    def of_two(op: Any) -> Any:
        return lambda one, other, **more: dispatch.whole(
            op, *(matched([one, other]) if isinstance(other, torch.Tensor) else (one, other)), **more
        )

    def broadcast(tensors: list[torch.Tensor]) -> Any:
        together = matched(tensors) if len(tensors) == 2 else tensors
        return dispatch.composite(_ATEN.broadcast_tensors.default, together)

    kernels = {f"{name}.Tensor": of_two(getattr(_ATEN, name).Tensor) for name in ("add", "sub", "mul", "div")}
    return dispatch.overridden({**kernels, "broadcast_tensors": broadcast}, dispatch.AUTOGRAD_CPU)


def _finding(found: list[tuple[Op, _Shape, _Shape, _Shape]], size: int) -> Finding:
    op, one, other, result = found[0]
    rows = [
        {"layer": op.layer, "where": op.where, "shapes": [list(shape) for shape in shapes]} for op, *shapes in found
    ]
    name = base_name(op.name)
    costs = f", which takes {format_bytes(size)} more at the peak" if size else ""
    message = (
        f"{name} broadcasts {_shown(one)} and {_shown(other)} to {_shown(result)}: each with each, where one with "
        f"one is meant{costs}"
    )
    advice = (f"Give both one shape: squeeze the {_shown(one)} one, or unsqueeze the other",)
    return Finding(
        ID, "warning", op.layer, op.where, size, message, advice, {"shapes": rows[0]["shapes"], "layers": rows}
    )


def _shown(shape: _Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
