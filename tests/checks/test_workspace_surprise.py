"""Workspaces larger than tensors, and shapes that change under cudnn.benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from checks.recorded_peak import recorded_peak
from torch import nn

import memplan
from memplan._bytes import format_bytes
from memplan.cudnn.ask import Answers
from memplan.cudnn.expected_workspace import ExpectedWorkspace
from memplan.cudnn.questions import ExecutionPlan, Question
from memplan.trace import workspaces

ID = "workspace-surprise"


def found(make: Any, *inputs: str, device: str = "h100") -> list[memplan.Finding]:
    """Return the findings without a cuDNN: workspaces are intervals."""
    return [finding for finding in memplan.check(make, *inputs, device=device, cudnn=False) if finding.id == ID]


def deep() -> nn.Module:
    return nn.Sequential(nn.Conv3d(64, 64, 3, padding=1), nn.Conv3d(64, 64, 3, padding=1))


def test_the_interval_is_that_of_the_simulation() -> None:
    (finding,) = found(deep, "1x64x24x24x24")
    explained = memplan.explain(deep, "1x64x24x24x24", device="h100", cudnn=False)
    assert explained.card is not None
    assert finding.details["low"] == explained.timeline.peak_allocated
    assert finding.details["high"] == explained.card.peak_allocated_high
    assert "128947" in finding.advice[-1]


def test_not_on_the_cpu_and_not_of_a_matrix_product() -> None:
    assert found(deep, "1x64x24x24x24", device="cpu") == []
    assert found(lambda: nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)), "8x64x64x64") == []


@pytest.mark.parametrize(("tries", "changing", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_changing_shapes_under_benchmark(tries: bool, changing: bool, expected: int) -> None:
    def build() -> Any:
        torch.backends.cudnn.benchmark = tries
        model, sizes = nn.Conv2d(1, 1, 3).cuda(), [16, 20]

        def step() -> None:
            for size in sizes if changing else sizes[:1]:
                model(torch.zeros(1, 1, size, size, device="cuda")).sum().backward()

        return step

    assert len([f for f in found(build) if f.details["kind"] == "benchmark"]) == expected


def test_batches_of_changing_sizes_under_benchmark() -> None:
    """The size changes from step to step; the workspace named is the largest that the recording bounds."""

    def build() -> Any:
        torch.backends.cudnn.benchmark = True
        model, sizes = nn.Sequential(nn.Conv3d(8, 16, 3), nn.Conv3d(16, 8, 1)).cuda(), iter([12, 14])

        def step() -> None:
            size = next(sizes)
            model(torch.zeros(1, 8, size, size, size, device="cuda")).sum().backward()

        return step

    (finding,) = [f for f in found(build) if f.details["kind"] == "benchmark"]
    assert finding.severity == "info"
    assert [(row["layer"], row["sizes"]) for row in finding.details["layers"]] == [("0", 2), ("1", 2)]
    trace = memplan.record(build, device="h100", cudnn=False)
    bounds = [s.bytes for s in trace.storages if s.cause == "workspace" and s.op is not None and s.low is not None]
    assert finding.details["workspace"] == max(bounds) > 0
    assert "2 convolutions met inputs of 2 sizes in 2 steps" in finding.message


def test_an_expected_workspace_is_not_called_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MiB for tensors of 3.4 MiB each, in one of fifty cases none, in one of thirty 200 MiB."""
    sizes = ExpectedWorkspace(100 << 20, (0, 100 << 20, 200 << 20), (0.02, 0.94, 0.04))

    def ask(library: Any, card: Any, questions: Iterable[Question]) -> Answers:
        return Answers({}, expected=dict.fromkeys(questions, sizes))

    monkeypatch.setattr(workspaces, "ask", ask)
    findings = memplan.check(deep, "1x64x24x24x24", device="h100", cudnn="9.20.0")
    (finding,) = [finding for finding in findings if finding.id == ID]
    ends = memplan.explain(deep, "1x64x24x24x24", device="h100", cudnn="9.20.0").card
    assert ends is not None
    assert ends.allocated_band is not None
    peak = finding.details["high"]
    assert peak == finding.details["low"] + (100 << 20), "the peak is beside one workspace"
    low, high = ends.allocated_band
    assert low <= peak < high
    more = high - peak - (100 << 20)  # a formula may be off by 1 % and 64 KiB
    assert 0 <= more <= (200 << 20) // 100 + (1 << 20), "at least one convolution has 200 MiB in more than 2.5 %"
    assert finding.message.startswith("cuDNN is expected to take 100.0 MiB of workspace for ")
    assert (
        f"the step's peak is about {format_bytes(peak)} (95 %: {format_bytes(low)} to {format_bytes(high)}), and"
        in (finding.message)
    )
    assert "engine" not in finding.message
    assert finding.advice == ("For cuDNN's own plan: pip install memplan[cudnn]; or measure it on the card",)


def laid_out_deep() -> nn.Module:
    model = deep()
    return model.to(memory_format=torch.channels_last_3d)  # pyright: ignore[reportCallIssue]  # torch's stub lacks it


def answering(workspace: Callable[[Question], int]) -> Callable[..., Answers]:
    """A cuDNN that names one plan for each question."""

    def ask(library: Any, card: Any, questions: Iterable[Question]) -> Answers:
        return Answers({one: (ExecutionPlan("eng0", workspace(one)),) for one in questions})

    return ask


def odd(question: Question) -> int:
    """100 MiB, but for images whose sizes are multiples of 8 only 40 MiB, and in channels last none."""
    if question.channels_last:
        return 0
    return (40 if all(size % 8 == 0 for size in question.x[2:]) else 100) << 20


@pytest.mark.parametrize("laid_out", [False, True])
def test_ways_out_are_the_peaks_of_the_changed_steps(laid_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def workspace(question: Question) -> int:
        return 100 << 20 if laid_out and question.channels_last else odd(question)

    monkeypatch.setattr(workspaces, "ask", answering(workspace))
    size = "1x64x21x24x24"

    def peak(make: Callable[[], nn.Module], inputs: str) -> int:
        return recorded_peak(make, inputs, device="h100", cudnn="9.19.0")

    (finding,) = [one for one in memplan.check(deep, size, device="h100", cudnn="9.19.0") if one.id == ID]
    expected = {
        "channels_last_3d": peak(laid_out_deep, size),
        "padded": peak(deep, "1x64x24x24x24"),
        "cuDNN 9.26.0": peak(deep, size),
    }
    assert finding.details["remedies"] == expected
    told = [text for text in finding.advice if "the peak is" in text]
    assert len(told) == (1 if laid_out else 2)
    assert told[-1] == f"Pad the input to 1x64x24x24x24: the peak is {format_bytes(expected['padded'])}"
    vain = "No less with: channels_last_3d, cuDNN 9.26.0" if laid_out else "No less with: cuDNN 9.26.0"
    assert finding.advice[-1] == vain


def test_an_input_of_good_sizes_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "ask", answering(lambda _: 100 << 20))
    (finding,) = [one for one in memplan.check(deep, "1x64x8x8x8", device="h100", cudnn="9.19.0") if one.id == ID]
    assert set(finding.details["remedies"]) == {"channels_last_3d", "cuDNN 9.26.0"}
    assert finding.advice[-1] == "No less with: channels_last_3d, cuDNN 9.26.0"
