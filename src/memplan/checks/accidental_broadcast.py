"""Check: two tensors of equal size that broadcast against each other, such as predictions (N, 1) and targets (N)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

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
    """Return at most one finding, about all lines of user code that broadcast as many elements, as (N, 1) and (N)."""
    trace = subject.trace
    by_line: dict[str | None, _Broadcast] = {}
    for form in trace.forms:
        for broadcast in _broadcasts(trace, trace.ops[form.op], form):
            by_line.setdefault(broadcast.op.where, broadcast)
    if not by_line:
        return []
    mended = subject.recorder.record(around=_equal_shapes()) if subject.recorder is not None else None
    size = max(0, peak_of(trace) - peak_of(mended)) if isinstance(mended, Trace) else 0
    return [_finding(list(by_line.values()), size)]


class _Broadcast(NamedTuple):
    """An op that broadcasts an operand with an extra dimension of size 1 (``longer``) and an operand without it."""

    op: Op
    longer: _Shape
    shorter: _Shape
    result: _Shape


def _broadcasts(trace: Trace, op: Op, form: Form) -> Iterator[_Broadcast]:
    """Yield the op if it broadcasts shapes such as (N, 1) and (N,); ``form`` has its recorded arguments."""
    if base_name(op.name) not in _BINARY_OPS or len(form.reads) < 2 or not op.needs_grad:
        return
    views = [view for _, view in form.reads[:2]]
    causes = {trace.storages[view.storage].cause for view in views}
    if causes & set(_STATE) or views[0].storage == views[1].storage:
        return
    first, second = (_shape_before_expand(view) for view in views)
    for longer, shorter, view in ((first, second, views[0]), (second, first, views[1])):
        # a dimension that unsqueeze added is on purpose: the storage has another shape then
        if broadcasts_by_mistake(longer, shorter) and trace.storages[view.storage].shape == longer:
            yield _Broadcast(op, longer, shorter, tuple(torch.broadcast_shapes(longer, shorter)))


def _shape_before_expand(view: View) -> _Shape:
    """Return the shape of an operand before it was expanded to the shape of the result. Expanded dimensions have a
    stride of 0. At the front they are dropped, since expand added them; elsewhere their size was 1."""
    expanded = [stride == 0 and size > 1 for size, stride in zip(view.shape, view.strides, strict=True)]
    first = expanded.index(False) if False in expanded else 0
    return tuple(1 if is_expanded else size for size, is_expanded in zip(view.shape, expanded, strict=True))[first:]


def broadcasts_by_mistake(longer: _Shape, shorter: _Shape) -> bool:
    """Return whether ``shorter`` is ``longer`` without a dimension of size 1, and the two broadcast to a larger shape.

    Example:
        >>> broadcasts_by_mistake((8, 1), (8,)), broadcasts_by_mistake((1, 8), (8,))
        (True, False)
    """
    squeezed = [(*longer[:dim], *longer[dim + 1 :]) for dim, size in enumerate(longer) if size == 1]
    if shorter not in squeezed:
        return False
    try:
        result = torch.broadcast_shapes(longer, shorter)
    except RuntimeError:
        return False
    return math.prod(result) > math.prod(longer)


def _equal_shapes() -> AbstractContextManager[None]:
    """Return a context in which operands of shapes such as (8, 1) and (8,) are both reshaped to (8,)."""

    def reshape_to_shorter(operands: list[Any]) -> list[Any]:
        """Return the two operands of an op, reshaped if both are tensors that would broadcast by mistake."""
        if len(operands) != 2 or not all(isinstance(operand, torch.Tensor) for operand in operands):
            return operands
        x, y = operands
        if broadcasts_by_mistake(tuple(x.shape), tuple(y.shape)):
            return [x.reshape(y.shape), y]
        if broadcasts_by_mistake(tuple(y.shape), tuple(x.shape)):
            return [x, y.reshape(x.shape)]
        return operands

    def binary_kernel(op: Any) -> Callable[..., Any]:
        return lambda x, y, **kwargs: dispatch.whole(op, *reshape_to_shorter([x, y]), **kwargs)

    def broadcast_tensors(tensors: list[torch.Tensor]) -> Any:
        return dispatch.composite(_ATEN.broadcast_tensors.default, reshape_to_shorter(tensors))

    kernels = {f"{name}.Tensor": binary_kernel(getattr(_ATEN, name).Tensor) for name in ("add", "sub", "mul", "div")}
    return dispatch.overridden({**kernels, "broadcast_tensors": broadcast_tensors}, dispatch.AUTOGRAD_CPU)


def _finding(broadcasts: list[_Broadcast], size: int) -> Finding:
    """Return the finding about all these broadcasts, which together add ``size`` bytes to the peak. Its message shows
    the shapes of the first."""
    op, longer, shorter, result = broadcasts[0]
    rows = [
        {"layer": op.layer, "where": op.where, "shapes": [list(shape) for shape in shapes]}
        for op, *shapes in broadcasts
    ]
    costs = f", which takes {format_bytes(size)} more at the peak" if size else ""
    message = (
        f"{base_name(op.name)} broadcasts {longer} and {shorter} to {result}: each with each, where one with one is "
        f"meant{costs}"
    )
    advice = (f"Give both one shape: squeeze the {longer} one, or unsqueeze the other",)
    details = {"shapes": rows[0]["shapes"], "layers": rows}
    return Finding(ID, "warning", op.layer, op.where, size, message, advice, details)
