"""A point has the numbers of an explanation, or the reason why there are none."""

from __future__ import annotations

import sys

import pytest
from torch import nn

import memplan
from memplan.errors import InputError, StepError
from memplan.simulation.simulate import simulate
from memplan.studies.axes.changed_layers import LayerChange
from memplan.studies.axes.subject import Subject
from memplan.studies.sweeps.points import PARTS, record_point, without_build_temporaries
from memplan.trace.recording.session import choose_target
from memplan.trace.records import ExpectedSize, Storage
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_point_is_what_explain_says(device: str) -> None:
    subject = Subject(convolutions, StepOptions(("1x1x16x16x16",)).checked())
    found = record_point(subject, choose_target(device)).bytes
    made = memplan.explain(convolutions, "1x1x16x16x16", device=device)
    assert found is not None
    row = found.row()
    of_ranks = {"gathered_weight": 0, "communication": 0}
    assert {**found.causes, **of_ranks, "workspace": found.workspace_low} == made.by_cause
    assert (
        sum(row[cause] for causes in PARTS.values() for cause in causes) == found.peak == made.timeline.peak_allocated
    )
    if made.card is not None:
        charged = [sum(c.low for c in made.card.charges), sum(c.high for c in made.card.charges)]
        assert [found.needs, found.needs_high] == charged
        assert found.answer == made.card.verdict.answer
    else:
        assert found.needs == found.needs_high == found.peak


def test_an_error_is_kept() -> None:
    outcome = record_point(Subject(convolutions, StepOptions(("1x2x8x8x8",)).checked()), choose_target("cpu"))
    assert outcome.bytes is None
    assert isinstance(outcome.error, StepError)


def test_code_that_ends_the_process_is_an_error() -> None:
    def leaves() -> nn.Module:
        sys.exit(3)

    outcome = record_point(Subject(leaves, StepOptions(("1x2",)).checked()), choose_target("cpu"))
    assert isinstance(outcome.error, InputError)
    assert "sys.exit(3)" in str(outcome.error)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_layers_made_anew_take_what_they_take_from_the_start(kernel: int) -> None:
    def stack(size: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(64, 64, size, padding="same"), nn.Conv2d(64, 8, 1))

    options = StepOptions(("1x64x8x8",), train=False).checked()
    target = choose_target("cpu")
    changed = Subject(lambda: stack(3), options, changes=(LayerChange("0", "kernel_size", kernel),))
    trace = memplan.record(Subject(lambda: stack(kernel), options).build(on_card=False), device="cpu")
    found = record_point(changed, target).bytes
    assert found is not None
    assert found.peak == max(step.peak_allocated for step in memplan.simulate(trace).steps)


def test_expected_workspaces_of_what_is_emptied_have_no_band() -> None:
    """A build that runs a convolution: its workspace is freed before the first step."""
    storages = (
        Storage(0, 1024, born=1, died=2, device="cuda:0", cause="workspace", op=None),
        Storage(1, 2048, born=4, died=5, device="cuda:0", cause="workspace", op=None),
    )
    trace = Trace(
        origin="recorded", device="a100-80gb", torch="2.13", ops=(), storages=storages, layers=(), steps=(3,), end=6,
        expected=(ExpectedSize(0, 512, 1 << 20), ExpectedSize(1, 1024, 4096)),
    )  # fmt: skip
    steps = without_build_temporaries(trace)
    assert steps.expected == (ExpectedSize(1, 1024, 4096),)
    assert simulate(steps, workspace="high").peak_allocated == 4096
