"""What a step takes now, to be written into a baseline or compared with one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.explanation.explain import explain_trace
from memplan.explanation.layers import OUTSIDE, op_word
from memplan.explanation.model import Explanation, HolderRow
from memplan.studies.guarding.baseline import Figures, Held, Ran
from memplan.trace.records import Assumption, loud
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Chosen:
    """Why a layer's attention runs the kernel that it runs, and the ``file:line`` of the call."""

    reason: str
    where: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """Figures of a step, and what a baseline does not keep of it."""

    figures: Figures
    where: dict[str, str]
    """Of each layer: ``file:line``."""
    chosen: dict[str, Chosen]
    """Of each layer with a kernel that torch chose."""
    unsure: tuple[Assumption, ...]
    """Without which the figures may be others when the step really runs."""


def taken(
    trace: Trace, *, target: str, options: str = "", train: bool | None = None, settings: str | None = None
) -> Taken:
    """Return what a recorded step takes: by layer and by cause at the peak, and which ops each layer ran.

    Args:
        trace: the step.
        target, options: its names in a baseline.
        train: whether it trains; None where its ops are to tell.
        settings: of the caching allocator, as in ``PYTORCH_ALLOC_CONF``.
    """
    explanation = explain_trace(trace, title=target, train=train, settings=settings)
    timeline, ran = explanation.timeline, _ran(trace)
    figures = Figures(
        target, options, trace.device, trace.torch.partition("+")[0], bool(trace.engines), explanation.train,
        timeline.peak_allocated, timeline.peak_reserved, _at(explanation),
        held(explanation.holders, explanation.by_cause.get("rounding", 0)), ran,
    )  # fmt: skip
    where = {row.name: row.where for row in explanation.layers if row.where}
    where |= {row.layer: row.where for row in explanation.holders if row.where and row.layer not in where}
    where = {layer: slashed(line) for layer, line in where.items()}
    return Taken(figures, where, _chosen(trace), tuple(loud(trace.assumptions)))


def slashed(path: str) -> str:
    """Return a path as Linux writes it, so that each system gives the same bytes."""
    return path.replace("\\", "/")


def held(holders: Iterable[HolderRow], rounding: int = 0) -> tuple[Held, ...]:
    """Add up what is alive at the peak by layer and cause, in the order of the names."""
    found: dict[tuple[str, str], int] = {(OUTSIDE, "rounding"): rounding} if rounding else {}
    for row in holders:
        key = row.layer or OUTSIDE, row.cause
        found[key] = found.get(key, 0) + row.bytes
    return tuple(Held(*key, size) for key, size in sorted(found.items()))


def _at(explanation: Explanation) -> str:
    peak = explanation.peak
    if peak is None:
        return ""
    return f"{peak.phase}: {peak.op}" + (f" of {peak.layer}" if peak.layer else "")


def _ran(trace: Trace) -> tuple[Ran, ...]:
    found: dict[str, dict[str, None]] = {}
    for op in trace.ops:
        if op.phase == "forward" and op.step == 0 and not op.recomputed:
            found.setdefault(op.layer or OUTSIDE, {})[op_word(op, trace)] = None
    return tuple(Ran(layer, tuple(ops)) for layer, ops in sorted(found.items()))


_KERNELS = {
    "flash": "scaled_dot_product_flash_attention",
    "memory-efficient": "scaled_dot_product_efficient_attention",
    "cuDNN": "scaled_dot_product_cudnn_attention",
}
"""First words of the reason for a kernel (`memplan.trace.semantics.cuda.sdpa_choice`), and the op that it is."""
_CALL = "scaled_dot_product_attention: "


def _chosen(trace: Trace) -> dict[str, Chosen]:
    """Return for each layer the reason for its attention's kernel, where one reason fits."""
    reasons = [one for one in trace.assumptions if one.kind == "kernel" and one.text.startswith(_CALL)]
    found: dict[str, Chosen] = {}
    for op in trace.ops:
        if op.phase != "forward" or op.layer in found:
            continue
        at = [one.text.removeprefix(_CALL) for one in reasons if one.where == op.where]
        word = op_word(op, trace)
        fused = [text for text in at if _KERNELS.get(text.partition(":")[0]) == word]
        # the math path is made of products and a softmax, which other code at the line can be, too
        plain = [text for text in at if text.startswith("math:") and word.endswith("softmax")]
        if len(fused or plain) == 1:
            found[op.layer or OUTSIDE] = Chosen((fused or plain)[0].partition(": ")[2], slashed(op.where or "") or None)
    return found
