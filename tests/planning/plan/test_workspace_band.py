"""The band of a planned step's peak, held against every choice that cuDNN may make, each with its probability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch import nn

from memplan.cudnn.ask import Answers
from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.expected_workspace import ExpectedWorkspace
from memplan.cudnn.questions import Question
from memplan.devices import Device, find
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost import cuda_workspace
from memplan.planning.cost.cuda_workspace import with_card_workspaces
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.plan.workspace_band import workspace_band
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.schedule.to_trace import timeline_of
from memplan.planning.study import _expected_workspaces  # pyright: ignore[reportPrivateUsage]

CARD = find("rtx4090")
OUTSIDE = OutsideMemory(home=Home("cuda:0", CARD))
SIZES = {
    "forward": ExpectedWorkspace(0, (0, 40 << 20, 90 << 20), (0.6, 0.39, 0.01)),
    "input gradient": ExpectedWorkspace(60 << 20, (30 << 20, 60 << 20), (0.3, 0.7)),
    "weight gradient": ExpectedWorkspace(8 << 20, (0, 8 << 20, 70 << 20), (0.01, 0.98, 0.01)),
}


@pytest.fixture(autouse=True)
def expecting(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(library: Cudnn, device: Device, questions: Iterable[Question]) -> Answers:
        return Answers({}, expected={question: SIZES[question.kind] for question in questions})

    monkeypatch.setattr(cuda_workspace, "ask", ask)
    monkeypatch.setattr(cuda_workspace, "find_cudnn", lambda environment: Cudnn(None, 92000, is_default=True))


def _step() -> tuple[Schedule, dict[int, cuda_workspace.ExpectedScratch]]:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
    found = with_card_workspaces(capture(model, call_of((torch.randn(4, 16, 32, 32),), {})).graph, CARD)
    return schedule(found.graph, Choices()), dict(found.expected_scratch)


def test_the_band_holds_95_percent_of_what_cudnn_may_choose() -> None:
    planned, expected = _step()
    assert len(expected) == 5  # forward twice, two gradients of weights, one of data
    mass = dict[int, float]()
    choices = [list(zip(one.sizes.sizes, one.sizes.probabilities, strict=True)) for one in expected.values()]
    for chosen in product(*choices):
        scratch = dict(zip(expected, (size for size, _ in chosen), strict=True))
        ops = tuple(replace(op, scratch=scratch.get(op.index, op.scratch)) for op in planned.graph.ops)
        peak = timeline_of(replace(planned, graph=replace(planned.graph, ops=ops)), OUTSIDE).peak_reserved
        mass[peak] = mass.get(peak, 0.0) + prod(probability for _, probability in chosen)
    band = workspace_band(planned, OUTSIDE, expected)
    assert band is not None
    low, high = band
    assert sum(share for peak, share in mass.items() if low <= peak <= high) >= 0.95
    assert low <= timeline_of(planned, OUTSIDE).peak_reserved <= high
    assert min(mass) < low or high < max(mass)  # and it is no interval of all that is possible


def test_measured_scratch_has_no_band() -> None:
    planned, expected = _step()
    ops = tuple(replace(op, scratch=12345 if op.index in expected else op.scratch) for op in planned.graph.ops)
    measured = replace(planned, graph=replace(planned.graph, ops=ops))
    assert workspace_band(measured, OUTSIDE, expected) is None


def test_the_note_has_the_band_and_says_where_it_ends_above_the_budget() -> None:
    note = _expected_workspaces(3, 100 << 20, (90 << 20, 120 << 20), 110 << 20)
    assert note == (
        "the workspaces of 3 ops are those that cuDNN is expected to choose: the plan needs about 100.0 MiB "
        "(95 %: 90.0 MiB to 120.0 MiB), whose upper end is above the budget"
    )
    assert "above" not in _expected_workspaces(3, 100 << 20, (90 << 20, 110 << 20), 110 << 20)
    assert _expected_workspaces(3, 1, None, 1).endswith("expected to choose")
