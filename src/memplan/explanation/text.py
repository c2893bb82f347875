"""An explanation in one paragraph: for `print`, logs, and the head of every report."""

from __future__ import annotations

import math

from memplan._bytes import format_bytes
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
    here = max(i for i, line in enumerate(scaling.lines) if line.batch <= scaling.batches[0])
    parts: list[str] = []
    for number, line in enumerate(scaling.lines[here:], here):
        parts.append(f"{format_bytes(round(line.fixed))} fixed + {format_bytes(round(line.per_sample))} per sample")
        last = number + 1 == len(scaling.lines)
        if not last or line.batch > 1:
            end = "on" if last else f"to {_whole(scaling.lines[number + 1].batch)}"
            parts[-1] += f" from batch {max(1, _whole(line.batch))} {end}"
    shown = parts if len(parts) <= 2 else [parts[0], parts[-1]]  # between them the one bends into the other
    return "; ".join(shown)


def _whole(batch: float) -> int:
    return math.ceil(batch)


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
    lines = [explanation.sentence, peak_sentence(explanation), scaling_sentence(explanation)]
    lines += [f"note: {note}" for note in explanation.notes]
    for assumption in explanation.assumptions:
        times = f" ({assumption.count} times)" if assumption.count > 1 else ""
        lines.append(f"assumed: {assumption.text}{times}" + (f", at {assumption.where}" if assumption.where else ""))
    return "\n".join(line for line in lines if line)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"
