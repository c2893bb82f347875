"""Expanded tensors that a cast makes real: every copy of what was one in memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplan._bytes import format_bytes
from memplan._torch import dispatch
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, peak_of, rows_of
from memplan.trace.records import Op, View
from memplan.trace.trace import Trace

ID = "expanded-cast"
TITLE = "A cast makes every copy of an expanded tensor real"

_CAST = "aten._to_copy.default"
_ATEN = torch.ops.aten
_TO_COPY = _ATEN._to_copy.default


def find(subject: Subject) -> list[Finding]:
    """Return one finding for all such casts of a step."""
    trace, remaker = subject.trace, subject.remaker
    casts = [op for form in trace.forms if (op := trace.ops[form.op]).name == _CAST
             and form.reads and _repeats(form.reads[0][1]) > 1 and _is_made(trace, op)]  # fmt: skip
    made = [trace.storages[op.writes[0]] for op in casts]
    if not made or remaker is None:
        return []
    mended = remaker.record(around=_cast_first())
    size = peak_of(trace) - peak_of(mended) if isinstance(mended, Trace) else 0
    if not matters(trace, size):
        return []
    rows = rows_of(trace, made, {storage.id: storage.op or 0 for storage in made})
    total = sum(storage.bytes for storage in made)
    message = (
        f"expanded tensors are cast to {', '.join(sorted({s.dtype for s in made}))}, which makes all of their copies: "
        f"{format_bytes(total)}, and {format_bytes(size)} more at the peak than if they were cast first"
    )
    advice = ("Cast before you expand: x.to(dtype).expand(...); under autocast, too, which casts what an op is given",)
    return [Finding(ID, "warning", rows[0]["layer"], rows[0]["where"], size, message, advice, {"layers": rows})]


def _is_made(trace: Trace, op: Op) -> bool:
    return bool(op.writes) and trace.storages[op.writes[0]].op == op.index


def _repeats(view: View) -> int:
    """Return how often an expanded tensor shows each of its elements."""
    return math.prod(size for size, stride in zip(view.shape, view.strides, strict=True) if stride == 0 and size > 1)


class _CastFirst(torch.autograd.Function):
    """A cast of what is in memory, expanded then; its gradient is summed up before it is cast back.

    Only sizes are right: the gradient is that of one copy, and goes on as that of each.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, repeated: list[int], more: dict[str, Any]) -> torch.Tensor:
        ctx.repeated, ctx.dtype, ctx.shape = repeated, x.dtype, x.shape
        for dim in repeated:
            x = x.narrow(dim, 0, 1)
        return dispatch.whole(_TO_COPY, x, **more).expand(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        once = gradients[0].sum(ctx.repeated, keepdim=True).to(ctx.dtype)
        return once.expand(ctx.shape), None, None


def _cast_first() -> AbstractContextManager[None]:
    """Return a context in which expanded tensors are cast before they are expanded."""

    def cast(x: torch.Tensor, **more: Any) -> torch.Tensor:
        strided = x.layout == torch.strided
        repeated = [dim for dim, size in enumerate(x.shape) if strided and size > 1 and x.stride(dim) == 0]
        return _CastFirst.apply(x, repeated, more) if repeated else dispatch.whole(_TO_COPY, x, **more)

    return dispatch.overridden({"_to_copy": cast}, dispatch.AUTOGRAD_CPU)
