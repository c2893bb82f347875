"""What ops take on a card, held against torch's documentation of its workspaces. On an emulated card: test_fit_card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from cudnn.scripted_worker import FORWARD, NOWHERE
from torch import nn

from memplan.cudnn.ask import Answers
from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.expected_workspace import ExpectedWorkspace
from memplan.cudnn.questions import ExecutionPlan, Question
from memplan.devices import Device, find
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost import cuda_workspace
from memplan.planning.cost.cuda_workspace import library_workspaces, with_card_workspaces
from memplan.planning.graph.placement import Home
from memplan.trace.semantics.kinds import Temporary, WorkspaceQuery


def test_cublas_keeps_one_workspace_as_both_passes_of_a_plan_run_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # importing MONAI sets it
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), call_of((torch.randn(4, 8),), {})).graph
    # CUDA's documentation of torch: 4096 KiB twice and 16 KiB eight times by default, 32 MiB on sm_90
    assert sum(library_workspaces(graph, Home("cuda:0", find("rtx4090"))).values()) == (2 * 4096 + 8 * 16) * 1024
    assert sum(library_workspaces(graph, Home("cuda:0", find("h100"))).values()) == 32 << 20
    assert library_workspaces(graph, Home()) == {}


def test_products_inside_of_a_kernel_take_the_workspace_of_cublas_too() -> None:
    """A classifier whose only matrix product is in the kernel of its loss."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 100)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(x), labels)

    model, call = Classifier(), call_of((torch.randn(32, 64), torch.randint(100, (32,))), {})
    captured = capture(model, call, kernels=capture(model, call).groups)
    assert not any("mm" in op.target for op in captured.graph.ops)
    assert sum(library_workspaces(captured.graph, Home("cuda:0", find("h100"))).values()) == 32 << 20


def test_a_convolution_takes_a_workspace_cudnn_scratch_for_a_while() -> None:
    graph = capture(nn.Conv2d(64, 64, 3, padding=1), call_of((torch.randn(2, 64, 32, 32),), {})).graph
    found = with_card_workspaces(graph, find("rtx4090"))
    scratch = {op.target: op.scratch for op in found.graph.ops}
    assert scratch["aten.convolution.default"] > 0
    assert scratch["aten.convolution_backward.default"] > 0
    assert all(size % 512 == 0 for size in scratch.values())


def test_a_convolution_takes_what_this_environments_cudnn_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 3 MiB forward, 5 beside the data's gradient, 7 beside the weight's, freed before the bias's is made."""
    sizes = {"forward": 3 << 20, "input gradient": 5 << 20, "weight gradient": 7 << 20}

    def said(library: Cudnn, device: Device, questions: Iterable[Question]) -> Answers:
        return Answers({one: (ExecutionPlan("eng1", sizes[one.kind]), ExecutionPlan("eng2", 0)) for one in questions})

    monkeypatch.setattr(cuda_workspace, "find_cudnn", lambda environment: NOWHERE)
    monkeypatch.setattr(cuda_workspace, "ask", said)
    data = torch.randn(2, 64, 32, 32, requires_grad=True)
    graph = capture(nn.Conv2d(64, 64, 3, padding=1), call_of((data,), {})).graph
    ops = [op for op in with_card_workspaces(graph, find("rtx4090")).graph.ops if "convolution" in op.target]
    found = {tuple(value is not None for value in op.outputs): op.scratch for op in ops}
    assert found == {(True,): 3 << 20, (False, True, True): (7 << 20) - 512, (True, False, False): 5 << 20}


def test_without_cudnn_a_convolution_takes_the_expected_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ExpectedWorkspace(4 << 20, (0, 4 << 20), (0.1, 0.9))

    def expecting(library: Cudnn, device: Device, questions: Iterable[Question]) -> Answers:
        return Answers({}, expected=dict.fromkeys(questions, sizes))

    monkeypatch.setattr(cuda_workspace, "ask", expecting)
    monkeypatch.setattr(cuda_workspace, "find_cudnn", lambda environment: Cudnn(None, 92000, is_default=True))
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(64 * 32 * 32, 2))
    graph = capture(model, call_of((torch.randn(2, 64, 32, 32),), {})).graph
    found = with_card_workspaces(graph, find("rtx4090"))
    assert {op.scratch for op in found.graph.ops if op.target == "aten.convolution.default"} == {4 << 20}
    assert len(found.expected_scratch) == sum("convolution" in op.target for op in graph.ops) == 2


def test_what_is_made_later_takes_the_place_of_an_earlier_workspace() -> None:
    """A convolution's backward whole: 9 MiB beside the data's gradient, before those of weight (144 KiB) and bias."""
    graph = capture(
        nn.Conv2d(64, 64, 3, padding=1), call_of((torch.randn(2, 64, 32, 32, requires_grad=True),), {})
    ).graph
    weight, data = (op for op in graph.ops if op.target == "aten.convolution_backward.default")
    whole = replace(weight, outputs=(data.outputs[0], *weight.outputs[1:]))
    first, second = (
        WorkspaceQuery(replace(FORWARD, kind=kind), "first") for kind in ("input gradient", "weight gradient")
    )
    temporaries = [
        Temporary(1 << 30, workspace=True, query=first, after=0),
        Temporary(1 << 30, workspace=True, query=second, after=1),
    ]
    answered = {first: 9 << 20, second: 7 << 20}
    assert cuda_workspace._scratch(graph, whole, temporaries, answered) == (9 << 20) - 64 * 64 * 9 * 4 - 512
    answered[second] = 9 << 20
    assert cuda_workspace._scratch(graph, whole, temporaries, answered) == (9 << 20) - 512
