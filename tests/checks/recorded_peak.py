"""The peak of a model's step by one recording, which the bytes of a finding are held against."""

from __future__ import annotations

from typing import Any

import memplan
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import at_least


def recorded_peak(make: Any, *inputs: Any, device: str = "cpu", cudnn: Any = None, **options: Any) -> int:
    """Bytes at the peak of a training step, with the smallest workspaces."""
    build = build_of(make, StepOptions(inputs, **options).checked(), on_card=device != "cpu")
    return memplan.simulate(at_least(memplan.record(build, device=device, cudnn=cudnn))).peak_allocated
