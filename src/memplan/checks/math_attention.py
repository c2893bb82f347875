"""Attention that holds its L x L probabilities, where a fused kernel would not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan._bytes import format_bytes
from memplan.checks.attention.fitted import HALF, heads_fitted
from memplan.checks.attention.fused import Fusing
from memplan.checks.attention.layers import weights_for_nothing
from memplan.checks.attention.written import INSIDE_OF_TORCH, Attention, attentions
from memplan.checks.finding import Finding, Severity, Subject
from memplan.checks.mended.changed_step import NotRecorded
from memplan.checks.mended.savings import live_at_peak, matters, peak_of, rows_of
from memplan.checks.op_names import base_name
from memplan.trace.records import HOST, Storage
from memplan.trace.trace import Trace

ID = "math-attention"
TITLE = "Attention holds its L x L matrices"

_CHOICE = "scaled_dot_product_attention: math: "
_CALL = "torch.nn.functional.scaled_dot_product_attention(q, k, v)"
_FOR_A_CARD = "Nothing for the CPU; to look at the step on a card, name it: --device h100"
_FLEXIBLE = "torch.nn.attention.flex_attention takes biases that get a gradient, without the matrices"
_OWN = ("weight", "buffer", "input", "parameter_gradient", "optimizer_state")


@dataclass(frozen=True, slots=True)
class _Mended:
    """Bytes at the peak that the fused call saves; or why it saves none, or how much is unknown."""

    saved: int | None = None
    why: str = ""
    advice: str = ""
    severity: Severity = "info"


def find(subject: Subject) -> list[Finding]:
    """Return a finding for all attention of a step that is written out, and one for what falls back to the math
    path."""
    found = attentions(subject.trace)
    return [
        *_written_out(subject, [one for one in found if not one.inside_of_sdpa]),
        *_math_path(subject, [one for one in found if one.inside_of_sdpa]),
        *weights_for_nothing(subject, ID),
    ]


def _written_out(subject: Subject, found: Sequence[Attention]) -> list[Finding]:
    trace = subject.trace
    held = _held(trace, found)
    if not matters(trace, held):
        return []
    inside = any(_in_torch(trace, one) for one in found)
    mended = _fused(subject, found, "need_weights=False" if inside else _CALL)
    what = f"attention holds its matrices of {_shown(found)}, since it is written out"
    what += " where its weights are asked for" if inside else ""
    if mended.saved is None:
        message = f"{what}: {format_bytes(held)} at the peak; {mended.why}"
        return [_finding(trace, found, mended.severity, 0, message, mended.advice, "written out", held)]
    if not matters(trace, mended.saved):
        return []
    message = f"{what}: {format_bytes(mended.saved)} more at the peak than with the fused call"
    return [_finding(trace, found, "warning", mended.saved, message, mended.advice, "written out", held)]


def _math_path(subject: Subject, found: Sequence[Attention]) -> list[Finding]:
    trace = subject.trace
    held = _held(trace, found)
    if not matters(trace, held):
        return []
    because = _reasons(trace, found)
    message = f"attention holds its matrices of {_shown(found)}, because of {because}: {format_bytes(held)} at the peak"
    advice = "Mend what the reason names (half precision, a head size it takes, no mask with a gradient)"
    size: int = 0
    severity: Severity = "warning"
    if trace.device == HOST and "dropout" in because:
        severity, advice = "info", _FOR_A_CARD
    elif subject.remaker is not None and subject.card is not None:
        with heads_fitted(half=subject.card.architecture < (8, 0)) as done:
            fitted = subject.remaker.record()
        saved = 0 if isinstance(fitted, NotRecorded) else peak_of(trace) - peak_of(fitted)
        if matters(trace, saved):
            size = saved
            how = ", and ".join(sorted(done))
            advice = f"{how[:1].upper()}{how[1:]}: {format_bytes(saved)} less at the peak"
            advice += "" if HALF in done else ", and the result is the same"
    return [_finding(trace, found, severity, size, message, advice, "math kernel", held)]


def _fused(subject: Subject, found: Sequence[Attention], call: str) -> _Mended:
    """Return the step with the fused call, recorded."""
    trace, remaker = subject.trace, subject.remaker
    written = [one for one in found if not _in_torch(trace, one)]
    wanted = _wanted(written) or _wanted_of_layers(trace, [one for one in found if one not in written])
    if wanted:
        return _Mended(why=f"{wanted}, and a fused call never makes them", advice=f"Where nothing needs them, {call}")
    if remaker is None:
        why = "what a fused call takes instead is known of a model only, and this is the recording of one"
        return _Mended(None, why, f"Take {call}; check the model itself for the bytes", "warning")
    fusing = Fusing(trace, written, on_card=subject.card is not None, weights=len(written) < len(found))
    again = remaker.record(around=fusing.installed())
    mended = again if isinstance(again, NotRecorded) else fusing.without_matrices(again)
    if mended is None or isinstance(mended, NotRecorded):
        why = mended.why if mended is not None else "something is done to them on the way that it does not do"
        return _Mended(
            why=f"a fused call does not fit here as it stands: {why}", advice=f"See whether {call} can be had"
        )
    left = attentions(mended)
    if not left:
        advice = f"Take {call} (memplan explain --device says which kernel a card takes, and why)"
        return _Mended(peak_of(trace) - peak_of(mended), advice=advice)
    reason = "; ".join(dict.fromkeys(fusing.reasons)) or _reasons(mended, left)
    advice = _FOR_A_CARD if "dropout" in reason and trace.device == HOST else _FLEXIBLE
    return _Mended(why=f"a fused call would take no less here, because of {reason}", advice=advice)


def _wanted(found: Sequence[Attention]) -> str:
    """Name the op that needs the matrices themselves; "" if none does."""
    used = next((one.otherwise for one in found if one.otherwise is not None), None)
    if used is not None:
        return f"{base_name(used.name)}{f' at {used.where}' if used.where else ''} reads them, too"
    return "the model returns them" if any(one.returned for one in found) else ""


def _wanted_of_layers(trace: Trace, found: Sequence[Attention]) -> str:
    """Name the op that reads the weights that torch's own layers return: these, or their mean over the heads."""
    for one in found:
        given = {*one.matrices, *(one.otherwise.writes if one.otherwise is not None else ())}
        if any(view.storage in given for returned in trace.returned for view in returned.tensors):
            return "the model returns its weights"
        for op in trace.ops:
            if op.layer != one.softmax.layer and op.phase == "forward" and given & {r.storage for r in op.reads}:
                return f"{base_name(op.name)}{f' at {op.where}' if op.where else ''} reads its weights"
    return ""


