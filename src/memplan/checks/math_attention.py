"""Attention that holds its L x L probabilities, where a fused kernel would not."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.checks.fields.walk import base_name
from memplan.checks.model import Finding, Subject
from memplan.checks.savings import peak, rows_of, saving
from memplan.trace.model import Op, Storage, Trace

ID = "math-attention"
TITLE = "Attention holds its L x L matrices"

_LEAST = 0.02
_SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
_PRODUCTS = ("bmm", "baddbmm", "matmul")
_SHORTEST = 16
"""Lengths below which the matrices are no matter."""


def find(subject: Subject) -> list[Finding]:
    """One finding for all attention of a step that is written out, or falls back to the math path."""
    trace = subject.trace
    squares = _squares(trace)
    if not squares:
        return []
    storages = [s for s in trace.counted if _is_square(s, squares)]
    size = saving(trace, {storage.id: None for storage in storages})
    if size < _LEAST * peak(trace):
        return []
    makers = {op.index for op in squares.values()}
    saved = [s for s in storages if s.op is not None and s.cause == "saved"]
    rows = rows_of(trace, saved, {s.id: s.op or 0 for s in saved})
    first = next(op for op in trace.ops if op.index in makers)
    reasons = [a for a in trace.assumptions if a.kind == "kernel" and "scaled_dot_product_attention: math" in a.text]
    why = f", because of {reasons[0].text.split('math: ', 1)[-1]}" if reasons else ", since it is written out"
    heights = sorted(set(squares))
    shown = ", ".join(f"{a} x {b}" for a, b in heights)
    message = (
        f"attention holds its matrices of {shown}{why}: {format_bytes(size)} at the peak, of which a fused kernel "
        "takes none"
    )
    advice = (
        "Mend what the reason names (half precision, a head size it takes, no mask with a gradient)" if reasons
        else "Call torch.nn.functional.scaled_dot_product_attention(q, k, v) instead (memplan explain --device says "
        "which kernel a card takes, and why)",
    )  # fmt: skip
    details = {"kind": "math kernel" if reasons else "written out", "sizes": [list(h) for h in heights], "layers": rows}
    return [Finding(ID, "warning", first.layer, first.where, size, message, advice, details)]


def _squares(trace: Trace) -> dict[tuple[int, int], Op]:
    """(queries, keys) of each softmax between two batched products, and the first op of that size."""
    found: dict[tuple[int, int], Op] = {}
    for op in trace.ops:
        if op.phase != "forward" or base_name(op.name) not in _SOFTMAX or not op.writes:
            continue
        shape = trace.storages[op.writes[0]].shape
        if len(shape) < 3 or min(shape[-2:]) < _SHORTEST:
            continue
        if _comes_from_product(trace, op) and _goes_to_product(trace, op):
            found.setdefault((shape[-2], shape[-1]), op)
    return found


def _comes_from_product(trace: Trace, op: Op, depth: int = 4) -> bool:
    """Whether a batched product lies a few ops (a scale, a mask) before an op."""
    for operand in op.reads:
        maker = trace.storages[operand.storage].op
        if maker is None or maker >= op.index:
            continue
        before = trace.ops[maker]
        if base_name(before.name) in _PRODUCTS or (depth > 1 and _comes_from_product(trace, before, depth - 1)):
            return True
    return False


def _goes_to_product(trace: Trace, op: Op, depth: int = 3) -> bool:
    """Whether a batched product reads what an op makes, a dropout or a cast later."""
    made = set(op.writes)
    for later in trace.ops[op.index + 1 : op.index + 12]:
        if later.phase == "forward" and any(operand.storage in made for operand in later.reads):
            if base_name(later.name) in _PRODUCTS:
                return True
            made |= set(later.writes)
    return False


def _is_square(storage: Storage, squares: dict[tuple[int, int], Op]) -> bool:
    """Whether a storage is made in the step and has the last two sizes of one of the matrices."""
    return storage.op is not None and storage.cause not in ("weight", "buffer", "input") and (
        len(storage.shape) >= 3 and storage.shape[-2:] in squares
    )  # fmt: skip
