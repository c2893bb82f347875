"""The limit beside what the CPU's allocator says of the same step, really run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import memplan
from memplan.cudnn.ask import Answers
from memplan.cudnn.expected_workspace import ExpectedWorkspace
from memplan.cudnn.questions import Question
from memplan.errors import InputError, PeakError, UnitError, UsageError
from memplan.trace import workspaces


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])


def build() -> Callable[[], None]:
    model, data = make(), torch.randn(256, 64)
    return lambda: model(data).sum().backward()


def test_the_limit_is_the_byte_that_the_allocator_measures() -> None:
    measured = memplan.simulate(memplan.measure(build)).peak_allocated
    assert memplan.assert_peak(build, at_most=measured, device="cpu").timeline.peak_allocated == measured
    with pytest.raises(PeakError) as raised:
        memplan.assert_peak(build, at_most=measured - 1, device="cpu")
    assert f"Expected at most {measured - 1} bytes, found {measured}" in str(raised.value)


def test_the_message_says_what_holds_the_peak() -> None:
    with pytest.raises(AssertionError) as raised:
        memplan.assert_peak(make, "256x64", at_most="64 KiB", device="cpu")
    lines = str(raised.value).splitlines()
    # four layers of 64 x 64 weights and 64 biases: 65 KiB, as much again of gradients
    assert lines[0].startswith("make takes ")
    assert "on cpu, " in lines[0]
    assert "Expected at most 65536 bytes" in lines[0]
    assert "weights 65.0 KiB" in lines[1]
    assert any(line.startswith("    (layers 0 to 3).0: ") for line in lines)
    assert isinstance(raised.value, PeakError)
    assert raised.value.explanation.timeline.peak_allocated > 65536


def test_what_the_allocator_holds_is_another_limit() -> None:
    explanation = memplan.explain(build, device="h100")
    peak, reserved = explanation.timeline.peak_allocated, explanation.timeline.peak_reserved
    assert reserved % (2 << 20) == 0  # segments are of 2 MiB and more
    memplan.assert_peak(build, at_most=peak, reserved=reserved, device="h100")
    with pytest.raises(PeakError, match=f"at most {reserved - 1} bytes, found {reserved}"):
        memplan.assert_peak(build, reserved=reserved - 1, device="h100")


def test_a_trace_has_a_limit_too() -> None:
    trace = memplan.record(build, device="cpu")
    with pytest.raises(PeakError):
        memplan.assert_peak(trace, at_most=1000)


def test_no_limit_and_wrong_ones_are_refused() -> None:
    with pytest.raises(UsageError, match='Pass at_most="2 GiB"'):
        memplan.assert_peak(make, "256x64")
    with pytest.raises(UnitError):
        memplan.assert_peak(make, "256x64", at_most="a lot")
    with pytest.raises(InputError):
        memplan.assert_peak(make, at_most="2 GiB")


def test_the_error_goes_through_pickle_as_pytest_xdist_sends_it() -> None:
    error = PeakError("it takes 2 bytes", expected="1", details=("by cause: weights",))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "it takes 2 bytes. Expected 1.\n  by cause: weights"


def test_a_limit_inside_of_the_band_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each workspace is 40 MiB, in one of ten cases none and in one of ten 90 MiB."""
    sizes = ExpectedWorkspace(40 << 20, (0, 40 << 20, 90 << 20), (0.1, 0.8, 0.1))

    def expecting(library: object, card: object, questions: Iterable[Question]) -> Answers:
        return Answers({}, expected=dict.fromkeys(questions, sizes))

    monkeypatch.setattr(workspaces, "ask", expecting)

    def volume() -> nn.Module:
        return nn.Sequential(nn.Conv3d(3, 23, 3, padding=1))

    def limited(limit: int) -> memplan.Explanation:
        return memplan.assert_peak(
            volume, "2x3x21x22x23", at_most=limit, device="a100-80gb", cudnn="9.26.0", train=False
        )

    explanation = limited(1 << 40)
    assert explanation.card is not None
    assert explanation.card.allocated_band is not None
    low, high = explanation.card.allocated_band
    peak = explanation.timeline.peak_allocated
    assert low < peak < high, "the limits below lie on both sides"
    assert limited(peak).timeline == explanation.timeline
    with pytest.raises(PeakError) as inside:
        limited(peak - 1)
    assert any(line.strip().startswith("95 %: ") for line in str(inside.value).splitlines())
    with pytest.raises(PeakError) as below:
        limited(low - 1)
    assert "95 %" not in str(below.value)
