"""An explanation in one paragraph: for `print`, logs, and the head of every report."""

from __future__ import annotations

import math

from memplan._bytes import format_bytes
from memplan.explanation.card import verdict_sentence
from memplan.explanation.model import Explanation

LABELS = {
    "weight": "weights",
    "buffer": "buffers",
    "input": "inputs",
    "parameter_gradient": "weights' gradients",
    "activation_gradient": "activations' gradients",
    "optimizer_state": "optimizer state",
    "saved": "saved activations",
    "activation": "other activations",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "rounding": "rounding",
    "fragmentation": "fragmentation",
}


def headline(by_cause: dict[str, int], weight_bytes: int, peak: int) -> str:
    """The sentence that answers "why so much": ``44.7 MiB of weights -> 1.9 GiB peak: 61 % saved activations, ...``."""
    largest = sorted(((size, cause) for cause, size in by_cause.items() if size), reverse=True)
    parts = [f"{_percent(size, peak)} {LABELS[cause]}" for size, cause in largest[:4]]
    rest = peak - sum(size for size, _ in largest[:4])
    if rest > 0:
        parts.append(f"{_percent(rest, peak)} other")
    return f"{format_bytes(weight_bytes)} of weights -> {format_bytes(peak)} peak: {', '.join(parts)}"


def scaling_sentence(explanation: Explanation) -> str | None:
    """``0.2 GiB fixed + 58.1 MiB per sample from batch 3 on``, None where it is not known."""
    scaling = explanation.scaling
    if scaling is None:
        return None
    batch, last = scaling.batches[0], scaling.lines[-1]
    if last.batch > _FAR * batch:  # lines that differ by the rounding of blocks
        return f"{_line(scaling.fixed, scaling.per_sample)} (from batch {batch} and {2 * batch})"
    if abs(last.fixed + last.per_sample * batch - scaling.peaks[0]) <= _NEAR * scaling.peaks[0]:
        return f"{_line(last.fixed, last.per_sample)} (from batch {batch} and {2 * batch})"
    # at this batch another moment of the step is the highest than where activations rule
    return (
        f"{_line(scaling.fixed, scaling.per_sample)} at batch {batch}, "
        f"{_line(last.fixed, last.per_sample)} from batch {max(1, math.ceil(last.batch))} on"
    )


_FAR = 16
"""How many times the batch another line may begin at and still be told."""

_NEAR = 0.02
"""How far off, in shares of the peak, the line of large batches may be for the one line to be told."""


def _line(fixed: float, per_sample: float) -> str:
    return f"{format_bytes(round(fixed))} fixed + {format_bytes(round(per_sample))} per sample"


def workspace_sentence(explanation: Explanation) -> str | None:
    """How much higher the peak can be; None where every workspace is known."""
    peak = explanation.timeline.peak_allocated
    if explanation.card is None or explanation.card.peak_allocated_high == peak:
        return None
    most = format_bytes(explanation.card.peak_allocated_high)
    return f"with the largest workspaces of the algorithms known of cuDNN: up to {most} peak"


def peak_sentence(explanation: Explanation) -> str | None:
    """Where the peak is: phase, op, layer, file:line."""
    peak = explanation.peak
    if peak is None:
        return None
    step = "while building" if peak.step < 0 else f"in step {peak.step + 1}, {peak.phase}"
    layer = f" of {peak.layer}" if peak.layer else ""
    return f"the peak is {step}: {peak.op}{layer}" + (f" ({peak.where})" if peak.where else "")


def summary(explanation: Explanation) -> str:
    """The paragraph."""
    lines = [
        explanation.sentence,
        workspace_sentence(explanation),
        peak_sentence(explanation),
        scaling_sentence(explanation),
    ]
    if explanation.card is not None:
        lines.append(verdict_sentence(explanation.card))
    lines += [f"note: {note}" for note in explanation.notes]
    for assumption in explanation.assumptions:
        times = f" ({assumption.count} times)" if assumption.count > 1 else ""
        kind = "kernel" if assumption.kind == "kernel" else "assumed"
        lines.append(f"{kind}: {assumption.text}{times}" + (f", at {assumption.where}" if assumption.where else ""))
    return "\n".join(line for line in lines if line)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"
