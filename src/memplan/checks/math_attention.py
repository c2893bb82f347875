"""Check: attention that stores its L x L score matrices, where a fused kernel would not."""

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
from memplan.trace.records import HOST, Op, Storage
from memplan.trace.trace import Trace

ID = "math-attention"
TITLE = "Attention holds its L x L matrices"

_CHOICE = "scaled_dot_product_attention: math: "
_CALL = "torch.nn.functional.scaled_dot_product_attention(q, k, v)"
_FOR_A_CARD = "Nothing for the CPU; to look at the step on a card, name it: --device h100"
_FLEXIBLE = "torch.nn.attention.flex_attention takes biases that get a gradient, without the matrices"
_NOT_ACTIVATIONS = ("weight", "buffer", "input", "parameter_gradient", "optimizer_state")


@dataclass(frozen=True, slots=True)
class _FusedSaving:
    """What the fused call saves at the peak."""

    saved: int | None = None
    """Bytes; None if it saves none, or an unknown amount."""
    why: str = ""
    """Why ``saved`` is None."""
    advice: str = ""
    severity: Severity = "info"
    """Severity of the finding where ``saved`` is None."""


def find(subject: Subject) -> list[Finding]:
    """Return at most three findings: for attention that user code writes out as products and a softmax, for
    `scaled_dot_product_attention` on its math path, and for layers whose attention weights nothing reads."""
    attention = attentions(subject.trace)
    return [
        *_written_out(subject, [block for block in attention if not block.inside_of_sdpa]),
        *_math_path(subject, [block for block in attention if block.inside_of_sdpa]),
        *weights_for_nothing(subject, ID),
    ]


def _written_out(subject: Subject, attention: Sequence[Attention]) -> list[Finding]:
    """Return a finding about attention written out as products and a softmax, with what the fused call saves."""
    trace = subject.trace
    matrix_bytes = _matrix_bytes_at_peak(trace, attention)
    if not matters(trace, matrix_bytes):
        return []
    inside = any(_in_torch_layer(trace, block) for block in attention)
    fused = _fused(subject, attention, "need_weights=False" if inside else _CALL)
    what = f"attention holds its matrices of {_shown(attention)}, since it is written out"
    what += " where its weights are asked for" if inside else ""
    if fused.saved is None:
        message = f"{what}: {format_bytes(matrix_bytes)} at the peak; {fused.why}"
        return [
            _finding(
                trace, attention, fused.severity, size=0, message=message, advice=fused.advice, kind="written out",
                matrix_bytes=matrix_bytes,
            )
        ]  # fmt: skip
    if not matters(trace, fused.saved):
        return []
    message = f"{what}: {format_bytes(fused.saved)} more at the peak than with the fused call"
    return [_finding(trace, attention, "warning", fused.saved, message, fused.advice, "written out", matrix_bytes)]


def _math_path(subject: Subject, attention: Sequence[Attention]) -> list[Finding]:
    """Return a finding about `scaled_dot_product_attention` on its math path: why torch took it, and what helps."""
    trace = subject.trace
    matrix_bytes = _matrix_bytes_at_peak(trace, attention)
    if not matters(trace, matrix_bytes):
        return []
    reasons = _math_path_reasons(trace, attention)
    message = (
        f"attention holds its matrices of {_shown(attention)}, because of {reasons}: "
        f"{format_bytes(matrix_bytes)} at the peak"
    )
    advice = "Mend what the reason names (half precision, a head size it takes, no mask with a gradient)"
    size: int = 0
    severity: Severity = "warning"
    if trace.device == HOST and "dropout" in reasons:
        severity, advice = "info", _FOR_A_CARD
    elif subject.recorder is not None and subject.card is not None:
        with heads_fitted(half=subject.card.architecture < (8, 0)) as applied:
            fitted = subject.recorder.record()
        saved = 0 if isinstance(fitted, NotRecorded) else peak_of(trace) - peak_of(fitted)
        if matters(trace, saved):
            size = saved
            how = ", and ".join(sorted(applied))
            advice = f"{how[:1].upper()}{how[1:]}: {format_bytes(saved)} less at the peak"
            advice += "" if HALF in applied else ", and the result is the same"
    return [_finding(trace, attention, severity, size, message, advice, "math kernel", matrix_bytes)]


