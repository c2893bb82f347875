"""What ops take on a card, held against torch's documentation of its workspaces. On an emulated card: test_fit_card."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memplan.devices import find
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost.cuda_workspace import libraries, on_card
from memplan.planning.graph.placement import Home


def test_cublas_keeps_one_workspace_as_both_passes_of_a_plan_run_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # importing MONAI sets it
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), call_of((torch.randn(4, 8),), {})).graph
    # CUDA's documentation of torch: 4096 KiB twice and 16 KiB eight times by default, 32 MiB on sm_90
    assert libraries(graph, Home("cuda:0", find("rtx4090"))) == (2 * 4096 + 8 * 16) * 1024
    assert libraries(graph, Home("cuda:0", find("h100"))) == 32 << 20
    assert libraries(graph, Home()) == 0


def test_a_convolution_takes_a_workspace_of_cudnn_for_a_while() -> None:
    graph = capture(nn.Conv2d(64, 64, 3, padding=1), call_of((torch.randn(2, 64, 32, 32),), {})).graph
    found = on_card(graph, find("rtx4090"))
    scratch = {op.target: op.scratch for op in found.graph.ops}
    assert scratch["aten.convolution.default"] > 0
    assert scratch["aten.convolution_backward.default"] > 0
    assert all(size % 512 == 0 for size in scratch.values())
