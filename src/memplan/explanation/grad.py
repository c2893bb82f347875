"""What a step would take if it trained, or ran in eager mode."""

from __future__ import annotations

from dataclasses import replace

import torch

from memplan._bytes import format_bytes
from memplan.errors import MemplanError
from memplan.explanation.layers import tick_of_most_saved
from memplan.explanation.model import Explanation
from memplan.simulation.simulate import live_at, simulate
from memplan.trace.record import record_for
from memplan.trace.recording.boundaries import Build
from memplan.trace.recording.session import Target
from memplan.trace.trace import Trace, at_least


def with_training_note(explanation: Explanation, build: Build, target: Target) -> Explanation:
    """Return the explanation with a note on the activations that a training step of the same model saves.

    It is unchanged if the training step cannot be recorded, as when nothing needs a gradient.

    Args:
        explanation: of inference.
        build: the training step of the same model and inputs.
    """
    try:
        trace = record_for(build, target, steps=1)
    except MemplanError:
        return explanation
    at_once = explanation.by_cause_most.get("activation", 0)
    note = f"without grad {format_bytes(at_once)} of activations live at once; "
    note += f"a training step keeps {format_bytes(_peak_saved_bytes(trace))} of them for its backward pass"
    return replace(explanation, notes=(*explanation.notes, note))


def with_eager_note(explanation: Explanation, build: Build, target: Target) -> Explanation:
    """Return the explanation with a note on the peak that the compiled step would have in eager mode."""
    with torch.compiler.set_stance("force_eager"):
        eager = simulate(at_least(record_for(build, target))).peak_allocated
    note = f"without torch.compile the step would peak at {format_bytes(eager)}"
    return replace(explanation, notes=(*explanation.notes, note))


def _peak_saved_bytes(trace: Trace) -> int:
    """Return the most bytes that are saved for backward at any time of the steps."""
    trace = at_least(trace)
    tick = tick_of_most_saved(trace, trace.steps[0], trace.end)
    return sum(storage.bytes for storage in live_at(trace, tick) if storage.cause == "saved")
