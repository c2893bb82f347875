"""Workspaces larger than tensors, and shapes that change under cudnn.benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan

ID = "workspace-surprise"


def found(make: Any, *inputs: str, device: str = "h100") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(make, *inputs, device=device) if finding.id == ID]


def deep() -> nn.Module:
    return nn.Sequential(nn.Conv3d(64, 64, 3, padding=1), nn.Conv3d(64, 64, 3, padding=1))


def test_the_interval_is_that_of_the_simulation() -> None:
    (finding,) = found(deep, "1x64x24x24x24")
    explained = memplan.explain(deep, "1x64x24x24x24", device="h100")
    assert explained.card is not None
    assert finding.details["low"] == explained.timeline.peak_allocated
    assert finding.details["high"] == explained.card.peak_allocated_high
    assert "128947" in finding.advice[-1]


def test_not_on_the_cpu_and_not_of_a_matrix_product() -> None:
    assert found(deep, "1x64x24x24x24", device="cpu") == []
    assert found(lambda: nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)), "8x64x64x64") == []


@pytest.mark.parametrize(("benchmark", "changing", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_changing_shapes_under_benchmark(benchmark: bool, changing: bool, expected: int) -> None:
    def build() -> Any:
        torch.backends.cudnn.benchmark = benchmark
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
    trace = memplan.record(build, device="h100")
    bounds = [s.bytes for s in trace.storages if s.cause == "workspace" and s.op is not None and s.low is not None]
    assert finding.details["workspace"] == max(bounds) > 0
    assert "2 convolutions met inputs of 2 sizes in 2 steps" in finding.message
