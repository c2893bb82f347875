"""A step at a position that was not recorded is what its recording gives."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import memplan
from memplan.studies.capacity import extrapolation as module
from memplan.studies.capacity.extrapolation import Sample, extrapolate_storages, padding_of
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace


def attention(length: int) -> Trace:
    make = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # noqa: E731
    return memplan.record(build_of(make, StepOptions((f"2x{length}x16",)).checked()), device="cpu")


def test_guesses_come_from_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [Sample(n, float(n), 0, True, attention(n)) for n in (8, 16, 64)]
    asked: dict[int, Trace] = {}

    def last(fits: Any, low: int, high: int | None) -> int:
        for position in (24, 100):
            fits(position)
        return 0

    seen: list[Trace] = []
    monkeypatch.setattr(module, "_bisect", last)
    extrapolate_storages(samples, float, lambda trace: bool(seen.append(trace)))
    asked = dict(zip((24, 100), seen, strict=True))
    for position, made in asked.items():
        real = attention(position)
        assert [one.bytes for one in made.storages] == [one.bytes for one in real.storages]
        assert memplan.simulate(made).peak_allocated == memplan.simulate(real).peak_allocated


@pytest.mark.parametrize("stride", [7, 14, 32, 100, 512, 1000])
@pytest.mark.parametrize("power", [1, 2])
def test_a_stride_that_places_are_padded_to_is_known(stride: int, power: int) -> None:
    positions = [1024, 2048, 167_144]
    sizes = [12 * (-(-position // stride)) ** power for position in positions]
    found = padding_of(positions, sizes, power)
    assert found is not None
    assert [found[1] * (-(-position // found[0])) ** power for position in positions] == sizes


def test_bytes_in_proportion_have_no_stride() -> None:
    assert padding_of([8, 16, 32], [800, 1600, 3200]) is None
    assert padding_of([8, 16, 32], [64, 64, 64]) is None