def _fused(subject: Subject, attention: Sequence[Attention], call: str) -> _FusedSaving:
    """Record the step with the fused call in place of the attention, and return the difference of the peaks. ``call``
    is what to write instead, for the advice."""
    trace, recorder = subject.trace, subject.recorder
    in_layers = [block for block in attention if _in_torch_layer(trace, block)]
    written = [block for block in attention if block not in in_layers]
    use_of_matrices = _use_of_matrices(written) or _use_of_weights(trace, in_layers)
    if use_of_matrices:
        return _FusedSaving(
            why=f"{use_of_matrices}, and a fused call never makes them", advice=f"Where nothing needs them, {call}"
        )
    if recorder is None:
        why = "what a fused call takes instead is known of a model only, and this is the recording of one"
        return _FusedSaving(
            saved=None, why=why, advice=f"Take {call}; check the model itself for the bytes", severity="warning"
        )
    fusing = Fusing(trace, written, on_card=subject.card is not None, weights=bool(in_layers))
    recorded = recorder.record(around=fusing.installed())
    mended = recorded if isinstance(recorded, NotRecorded) else fusing.without_matrices(recorded)
    if mended is None or isinstance(mended, NotRecorded):
        why = mended.why if mended is not None else "something is done to them on the way that it does not do"
        return _FusedSaving(
            why=f"a fused call does not fit here as it stands: {why}", advice=f"See whether {call} can be had"
        )
    remaining = attentions(mended)
    if not remaining:
        advice = f"Take {call} (memplan explain --device says which kernel a card takes, and why)"
        return _FusedSaving(peak_of(trace) - peak_of(mended), advice=advice)
    reason = "; ".join(dict.fromkeys(fusing.reasons)) or _math_path_reasons(mended, remaining)
    advice = _FOR_A_CARD if "dropout" in reason and trace.device == HOST else _FLEXIBLE
    return _FusedSaving(why=f"a fused call would take no less here, because of {reason}", advice=advice)


def _use_of_matrices(attention: Sequence[Attention]) -> str:
    """Return which other op reads the scores or weights of the attention, or that the model returns them, as a clause.
    Then they have to exist, so that no fused call fits. "" if they have no such use."""
    op = next((block.other_reader for block in attention if block.other_reader is not None), None)
    if op is not None:
        return f"{_op_and_line(op)} reads them, too"
    return "the model returns them" if any(block.returned for block in attention) else ""


def _use_of_weights(trace: Trace, attention: Sequence[Attention]) -> str:
    """Return what uses the attention weights that torch's own layers return, as a clause; "" if nothing does. The
    weights are the matrices of a layer, or their mean over the heads."""
    for block in attention:
        weights = {*block.matrices}
        if block.other_reader is not None:  # the mean
            weights.update(block.other_reader.writes)
        if any(view.storage in weights for returned in trace.returned for view in returned.tensors):
            return "the model returns its weights"
        for op in trace.ops:
            is_outside = op.layer != block.softmax.layer and op.phase == "forward"
            if is_outside and any(operand.storage in weights for operand in op.reads):
                return f"{_op_and_line(op)} reads its weights"
    return ""


def _op_and_line(op: Op) -> str:
    return f"{base_name(op.name)}{f' at {op.where}' if op.where else ''}"


def _in_torch_layer(trace: Trace, attention: Attention) -> bool:
    """Return whether the attention is computed by `nn.MultiheadAttention`."""
    kinds = {layer.name: layer.kind for layer in trace.layers}
    return kinds.get(attention.softmax.layer) == INSIDE_OF_TORCH


def _matrix_bytes_at_peak(trace: Trace, attention: Sequence[Attention]) -> int:
    """Return bytes of the matrices and their gradients that are live at the step's peak."""
    return sum(storage.bytes for storage in live_at_peak(trace) if _is_matrix(trace, storage, attention))


def _is_matrix(trace: Trace, storage: Storage, attention: Sequence[Attention]) -> bool:
    """Return whether a storage has the shape of the matrices and comes from an op of an attention layer."""
    sizes = {block.sizes for block in attention}
    if storage.op is None or storage.cause in _NOT_ACTIVATIONS or storage.shape[-2:] not in sizes:
        return False
    op = trace.ops[storage.op]
    return len(storage.shape) >= 3 and op.layer in {block.softmax.layer for block in attention}


def _math_path_reasons(trace: Trace, attention: Sequence[Attention]) -> str:
    """Return why torch chose the math path: as recorded for a card, else what the CPU's fused kernel refuses."""
    recorded = [a.text.split(_CHOICE, 1)[1] for a in trace.assumptions if a.kind == "kernel" and _CHOICE in a.text]
    if recorded:
        return "; ".join(dict.fromkeys(recorded))
    if any(block.dropped for block in attention):
        return "dropout, which the CPU's fused kernel does not take (those of CUDA do)"
    return "a shape or a mask that the CPU's fused kernel does not take"


def _shown(attention: Sequence[Attention]) -> str:
    return ", ".join(f"{a} x {b}" for a, b in sorted({block.sizes for block in attention}))


def _finding(
    trace: Trace,
    attention: Sequence[Attention],
    severity: Severity,
    size: int,
    message: str,
    advice: str,
    kind: str,
    matrix_bytes: int,
) -> Finding:
    """Return the finding about the layers with this attention, at the line of the first one. ``size`` are the bytes
    that it costs, ``matrix_bytes`` those of the matrices at the peak."""
    matrices = {storage for block in attention for storage in block.matrices}
    saved = [s for s in trace.counted if s.id in matrices and s.cause == "saved" and s.op is not None]
    rows = rows_of(trace, saved)
    softmax = attention[0].softmax
    sizes = [list(pair) for pair in sorted({block.sizes for block in attention})]
    details = {"kind": kind, "sizes": sizes, "held": matrix_bytes, "layers": rows}
    return Finding(ID, severity, softmax.layer, softmax.where, size, message, (advice,), details)