def _in_torch(trace: Trace, one: Attention) -> bool:
    kinds = {layer.name: layer.kind for layer in trace.layers}
    return kinds.get(one.softmax.layer) == INSIDE_OF_TORCH


def _held(trace: Trace, found: Sequence[Attention]) -> int:
    """Return bytes of the matrices and their gradients at the step's peak."""
    return sum(storage.bytes for storage in live_at_peak(trace) if _is_matrix(trace, storage, found))


def _is_matrix(trace: Trace, storage: Storage, found: Sequence[Attention]) -> bool:
    """Return whether a storage has the shape of the matrices, and is made by an op that makes or derives them."""
    if storage.op is None or storage.cause in _OWN or storage.shape[-2:] not in {one.sizes for one in found}:
        return False
    op = trace.ops[storage.op]
    return len(storage.shape) >= 3 and op.layer in {one.softmax.layer for one in found}


def _reasons(trace: Trace, found: Sequence[Attention]) -> str:
    """Say why the math path was taken: on a card as the recording has it, else what the CPU's fused kernel refuses."""
    recorded = [a.text.split(_CHOICE, 1)[1] for a in trace.assumptions if a.kind == "kernel" and _CHOICE in a.text]
    if recorded:
        return "; ".join(dict.fromkeys(recorded))
    if any(one.dropped for one in found):
        return "dropout, which the CPU's fused kernel does not take (those of CUDA do)"
    return "a shape or a mask that the CPU's fused kernel does not take"


def _shown(found: Sequence[Attention]) -> str:
    return ", ".join(f"{a} x {b}" for a, b in sorted({one.sizes for one in found}))


def _finding(
    trace: Trace,
    found: Sequence[Attention],
    severity: Severity,
    size: int,
    message: str,
    advice: str,
    kind: str,
    held: int,
) -> Finding:
    matrices = {storage for one in found for storage in one.matrices}
    saved = [s for s in trace.counted if s.id in matrices and s.cause == "saved" and s.op is not None]
    rows = rows_of(trace, saved, {s.id: s.op or 0 for s in saved})
    first = found[0].softmax
    sizes = [list(pair) for pair in sorted({one.sizes for one in found})]
    details = {"kind": kind, "sizes": sizes, "held": held, "layers": rows}
    return Finding(ID, severity, first.layer, first.where, size, message, (advice,), details)
