"""Orders of the backward ops: beside all orders that there are, counted apart, and a step counted by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import EARLY, HELD, Tape, any_order, may_follow, random_graph
from planning.interpreter import interpreted

from memplan.planning.graph.dependencies import is_allowed
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.order import WORTHWHILE, in_lower_order, lower_order
from memplan.planning.search.search import Search

LIMIT = 1000
"""Graphs with more orders are left out."""


def late_layer() -> JointGraph:
    """input 100 -> mm by 8 -> 1000 -> pool -> 10 -> mm by 400 -> 10 -> loss."""
    tape = Tape()
    x, early, late = tape.value("input", 100), tape.value("parameter", 8), tape.value("parameter", 400)
    a = tape.op("aten.mm.default", [x], 1000, 1.0, parameters=[early], saves="i")
    b = tape.op("aten.max_pool2d.default", [a], 10, 0.1, saves="i")
    c = tape.op("aten.mm.default", [b], 10, 1.0, parameters=[late], saves="i", split=True, layer="late")
    return tape.finish(tape.op("aten.sum.default", [c], 4, 0.1))


def test_a_large_gradient_of_weights_waits_until_the_activations_are_freed() -> None:
    graph = late_layer()
    resident, loss, gradient_of_c, operand = 100 + 8 + 400, 4, 10, 10
    activation, its_gradient, gradient_of_b = 1000, 1000, 10
    before = resident + loss + activation + its_gradient + gradient_of_b + 400
    after = resident + loss + activation + its_gradient + gradient_of_b + operand + gradient_of_c
    assert interpreted(graph, schedule(graph, Choices()), OutsideMemory()) == before
    order = lower_order(graph, [Choices()], OutsideMemory())
    assert interpreted(graph, schedule(graph, Choices(order=order)), OutsideMemory()) == after
    made = [graph.values[graph.ops[op].makes[0]].bytes for op in order]
    assert sorted(made) == [8, 10, 10, 400, 1000]
    assert made.index(1000) < made.index(400)


def test_what_is_freed_at_once_does_not_wait() -> None:
    """A gradient that is added to the held one makes no room where it is made later."""
    graph = late_layer()
    assert lower_order(graph, [Choices(gradients=HELD)], OutsideMemory()) == ()


def counted(graph: JointGraph, order: tuple[int, ...]) -> int:
    """The highest level of a backward pass for which all is saved, by hand: nothing is written over."""
    last = {value: at for at, op in enumerate(order) for value in (*graph.ops[op].reads, *graph.ops[op].makes)}
    stays = {*graph.outputs, *(gradient for _, gradient in graph.gradients)}
    stays |= {value.id for value in graph.values if value.kind in ("parameter", "buffer", "input")}
    live = stays & {v.id for v in graph.values if v.op is None or graph.ops[v.op].phase == "forward"}
    live |= {value.id for value in graph.values if value.kind == "tangent"}
    live |= {value for op in order for value in graph.ops[op].reads if graph.values[value].op is None}
    live |= {v for op in order for v in graph.ops[op].reads if v in {m for f in graph.forward_ops for m in f.makes}}
    live = {value for value in live if value in stays or value in last}
    peak = 0
    for at, index in enumerate(order):
        op = graph.ops[index]
        live |= {*op.makes}
        peak = max(peak, sum(graph.values[value].bytes for value in live) + op.scratch + op.discarded)
        live -= {value for value in live if last.get(value) == at and value not in stays}
    return peak


def every_order(graph: JointGraph, ran: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    following = may_follow(graph, ran)
    if not following:
        yield ran
    for op in following:
        yield from every_order(graph, (*ran, op.index))


def branches(draw: random.Random) -> JointGraph:
    """Products one after the other or side by side, their results added up."""
    tape = Tape()
    x, ends = tape.value("input", 100), list[int]()
    for _ in range(draw.randint(1, 3)):
        y = x
        for _ in range(draw.randint(1, 2)):
            size, weight = draw.choice([10, 40, 160]), tape.value("parameter", draw.choice([10, 100, 400]))
            y = tape.op("aten.mm.default", [y], size, 1.0, parameters=[weight], saves="i", split=True)
        ends.append(tape.op("aten.mul.Tensor", [y], 50, 0.1, saves=draw.choice(["", "i", "o"])))
    y = ends[0]
    for other in ends[1:]:
        y = tape.op("aten.add.Tensor", [y, other], 50, 0.1)
    return tape.finish(tape.op("aten.sum.default", [y], 4, 0.1))


def test_beside_all_orders_that_there_are() -> None:
    """None is higher than the captured order, and most reach the lowest that there is."""
    draw, seen, lowest = random.Random(0), 0, 0
    for seed in range(150):
        graph = replace(random_graph(seed, 5), forms=(), mutations=()) if seed % 3 == 0 else branches(draw)
        if any(graph.values[of].kind == "input" for of, _ in graph.gradients):
            continue  # its gradient may be copied: not counted here
        choices, captured = Choices(in_place=False), tuple(op.index for op in graph.backward_ops)
        orders = list(zip(range(LIMIT), every_order(graph), strict=False))
        if len(orders) == LIMIT:
            continue
        best = min(counted(graph, order) for _, order in orders)
        found = lower_order(graph, [choices], OutsideMemory())
        mine, as_captured = counted(graph, found or captured), counted(graph, captured)
        assert is_allowed(graph, found)
        assert best <= mine <= as_captured
        if best < as_captured * (1 - WORTHWHILE):
            seen += 1
            lowest += mine == best
    assert seen >= 20
    assert lowest >= 0.9 * seen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_no_peak_rises_and_the_step_is_the_same(seed: int) -> None:
    """With values recomputed and encoded, and gradients used in all ways; the interpreter says what the step does."""
    draw = random.Random(seed)
    graph = replace(random_graph(seed, draw.randint(3, 12), hooks=draw.random() < 0.5), mutations=())
    use = draw.choice([KEPT_UNTIL_UPDATE, EARLY, HELD, GradientUse(updates_early=True, accumulates=True)])
    again = sorted(recomputable_values(graph))
    forms = [form for form in graph.forms if not form.is_copied]
    updates = {value.id: 70 for value in graph.values if value.kind == "parameter"}
    outside_memory = OutsideMemory(1000, 500, updates, loss_bytes=draw.choice([0, 800]))
    choices = [
        Choices(
            frozenset(value for value in again if draw.random() < share),
            frozenset((form.lever, form.value) for form in forms if draw.random() < share),
            use,
        )
        for share in (0.0, 0.6)
    ]
    order = lower_order(graph, choices, outside_memory)
    for each in choices:
        before = interpreted(graph, schedule(graph, each), outside_memory)
        assert interpreted(graph, schedule(graph, replace(each, order=order)), outside_memory) <= before


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_an_order_is_allowed_if_all_that_it_reads_is_there(seed: int) -> None:
    draw = random.Random(seed)
    graph = random_graph(seed, draw.randint(2, 9))
    order = list(any_order(graph, draw))
    if len(order) < 2:
        return
    assert is_allowed(graph, tuple(order))
    first, second = draw.randrange(len(order)), draw.randrange(len(order))
    order[first], order[second] = order[second], order[first]
    ran = list[int]()
    for op in order:
        if op not in {each.index for each in may_follow(graph, ran)}:
            break
        ran.append(op)
    assert is_allowed(graph, tuple(order)) == (len(ran) == len(order))
    assert not is_allowed(graph, tuple(order[1:]))
    assert not is_allowed(graph, (*order[1:], order[1]))


def chain(layers: int) -> JointGraph:
    """Products whose results become smaller and whose weights become larger, with a way around each."""
    tape = Tape()
    x = tape.value("input", 1000)
    for at in range(layers):
        weight, size = tape.value("parameter", 100 << at), 8000 >> at
        y = tape.op("aten.mm.default", [x], size, 1.0, parameters=[weight], saves="i", split=True)
        z = tape.op("aten.gelu.default", [y], size, 0.1, saves="i")
        x = tape.op("aten.add.Tensor", [y, z], size, 0.1, overwrites=(z,))
    return tape.finish(tape.op("aten.sum.default", [x], 4, 0.1))


@pytest.mark.parametrize("gradients", [KEPT_UNTIL_UPDATE, EARLY])
def test_the_search_in_another_order_goes_lower_and_its_plans_are_the_step(gradients: GradientUse) -> None:
    outside_memory = OutsideMemory(update_by_parameter={v.id: 30 for v in chain(6).values if v.kind == "parameter"})
    search = Search(chain(6), outside_memory, gradients=gradients)
    ordered = in_lower_order(search)
    assert ordered.save_all.peak <= search.save_all.peak
    assert ordered.floor_peak <= search.floor_peak
    if gradients == KEPT_UNTIL_UPDATE:
        assert ordered.save_all.peak < 0.95 * search.save_all.peak
        assert ordered.floor_peak < 0.95 * search.floor_peak
    assert ordered.lower_bound <= ordered.floor_peak
    found = ordered.floor()
    assert found.choices.order == ordered.graph.order
    assert interpreted(search.graph, schedule(search.graph, found.choices), outside_memory) == found.peak
    captured = Search(search.graph, outside_memory, gradients=gradients)
    assert captured.graph.order == ()


def test_where_no_order_is_lower_the_search_is_the_same() -> None:
    tape = Tape()
    x = tape.value("input", 1000)
    for _ in range(4):
        weight = tape.value("parameter", 10)
        x = tape.op("aten.mm.default", [x], 1000, 1.0, parameters=[weight], saves="i")
    search = Search(tape.finish(tape.op("aten.sum.default", [x], 4, 0.1)))
    assert in_lower_order(search) is search
