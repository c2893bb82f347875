"""Copies left out and put in, and casts made once: what the graph looks like; its bits are test_capture's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import JointGraph


def targets(graph: JointGraph) -> list[str]:
    return [op.target for op in graph.ops if not op.is_view]


def test_a_change_in_place_saves_no_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(True), nn.Linear(4, 4))
    graph = capture(model, call_of((torch.randn(3, 4),), {})).graph
    assert "aten.clone.default" not in targets(graph)


class Copies(nn.Module):
    def forward(self, x: Tensor) -> Any:
        h = x * 2
        return h, h.clone(), x.clone()


def test_a_copy_that_is_returned_stays_one() -> None:
    graph = capture(Copies(), call_of((torch.randn(3, 4, requires_grad=True),), {})).graph
    assert targets(graph).count("aten.clone.default") == 2
    assert len({graph.base(value) for value in graph.outputs}) == 3


@pytest.mark.parametrize("mode", ["replicate", "reflect", "constant"])
def test_padding_of_nothing_is_no_copy(mode: str) -> None:
    """A decoder pads what it has upsampled to the size of the encoder's, in most cases by nothing. Elements that are
    cut off on one side and added on the other keep the shape, but are no copy."""

    def graph_for(padding: tuple[int, ...]) -> JointGraph:
        class Pads(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.pad(x.sin(), padding, mode=mode).cos()

        return capture(Pads(), call_of((torch.randn(2, 3, 5, 6, requires_grad=True),), {})).graph

    assert not [target for target in targets(graph_for((0, 0, 0, 0))) if "_pad" in target]
    assert [target for target in targets(graph_for((1, -1, 0, 0))) if "_pad" in target]


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4, 4))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) @ self.scale.t()[:, :4]
        self.scale = self.scale * 2
        return y


def test_backward_reads_a_copy_of_what_the_step_changes() -> None:
    graph = capture(Changes(), call_of((torch.randn(3, 4),), {})).graph
    ((changed, _),) = graph.mutations
    assert graph.values[changed].path == "scale"
    assert not any(changed in op.reads for op in graph.backward_ops)
    copies = [op for op in graph.forward_ops if op.target == "aten.clone.default" and changed in op.reads]
    assert len(copies) == 1
    assert copies[0].must_run_once
    assert any(copies[0].makes[0] in op.reads for op in graph.backward_ops)
    for op in graph.backward_ops:
        if op.gradient_of is not None:
            assert graph.ops[op.gradient_of].phase == "forward"


class Shared(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x).tanh()
        return x.float()


def test_a_parameter_is_cast_once_under_autocast() -> None:
    for times in (1, 2, 4):
        with torch.autocast("cpu", torch.bfloat16):
            graph = capture(Shared(times), call_of((torch.randn(3, 4),), {})).graph
        weight = next(value for value in graph.values if value.path == "linear.weight")
        casts = [op for op in graph.ops if op.target == "aten._to_copy.default"]
        assert sum(weight.id in op.reads for op in casts) == 1
        back = [op for op in casts if op.phase == "backward" and graph.values[op.makes[0]].shape == (4, 4)]
        assert [graph.values[op.makes[0]].dtype for op in back] == ["float32"]
        sums = [op for op in graph.backward_ops if op.target == "aten.add.Tensor"]
        assert [graph.values[op.makes[0]].dtype for op in sums] == ["bfloat16"] * 2 * (times - 1)
