"""Levels of a schedule, worked out by hand."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from planning.graphs import EARLY, HELD, Tape

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import Levels, levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.schedule.to_trace import timeline_of
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.validation.validate import validate


def small(*, encoded: bool = False) -> JointGraph:
    """x (100) and weight (40) -> y (200, 30 of scratch) -> z (200), whose backward op reads z; then the loss (4)."""
    tape = Tape()
    x, weight = tape.value("input", 100), tape.value("parameter", 40)
    y = tape.op("aten.mm.default", [x], 200, 2.0, parameters=[weight], saves="i", scratch=30)
    z = tape.op("aten.relu.default", [y], 200, 1.0, saves="o", overwrites=(y,))
    tape.finish(tape.op("aten.sum.default", [z], 4, 0.5))
    if encoded:
        tape.bits(z, whole=True, scratch=True)
    return tape.graph()


def of(choices: Choices, outside_memory: OutsideMemory | None = None, *, encoded: bool = False) -> Levels:
    return levels(schedule(small(encoded=encoded), choices), outside_memory)


def test_all_kept() -> None:
    found = of(Choices())
    # 140 are there before. mm: 200 + 30; relu works in y's memory; sum: 4 more.
    assert found.forward == (140 + 230, 140 + 200, 140 + 204)
    # The tangent (4) comes; sum's gradient (200) and z; relu's works in that; the weight's gradient is all that stays.
    assert found.between_passes == 344
    assert found.backward == (348, 348 + 200, 344 + 200, 344 + 30 + 40, 184)
    assert found.update == 140 + 4 + 40
    assert found.peak == 548
    assert found.peak_action == 4


def test_made_again() -> None:
    found = of(Choices(recompute=frozenset({2, 3})))
    assert found.between_passes == 144
    # The tangent, the gradient of z, then y and z again, beside it.
    assert found.backward[:4] == (148, 348, 344 + 230, 344 + 200)


def test_not_in_place() -> None:
    assert of(Choices(in_place=False)).forward == (370, 140 + 400, 344)


def test_encoded() -> None:
    found = of(Choices(saved_forms=frozenset({("encode", 3)})), encoded=True)
    # 25 bytes instead of 200; both passes hold 100 beside them for a moment. z stays until sum has read it.
    assert found.forward == (370, 340, 344, 344 + 25 + 100)
    assert found.between_passes == 144 + 25
    assert found.backward[2] == 144 + 25 + 200 + 200 + 100


@pytest.mark.parametrize(
    ("choices", "end", "update"),
    [
        (Choices(), 184, 184 + 9),
        (Choices(gradients=EARLY), 144, 144),
        (Choices(gradients=HELD), 184, 184 + 9),
    ],
)
def test_updates(choices: Choices, end: int, update: int) -> None:
    found = of(choices, OutsideMemory(1000, update_bytes=9, update_by_parameter={1: 70}))
    assert found.update == 1000 + update
    give = 184 + (70 if choices.gradients.updates_early else 40 if choices.gradients.accumulates else 0)
    assert found.backward[-1] == 1000 + give
    assert found.peak >= 1000 + end


@pytest.mark.parametrize("choices", [Choices(), Choices(gradients=EARLY), Choices(gradients=HELD)])
def test_a_gradient_has_its_own_size_where_its_parameter_lies_in_anothers_memory(choices: Choices) -> None:
    """And is copied, because it is laid out otherwise."""
    graph = small()
    weight = replace(graph.values[1], bytes=0, stride=(2,))
    graph = replace(graph, values=(graph.values[0], weight, *graph.values[2:]))
    made, outside_memory = schedule(graph, choices), OutsideMemory(1000, update_bytes=9, update_by_parameter={1: 70})
    found = levels(made, outside_memory)
    # what stays, the loss, what is held; then the gradient itself
    level = 1000 + 100 + 4 + 40 * choices.gradients.accumulates
    copy = 0 if choices.gradients.accumulates else 40
    assert found.backward[-1] == level + 40 + copy + 70 * choices.gradients.updates_early
    assert found.update == level + (0 if choices.gradients.updates_early else copy + 9)
    assert validate(graph, made, None, outside_memory) == timeline_of(made, outside_memory).peak_allocated == found.peak
    evaluator = Evaluator(graph, outside_memory, gradients=choices.gradients)
    assert evaluator.evaluate(evaluator.column(choices)[:, None]).peak == [found.peak]


def test_the_gradient_of_a_single_number_stays() -> None:
    graph = small()
    (tangent,) = (value for value in graph.values if value.kind == "tangent")
    number = replace(tangent, shape=(), stride=())
    alone = replace(graph, values=tuple(number if one is tangent else one for one in graph.values))
    before, after = (schedule(one, Choices()) for one in (graph, alone))
    assert before.backward == after.backward
    assert levels(after).backward == (348, 348 + 200, 348 + 200, 348 + 30 + 40, 188)
    assert levels(after).peak == validate(alone, after) == timeline_of(after, OutsideMemory()).steps[-1].peak_allocated
    found = Evaluator(alone, OutsideMemory())
    assert found.evaluate(found.column(Choices())[:, None]).peak == [levels(after).peak]


def test_backward_holds_the_gradient_of_a_loss_until_it_returns() -> None:
    weight, held, seen = torch.ones(3, requires_grad=True), list[weakref.ref[torch.Tensor]](), list[bool]()
    loss = weight.sin().sum()
    loss.register_hook(lambda gradient: held.append(weakref.ref(gradient)))
    weight.register_hook(lambda _: seen.append(held[0]() is not None))
    loss.backward()
    assert seen == [True]
    assert held[0]() is None
