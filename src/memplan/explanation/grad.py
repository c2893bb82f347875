"""Inference beside training: what lives at once without grad, and what a training step keeps."""

from __future__ import annotations

from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.errors import MemplanError
from memplan.explanation.layers import fullest
from memplan.explanation.model import Explanation
from memplan.simulation.simulate import live_at
from memplan.trace.record import record_for
from memplan.trace.recording.boundaries import Build
from memplan.trace.recording.session import Target
from memplan.trace.trace import Trace, at_least


def beside_training(explanation: Explanation, build: Build, target: Target) -> Explanation:
    """Return the explanation of inference, with what the same model keeps where it trains.

    Unchanged where it cannot train (nothing in it needs a gradient).

    Args:
        explanation: of inference.
        build: the training step of the same model and inputs.
        target: what it is recorded for.
    """
    try:
        trace = record_for(build, target, 1)
    except MemplanError:
        return explanation
    at_once = explanation.by_cause_most.get("activation", 0)
    note = f"without grad {format_bytes(at_once)} of activations live at once; "
    note += f"a training step keeps {format_bytes(_saved(trace))} of them for its backward pass"
    return replace(explanation, notes=(*explanation.notes, note))


def _saved(trace: Trace) -> int:
    """Return the most that is saved at any one time."""
    trace = at_least(trace)
    tick = fullest(trace, trace.steps[0], trace.end)
    return sum(storage.bytes for storage in live_at(trace, tick) if storage.cause == "saved")
