"""`nn.MultiheadAttention` without grad: a single op, which also returns attention weights (the default)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import matters, peak_of
from memplan.checks.op_names import base_name
from memplan.trace.records import Op
from memplan.trace.trace import Trace

_OP = "_native_multi_head_attention"


def weights_for_nothing(subject: Subject, check_id: str) -> list[Finding]:
    """Return at most one finding of this check: layers return attention weights that nothing reads."""
    trace, recorder = subject.trace, subject.recorder
    ops = list(_ops_with_unread_weights(trace))
    if not ops or recorder is None:
        return []
    mended = recorder.record(around=_without_weights())
    size = peak_of(trace) - peak_of(mended) if isinstance(mended, Trace) else 0
    if not matters(trace, size):
        return []
    shapes = sorted({trace.storages[op.writes[1]].shape[-2:] for op in ops})
    shown = ", ".join(f"{a} x {b}" for a, b in shapes)
    message = (
        f"attention makes weights of {shown}, which nothing reads: {format_bytes(size)} more at the peak than without"
    )
    rows = [{"layer": op.layer, "where": op.where, "bytes": trace.storages[op.writes[1]].bytes} for op in ops]
    advice = "Call the layer with need_weights=False"
    details = {"kind": "unread weights", "sizes": [list(shape) for shape in shapes], "layers": rows}
    return [Finding(check_id, "warning", ops[0].layer, ops[0].where, size, message, (advice,), details)]


def _ops_with_unread_weights(trace: Trace) -> Iterator[Op]:
    """Yield the first step's fused attention ops whose second result, the weights, is neither read nor returned."""
    read = {operand.storage for op in trace.ops for operand in op.reads}
    read |= {view.storage for returned in trace.returned for view in returned.tensors}
    for op in trace.ops:
        if op.step == 0 and base_name(op.name) == _OP and len(op.writes) > 1:
            weights = trace.storages[op.writes[1]]
            if weights.bytes and weights.id not in read:
                yield op


def _without_weights() -> AbstractContextManager[None]:
    """Return a context in which the layers are called with ``need_weights=False``."""
    forward = nn.MultiheadAttention.forward

    def forward_without_weights(
        self: nn.MultiheadAttention, query: Any, key: Any, value: Any, key_padding_mask: Any = None,
        need_weights: bool = True, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return forward(self, query, key, value, key_padding_mask, False, *args, **kwargs)

    return _torch.patched(nn.MultiheadAttention, forward=forward_without_weights)
