"""Check: casts of expanded tensors, which materialize every copy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memplan._bytes import format_bytes
from memplan._torch import dispatch
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, peak_of, rows_of
from memplan.trace.records import Storage, View
from memplan.trace.trace import Trace

ID = "expanded-cast"
TITLE = "A cast makes every copy of an expanded tensor real"

_CAST = "aten._to_copy.default"
_ATEN = torch.ops.aten
_TO_COPY = _ATEN._to_copy.default


def find(subject: Subject) -> list[Finding]:
    """Return at most one finding, about all casts of expanded tensors in a step."""
    trace, recorder = subject.trace, subject.recorder
    results: list[Storage] = []
    for form in trace.forms:
        op = trace.ops[form.op]
        if op.name == _CAST and op.writes and form.reads and _is_expanded(form.reads[0][1]):
            result = trace.storages[op.writes[0]]
            results += [result] * (result.op == op.index)  # a cast to the same dtype may return its operand
    if not results or recorder is None:
        return []
    mended = recorder.record(around=_cast_first())
    size = peak_of(trace) - peak_of(mended) if isinstance(mended, Trace) else 0
    if not matters(trace, size):
        return []
    rows = rows_of(trace, results)
    total = sum(storage.bytes for storage in results)
    dtypes = ", ".join(sorted({storage.dtype for storage in results}))
    message = (
        f"expanded tensors are cast to {dtypes}, which makes all of their copies: {format_bytes(total)}, and "
        f"{format_bytes(size)} more at the peak than if they were cast first"
    )
    advice = ("Cast before you expand: x.to(dtype).expand(...); under autocast, too, which casts what an op is given",)
    return [Finding(ID, "warning", rows[0]["layer"], rows[0]["where"], size, message, advice, {"layers": rows})]


def _is_expanded(view: View) -> bool:
    """Return whether a tensor repeats its elements along a dimension, by a stride of 0."""
    return any(stride == 0 and size > 1 for size, stride in zip(view.shape, view.strides, strict=True))


class _CastFirst(torch.autograd.Function):
    """Casts the elements that an expanded tensor has in memory, then expands the result.

    For recordings on fake tensors: gradients have the right sizes, but not the right values.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, expanded_dims: list[int], kwargs: dict[str, Any]) -> torch.Tensor:
        """Cast ``x`` by ``_to_copy(x, **kwargs)``. ``expanded_dims`` are its dimensions of stride 0."""
        ctx.expanded_dims, ctx.dtype, ctx.shape = expanded_dims, x.dtype, x.shape
        for dim in expanded_dims:
            x = x.narrow(dim, 0, 1)
        return dispatch.whole(_TO_COPY, x, **kwargs).expand(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Sum the gradient over the copies before it is cast back. The sum becomes the gradient of every copy."""
        summed = gradients[0].sum(ctx.expanded_dims, keepdim=True).to(ctx.dtype)
        return summed.expand(ctx.shape), None, None


def _cast_first() -> AbstractContextManager[None]:
    """Return a context in which expanded tensors are cast before they are expanded."""

    def cast(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        strided = x.layout == torch.strided
        expanded_dims = [dim for dim, size in enumerate(x.shape) if strided and size > 1 and x.stride(dim) == 0]
        return _CastFirst.apply(x, expanded_dims, kwargs) if expanded_dims else dispatch.whole(_TO_COPY, x, **kwargs)

    return dispatch.overridden({"_to_copy": cast}, dispatch.AUTOGRAD_CPU)
