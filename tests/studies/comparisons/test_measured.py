"""A measurement beside its prediction: each part's peak by torch's counters, and whether all are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.steps import STEPS

import memplan
from memplan._bytes import format_bytes
from memplan.reports.compare import measured_report
from memplan.reports.terminal import text_of
from memplan.studies.comparisons.measured import Peak, compare_with_prediction
from memplan.trace.records import Counters
from memplan.trace.trace import Trace


@pytest.fixture(scope="module")
def predicted() -> Trace:
    return memplan.record(STEPS["frozen_and_tied"], device="h100")


def measured(predicted: Trace, more: int) -> Trace:
    """As predicted, but that torch counted some bytes more at the last step's peak."""
    timeline = memplan.simulate(predicted)
    counters = [Counters(one.peak_allocated, one.peak_reserved) for one in (timeline.build, *timeline.steps)]
    counters[-1] = replace(counters[-1], allocated=counters[-1].allocated + more)
    return replace(predicted, origin="measured", counters=tuple(counters))


def test_what_is_as_predicted(predicted: Trace) -> None:
    found = compare_with_prediction(predicted, measured(predicted, 0), "net")
    assert found.same
    assert [row.part for row in found.peaks] == [
        "building", "building, reserved", "step 1", "step 1, reserved", "step 2", "step 2, reserved"
    ]  # fmt: skip


def test_one_byte_more_is_a_difference(predicted: Trace) -> None:
    found = compare_with_prediction(predicted, measured(predicted, 1), "net")
    assert not found.same
    assert [row.measured - row.predicted for row in found.peaks] == [0, 0, 0, 0, 1, 0]


def test_the_two_steps_are_compared_by_cause(predicted: Trace) -> None:
    largest = max((one for one in predicted.storages if one.cause == "saved"), key=lambda one: one.bytes)
    other = replace(predicted, storages=tuple(
        replace(one, bytes=2 * one.bytes) if one is largest else one for one in predicted.storages
    ))  # fmt: skip
    found = compare_with_prediction(predicted, replace(other, origin="measured", counters=()), "net")
    assert found.comparison.a.origin == "recorded"
    assert found.comparison.b.origin == "measured"
    rows = {row.cause: row.difference for row in found.comparison.by_cause}
    assert sum(rows.values()) == memplan.simulate(other).peak_allocated - memplan.simulate(predicted).peak_allocated


def test_how_far_off() -> None:
    assert Peak("step 1", 90, 90, 100).off == pytest.approx(-0.1)
    assert Peak("building", 0, 0, 0).off is None
    assert Peak("step 1", 90, 110, 100).off == 0
    assert Peak("step 1", 110, 150, 100).off == pytest.approx(0.1)
    assert Peak("step 1", 50, 75, 100).off == pytest.approx(-0.25)


def test_workspaces_that_are_not_known_make_an_interval() -> None:
    """Without cuDNN's answers a convolution's workspace is one: what was measured in the low case lies within."""
    trace = memplan.record(STEPS["convolutions_3d"], device="h100", cudnn=False)
    low = memplan.simulate(trace, workspace="low")
    counters = tuple(Counters(one.peak_allocated, one.peak_reserved) for one in (low.build, *low.steps))
    found = compare_with_prediction(trace, replace(trace, origin="measured", counters=counters), "net")
    last = found.peaks[-2]
    assert last.low == last.measured < last.predicted
    assert last.off == 0
    assert not found.same
    row = next(line for line in text_of(measured_report(found)).splitlines() if line.startswith("step 2 "))
    assert f"{format_bytes(last.low)} to {format_bytes(last.predicted)}" in row
    assert row.split()[-1] == "within"
