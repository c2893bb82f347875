"""A step at a place that was not recorded is what its recording gives."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import memplan
from memplan.studies.capacity import extrapolation as module
from memplan.studies.capacity.extrapolation import Sample, by_steps
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace


def attention(length: int) -> Trace:
    make = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # noqa: E731
    return memplan.record(build_of(make, StepOptions((f"2x{length}x16",)).checked()), device="cpu")


def test_guesses_come_from_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [Sample(n, float(n), 0, True, attention(n)) for n in (8, 16, 64)]
    asked: dict[int, Trace] = {}

    def last(fits: Any, low: int, high: int | None) -> int:
        for place in (24, 100):
            fits(place)
        return 0

    seen: list[Trace] = []
    monkeypatch.setattr(module, "_last", last)
    by_steps(samples, float, lambda trace: bool(seen.append(trace)))
    asked = dict(zip((24, 100), seen, strict=True))
    for place, made in asked.items():
        real = attention(place)
        assert [one.bytes for one in made.storages] == [one.bytes for one in real.storages]
        assert memplan.simulate(made).peak_allocated == memplan.simulate(real).peak_allocated
