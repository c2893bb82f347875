"""Figures of a recorded step, to be written into a baseline or compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memplan._bytes import format_bytes
from memplan.explanation.explain import explain_trace
from memplan.explanation.layers import OUTSIDE, op_word
from memplan.explanation.model import OwnerRow
from memplan.studies.guarding.baseline import Figures, LayerBytes, LayerOps
from memplan.trace.records import Assumption, loud
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The reason for which torch chose a layer's attention kernel, and the ``file:line`` of the call."""

    reason: str
    where: str | None


@dataclass(frozen=True, slots=True)
class RecordedFigures:
    """Figures of a step, with the details that baselines leave out."""

    figures: Figures
    where: dict[str, str]
    """``file:line`` by layer."""
    kernel_choices: dict[str, KernelChoice]
    """By name of a layer with attention."""
    assumptions: tuple[Assumption, ...]
    """Assumptions of the recording that the real step may not meet."""
    band: tuple[int, int] | None = None
    """Interval of the allocated peak in 95 % of steps, if workspaces are expected."""


def figures_of_trace(
    trace: Trace,
    *,
    target: str,
    options: str = "",
    train: bool | None = None,
    settings: str | None = None,
    names_cudnn: bool = True,
) -> RecordedFigures:
    """Return the figures of a recorded step: bytes at the peak by layer and cause, and the ops of each layer.

    Args:
        train: whether the step trains; None to infer it from the ops.
        names_cudnn: whether the user named the cuDNN of the recording, instead of the version of this torch.
    """
    explanation = explain_trace(trace, title=target, train=train, settings=settings)
    timeline, peak = explanation.timeline, explanation.peak
    at = "" if peak is None else f"{peak.phase}: {peak.op}" + (f" of {peak.layer}" if peak.layer else "")
    has_sizes = bool(trace.engines or trace.expected or trace.measured)  # of workspaces, instead of intervals
    figures = Figures(
        target, options, trace.device, torch=trace.torch.partition("+")[0], cudnn=names_cudnn and has_sizes,
        train=explanation.train, peak=timeline.peak_allocated, reserved=timeline.peak_reserved,
        at=at, ran=_forward_ops(trace),
        held=bytes_by_layer(explanation.holders, explanation.by_cause.get("rounding", 0)),
        expected=has_sizes and not names_cudnn,
    )  # fmt: skip
    where = {row.name: row.where for row in explanation.layers if row.where}
    where |= {row.layer: row.where for row in explanation.holders if row.where and row.layer not in where}
    where = {layer: with_forward_slashes(line) for layer, line in where.items()}
    band = None if explanation.card is None else explanation.card.allocated_band
    return RecordedFigures(figures, where, _kernel_choices(trace), tuple(loud(trace.assumptions)), band)


def limit_in_band(limit: int, band: tuple[int, int] | None) -> Iterator[str]:
    """Yield a sentence if a limit of allocated bytes lies inside of the band of a step's peak."""
    if band is not None and band[0] <= limit < band[1]:
        low, high = map(format_bytes, band)
        yield (
            f"95 %: {low} to {high} allocated, as cuDNN's workspaces are expected: the limit of {format_bytes(limit)} "
            "lies inside"
        )


def with_forward_slashes(path: str) -> str:
    """Return a path with forward slashes, so that baselines are the same on each system."""
    return path.replace("\\", "/")


def bytes_by_layer(owners: Iterable[OwnerRow], rounding: int = 0) -> tuple[LayerBytes, ...]:
    """Return the sums of bytes live at the peak by layer and cause, in sorted order.

    ``rounding``: bytes that belong to no layer.
    """
    totals: dict[tuple[str, str], int] = {(OUTSIDE, "rounding"): rounding} if rounding else {}
    for row in owners:
        key = row.layer or OUTSIDE, row.cause
        totals[key] = totals.get(key, 0) + row.bytes
    return tuple(LayerBytes(*key, size) for key, size in sorted(totals.items()))


def _forward_ops(trace: Trace) -> tuple[LayerOps, ...]:
    """Return the distinct forward ops of each layer in the first step."""
    ops_of_layers: dict[str, dict[str, None]] = {}
    for op in trace.ops:
        if op.phase == "forward" and op.step == 0 and not op.recomputed:
            ops_of_layers.setdefault(op.layer or OUTSIDE, {})[op_word(op, trace)] = None
    return tuple(LayerOps(layer, tuple(ops)) for layer, ops in sorted(ops_of_layers.items()))


_KERNELS = {
    "flash": "scaled_dot_product_flash_attention",
    "memory-efficient": "scaled_dot_product_efficient_attention",
    "cuDNN": "scaled_dot_product_cudnn_attention",
}
"""Ops by the first word of the reason for a kernel, as `memplan.trace.semantics.cuda.sdpa_choice` writes it."""
_CALL = "scaled_dot_product_attention: "


def _kernel_choices(trace: Trace) -> dict[str, KernelChoice]:
    """Return the reason for the attention kernel of each layer, where exactly one assumption matches line and op."""
    assumptions = [row for row in trace.assumptions if row.kind == "kernel" and row.text.startswith(_CALL)]
    choices: dict[str, KernelChoice] = {}
    for op in trace.ops:
        if op.phase != "forward" or op.layer in choices:
            continue
        reasons = [row.text.removeprefix(_CALL) for row in assumptions if row.where == op.where]
        word = op_word(op, trace)
        fused = [text for text in reasons if _KERNELS.get(text.partition(":")[0]) == word]
        # the math path has no op of its own: its softmax stands for it
        math = [text for text in reasons if text.startswith("math:") and word.endswith("softmax")]
        if len(fused or math) == 1:
            reason = (fused or math)[0].partition(": ")[2]
            choices[op.layer or OUTSIDE] = KernelChoice(reason, with_forward_slashes(op.where or "") or None)
    return choices
