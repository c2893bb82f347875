"""Check: two tensors of equal size that broadcast against each other, such as predictions (N, 1) and targets (N)."""

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

_BINARY_OPS = ("add", "sub", "mul", "div", "mse_loss", "smooth_l1_loss", "huber_loss")
_STATE = ("weight", "buffer", "optimizer_state")
_ATEN = torch.ops.aten
_Shape = tuple[int, ...]


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about all lines of user code that broadcast tensors of the same size, as (N, 1) and
    (N)."""
    trace = subject.trace
    by_line: dict[str | None, tuple[Op, _Shape, _Shape, _Shape]] = {}
    for form in trace.forms:
        op = trace.ops[form.op]
        for longer, shorter, result in _broadcasts(trace, op, form):
            by_line.setdefault(op.where, (op, longer, shorter, result))
    if not by_line:
        return []
    mended = subject.remaker.record(around=_equal_shapes()) if subject.remaker is not None else None
    size = max(0, peak_of(trace) - peak_of(mended)) if isinstance(mended, Trace) else 0
    return [_finding(list(by_line.values()), size)]


def _broadcasts(trace: Trace, op: Op, form: Form) -> Iterator[tuple[_Shape, _Shape, _Shape]]:
    """Yield the shapes of the operand with an extra dimension of size 1, of the operand without it, and of the
    result."""
    if base_name(op.name) not in _BINARY_OPS or len(form.reads) < 2 or not op.needs_grad:
        return
    views = [view for _, view in form.reads[:2]]
    causes = {trace.storages[view.storage].cause for view in views}
    if causes & set(_STATE) or views[0].storage == views[1].storage:
        return
    first, second = (_shape_before_expand(view) for view in views)
    for longer, shorter, view in ((first, second, views[0]), (second, first, views[1])):
        # a dimension that unsqueeze added is on purpose: the storage has another shape then
        if lacks_one(longer, shorter) and trace.storages[view.storage].shape == longer:
            yield longer, shorter, tuple(torch.broadcast_shapes(longer, shorter))


def _shape_before_expand(view: View) -> _Shape:
    """Return the shape before broadcasting, which shows as strides of 0."""
    sizes = [1 if stride == 0 and size > 1 else size for size, stride in zip(view.shape, view.strides, strict=True)]
    # leading dimensions that are broadcast were added by expand
    added = next((dim for dim, (size, whole) in enumerate(zip(sizes, view.shape, strict=True)) if size == whole), 0)
    return tuple(sizes[added:])


def lacks_one(longer: _Shape, shorter: _Shape) -> bool:
    """Return whether ``shorter`` is ``longer`` without a dimension of size 1, and the two broadcast to a larger shape.

    Example:
        >>> lacks_one((8, 1), (8,)), lacks_one((1, 8), (8,))
        (True, False)
    """
    if len(longer) != len(shorter) + 1 or math.prod(longer) != math.prod(shorter) or math.prod(longer) == 1:
        return False
    if not any(size == 1 and (*longer[:dim], *longer[dim + 1 :]) == shorter for dim, size in enumerate(longer)):
        return False
    try:
        result = torch.broadcast_shapes(longer, shorter)
    except RuntimeError:
        return False
    return math.prod(result) > math.prod(longer)


def _equal_shapes() -> Any:
    """Return a context in which the operands of such a broadcast are reshaped to the same shape first."""

    def reshape_to_shorter(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return two tensors of shapes such as (8, 1) and (8,) both as (8,); others unchanged."""
        x, y = tensors
        if lacks_one(tuple(x.shape), tuple(y.shape)):
            return [x.reshape(y.shape), y]
        return [x, y.reshape(x.shape)] if lacks_one(tuple(y.shape), tuple(x.shape)) else tensors

    def binary_kernel(op: Any) -> Any:
        return lambda x, y, **kwargs: dispatch.whole(
            op, *(reshape_to_shorter([x, y]) if isinstance(y, torch.Tensor) else (x, y)), **kwargs
        )

    def broadcast_tensors(tensors: list[torch.Tensor]) -> Any:
        reshaped = reshape_to_shorter(tensors) if len(tensors) == 2 else tensors
        return dispatch.composite(_ATEN.broadcast_tensors.default, reshaped)

    kernels = {f"{name}.Tensor": binary_kernel(getattr(_ATEN, name).Tensor) for name in ("add", "sub", "mul", "div")}
    return dispatch.overridden({**kernels, "broadcast_tensors": broadcast_tensors}, dispatch.AUTOGRAD_CPU)


def _finding(broadcasts: list[tuple[Op, _Shape, _Shape, _Shape]], size: int) -> Finding:
    """Return the finding about all these broadcasts; the message has the shapes of the first, ``size`` is their
    cost."""
    op, longer, shorter, result = broadcasts[0]
    rows = [
        {"layer": op.layer, "where": op.where, "shapes": [list(shape) for shape in shapes]}
        for op, *shapes in broadcasts
    ]
    costs = f", which takes {format_bytes(size)} more at the peak" if size else ""
    message = (
        f"{base_name(op.name)} broadcasts {_shown(longer)} and {_shown(shorter)} to {_shown(result)}: each with each, "
        f"where one with one is meant{costs}"
    )
    advice = (f"Give both one shape: squeeze the {_shown(longer)} one, or unsqueeze the other",)
    details = {"shapes": rows[0]["shapes"], "layers": rows}
    return Finding(ID, "warning", op.layer, op.where, size, message, advice, details)


def _shown(shape: _Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
