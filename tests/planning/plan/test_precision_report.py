"""What computing in lower precision comes to: held against the model's own modules."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.plan.precision_report import (
    BLOCKS,
    blocks,
    cast_copy_peak,
    lower_precision_decisions,
    slower_blocks,
)
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule

LOW = Precision("bfloat16")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *stages, nn.Flatten(), nn.Linear(8 * 64, 5))


def captured(precision: Precision = LOW) -> Captured:
    return capture(net(), call_of((torch.randn(4, 3, 8, 8),), {}), precision)


def test_a_block_is_told_for_every_part_that_computes_in_it() -> None:
    graph = captured().graph
    found = lower_precision_decisions(graph, LOW)
    assert [one.layer for one in found] == ["0", "1.0", "1.1", "1.2", "2.0", "2.1", "2.2", "3.0", "3.1", "3.2", "5"]
    assert {(one.lever, one.grade, one.scope.kind, one.seconds) for one in found} == {
        ("lower precision", "lossy", "segment", 0.0)
    }
    # of a stage: a convolution, a norm and a ReLU, each in two bytes instead of four an element
    assert [one.bytes for one in found[1:10]] == [2 * 4 * 8 * 8 * 8] * 9
    weights = {name: 2 * one.numel() for name, one in net().named_parameters()}
    assert found[1].details["cast_copies"] == weights["1.0.weight"] + weights["1.0.bias"]
    assert lower_precision_decisions(captured(EXACT).graph, EXACT) == ()


def test_blocks_are_the_deepest_modules_of_which_there_are_few() -> None:
    graph = captured().graph
    found = blocks(graph)
    assert len(found) <= BLOCKS
    assert sum(map(len, found.values())) == len(graph.forward_ops) + len(graph.backward_ops)
    assert all((op.layer or block).startswith(block) for block, ops in found.items() for op in ops)


def test_copies_of_weights_are_counted_at_their_most() -> None:
    graph = captured().graph
    low = sum(2 * one.numel() for name, one in net().named_parameters() if name.split(".")[-2] in ("0", "5"))
    kept = cast_copy_peak(schedule(graph, Choices()))
    assert low / 2 < kept <= low
    copies = [op.makes[0] for op in graph.forward_ops if op.target == "aten._to_copy.default"]
    again = cast_copy_peak(schedule(graph, Choices(recompute=frozenset(copies))))
    assert again < kept


def test_a_plan_says_weights_copies_and_state_apart() -> None:
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    from memplan.planning.planner import Planner
    from memplan.planning.settings import Settings

    settings = Settings(optimizer=torch.optim.Adam, allow="lossy", precision=LOW, costs="roofline")
    plan = Planner(net()).planned(call_of((x,), {}), settings, 1 << 30).plan
    size = sum(one.numel() for one in net().parameters())
    assert (plan.resident["weight"], plan.grade) == (4 * size, "lossy")
    assert plan.resident["optimizer_state"] >= 8 * size
    assert size < plan.cast_copies <= 2 * size
    assert "the optimizer's state" in plan.summary
    assert "Weights stay" in plan.summary
    assert memplan.Plan.from_json(plan.to_json()) == plan
    assert F.cross_entropy(net()(x), y) > 0  # the step is one that runs


def test_blocks_that_take_longer_in_fewer_bits_are_told() -> None:
    def timed(graph: JointGraph, seconds: dict[str, float]) -> JointGraph:
        taken = {id(op): seconds.get(block, 1.0) / len(ops) for block, ops in blocks(graph).items() for op in ops}
        return replace(graph, ops=tuple(replace(op, seconds=taken.get(id(op), 0.0)) for op in graph.ops))

    exact, low = captured(EXACT).graph, captured().graph
    assert slower_blocks(timed(exact, {}), timed(low, {"1.1": 1.5, "2.0": 0.5, "5": 1.1}), "bfloat16") == ("1.1", "5")
    assert slower_blocks(timed(exact, {}), timed(exact, {"1.1": 1.5}), "bfloat16") == ()  # computes in float32 there


def test_layers_apart_compute_as_they_are_written() -> None:
    model = net()
    graph = capture(model, call_of((torch.randn(4, 3, 8, 8),), {}), replace(LOW, apart=("1", "5"))).graph
    computing = (op for op in graph.forward_ops if "conv" in op.target or "mm" in op.target)
    dtypes = {op.layer: graph.values[op.makes[0]].dtype for op in computing}
    assert dtypes == {"0": "bfloat16", "1.0": "float32", "2.0": "bfloat16", "3.0": "bfloat16", "5": "float32"}
    assert not [name for module in model.modules() for name in vars(module) if name == "forward"]
