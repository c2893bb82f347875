"""A sweep's fixed part and slope are those of steps that really ran; points that fail leave the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from environment import thinned
from torch import nn

import memplan
from memplan.errors import InputError, StepError
from memplan.trace.step import StepOptions, build_of


def convolutions(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


STEPS: list[tuple[Callable[[], nn.Module], str, str, dict[str, Any]]] = [
    (convolutions, "1x3x32x32", "batch", {}),
    (convolutions, "2x3x32x32", "size", {"optimizer": torch.optim.AdamW}),
    (perceptron, "64x64", "batch", {"optimizer": torch.optim.SGD}),
    (encoder, "4x16x32", "batch", {}),
]
VALUES = {"batch": (64, 128, 512), "size": (64, 96, 160)}


@pytest.mark.parametrize(
    ("make", "given", "axis", "options"), thinned(STEPS, 2), ids=lambda one: getattr(one, "__name__", None)
)
def test_fixed_part_and_slope_are_those_of_measured_steps(
    make: Callable[[], nn.Module], given: str, axis: str, options: dict[str, Any]
) -> None:
    swept = memplan.sweep(make, {axis: VALUES[axis]}, given, device="cpu", jobs=1, **options)
    peaks, measures = [], []
    for value in VALUES[axis]:
        sizes = given.split("x")
        shape = "x".join([str(value), *sizes[1:]] if axis == "batch" else [*sizes[:2], str(value), str(value)])
        built = build_of(make, StepOptions((shape,), **options).checked())
        peaks.append(memplan.simulate(memplan.measure(built, device="cpu")).peak_allocated)
        measures.append(value if axis == "batch" else value**2)
    slope, fixed = numpy.polyfit(measures, peaks, 1)
    (fit,) = swept.fits
    assert fit.values == VALUES[axis]
    assert fit.slope == pytest.approx(slope, rel=0.01)
    assert fit.fixed == pytest.approx(fixed, rel=0.01, abs=0.001 * peaks[-1])
    assert fit.residual < 0.01


def test_parts_of_a_row_add_up_to_its_peak() -> None:
    swept = memplan.sweep(convolutions, {"batch": "1,2", "width": "4,8"}, "1x3x16x16", device="rtx4090", jobs=1)
    assert len(swept.rows) == 4
    for row in swept.rows:
        parts = sum(row[cause] for cause in memplan.explain(perceptron, "1x64", device="cpu").by_cause if cause in row)
        assert parts + row["workspace_low"] == row["peak"]
        assert row["peak"] + row["fragmentation"] == row["reserved"]
        assert row["peak"] <= row["peak_high"] <= row["reserved_high"] < row["needs_high"]
    for fit in swept.fits:
        causes = [line for name, line in fit.lines.items() if name in swept.rows[0] and name in _causes(swept.rows[0])]
        assert sum(line.fixed for line in causes) == pytest.approx(fit.fixed, abs=1)
        assert sum(line.slope for line in causes) == pytest.approx(fit.slope, abs=1e-3)


def _causes(row: dict[str, Any]) -> list[str]:
    names = list(row)
    return names[names.index("needs_high") + 1 : names.index("workspace_high")]


def test_a_point_that_fails_is_kept_with_its_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    swept = memplan.sweep(model, {"1.in_features": [8, 9], "batch": [2, 4]}, "2x8", jobs=1)
    assert [row["status"] for row in swept.rows] == ["ok", "ok", "failed", "failed"]
    assert "step 1 raised RuntimeError" in swept.rows[2]["reason"]
    assert "peak" not in swept.rows[2]


def test_a_module_is_sent_without_its_data_and_left_as_it_is() -> None:
    model = convolutions()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    image = torch.ones(2, 3, 16, 16)
    swept = memplan.sweep(model, {"batch": [2, 4]}, image, jobs=1)
    made = memplan.sweep(convolutions, {"batch": [2, 4]}, "2x3x16x16", jobs=1)
    assert swept.rows == made.rows
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_json_holds_everything() -> None:
    swept = memplan.sweep(convolutions, {"size": ["16x16", "16x24", 32]}, "1x3x16x16", jobs=1)
    data = json.loads(json.dumps(swept.to_dict()))
    assert data["rows"] == swept.rows
    assert data["axes"] == {"size": ["16x16", "16x24", 32]}
    assert data["fits"][0]["lines"]["peak"]["slope"] == swept.fits[0].slope


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({}, "no axis to sweep over"),
        ({"batch": []}, "batch has no values"),
        ({"batch": "8:1"}, "batch 8:1 is reversed, and so empty"),
        ({"sequence": [1]}, "has no sequence to vary"),
        ({"depth": [1]}, "convolutions has no argument 'depth'"),
    ],
)
def test_axes_that_cannot_be_are_one_message(axes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        memplan.sweep(convolutions, axes, "1x3x8x8", jobs=1)
    assert words in str(error.value)


def test_an_argument_with_the_name_of_a_column_is_refused() -> None:
    def scaled(saved: int) -> nn.Module:
        return nn.Linear(64, saved)

    with pytest.raises(InputError, match="the axis saved, and rows hold something else by that name"):
        memplan.sweep(scaled, {"saved": [1, 2]}, "1x64", jobs=1)


def test_where_no_point_can_be_recorded_it_says_why() -> None:
    with pytest.raises(InputError, match="none of the 2 points can be recorded; the first, at batch 1: step 1 raised"):
        memplan.sweep(perceptron, {"batch": [1, 2]}, "1x63", jobs=1)
    with pytest.raises(StepError, match="at batch 1: step 1 raised"):
        memplan.sweep(perceptron, {"batch": [1]}, "1x63", jobs=1)


def test_a_trace_has_no_other_values() -> None:
    trace = memplan.record(build_of(perceptron, StepOptions(("1x64",)).checked()))
    with pytest.raises(InputError, match="Expected what can be recorded again"):
        memplan.sweep(trace, {"batch": [1]})


@pytest.mark.parametrize("jobs", [0, -1, True, 1.5])
def test_jobs_are_a_number_of_processes(jobs: Any) -> None:
    with pytest.raises(InputError, match="jobs="):
        memplan.sweep(perceptron, {"batch": [1]}, "1x64", jobs=jobs)
