"""Decisions read off a schedule: one for each value, with times that add up and reasons from the graph."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import EARLY, HELD, Tape, kept, random_graph

from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.decision import Decision
from memplan.planning.plan.decisions import decide, tile_decisions
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.tiles.tiled import Axis, Tile


def step() -> JointGraph:
    """input -> mm -> relu -> dropout, times the relu's result -> mm -> loss."""
    tape = Tape()
    x, first, second = tape.value("input", 64), tape.value("parameter", 64), tape.value("parameter", 32)
    h = tape.op("aten.mm.default", [x], 2048, 0.3, parameters=[first], saves="i", layer="up")
    r = tape.op("aten.relu.default", [h], 2048, 0.02, saves="o", overwrites=(h,), layer="act", where="net.py:7")
    d = tape.op("aten.native_dropout.default", [r], 2048, 0.5, extra=[512], random=True)
    m = tape.op("aten.mul.Tensor", [r, d], 2048, 0.1, saves="i", layer="gate")
    y = tape.op("aten.mm.default", [m], 1024, 1.0, parameters=[second], saves="i", layer="down")
    tape.finish(tape.op("aten.sum.default", [y], 4, 0.1))
    tape.bits(d + 1, whole=True)
    tape.bits(r, whole=False)
    forms = (
        replace(tape.forms[0], store_seconds=0.25, fetch_seconds=0.5),
        replace(tape.forms[1], store_seconds=0.125),
    )
    return replace(tape.graph(), forms=forms)


GRAPH = step()
X, FIRST, SECOND, H, R, D, MASK, M, Y, LOSS = range(10)


def decided(**choices: Any) -> dict[tuple[str, ...], Decision]:
    """By lever and name."""
    found = decide(GRAPH, schedule(GRAPH, Choices(**choices)))
    by_key = {(decision.lever, *decision.scope.names): decision for decision in found}
    assert len(by_key) == len(found)
    return by_key


def test_all_kept() -> None:
    found = decided(in_place=False)
    assert {key: (d.bytes, d.reason) for key, d in found.items()} == {
        ("keep", "v4"): (2048, "needed by mul of gate and 1 more op; recomputing it would take 20 ms"),
        ("keep", "v5"): (2048, "random: never drawn again; needed by mul of gate"),
        ("keep", "v6"): (512, "random: never drawn again; needed by native_dropout"),
        ("keep", "v7"): (
            2048,
            "needed by mm of down; recomputing it would take 100 ms, the most per byte of all that is kept",
        ),
        ("keep", "v9"): (4, "returned by the model"),
    }
    assert {d.seconds for d in found.values()} == {0.0}
    assert (found["keep", "v4"].layer, found["keep", "v4"].where) == ("act", "net.py:7")


def test_recomputed() -> None:
    found = decided(recompute=frozenset({H, R, M}), in_place=False)
    assert {key: (d.bytes, d.seconds, d.reason) for key, d in found.items() if key[0] == "recompute"} == {
        ("recompute", "v3"): (2048, 0.3, "recomputing it takes 300 ms for 2.0 KiB; needed to recompute v4"),
        ("recompute", "v4"): (
            2048, 0.02, "recomputing it takes 20 ms for 2.0 KiB; needed by mul of gate and 1 more op",
        ),
        ("recompute", "v7"): (2048, 0.1, "recomputing it takes 100 ms for 2.0 KiB; needed by mm of down"),
    }  # fmt: skip
    found = decided(recompute=frozenset({R}), in_place=False)
    assert found["keep", "v3"].reason.startswith("needed to recompute v4; recomputing it would take 300 ms")


def test_encoded() -> None:
    found = decided(recompute=frozenset({R}), saved_forms=kept(encode={R, MASK}), in_place=False)
    bits, signs = found["encode", "v6"], found["encode", "v4"]
    assert (bits.bytes, bits.seconds) == (512 - 64, 0.75)
    assert bits.reason == "64 B instead of 512 B (bits); needed by native_dropout"
    assert bits.details == {"codec": "bits", "encoded_bytes": 64}
    assert (signs.bytes, signs.seconds) == (2048 - 64, 0.125 + 0.02)
    assert (
        signs.reason == "64 B instead of 2.0 KiB (sign); read as it is by relu of act; for the rest recomputed in 20 ms"
    )


def test_an_encoded_form_beside_the_value_frees_nothing() -> None:
    signs = decided(saved_forms=kept(encode={R}))["encode", "v4"]
    assert signs.bytes == 0
    assert "the value itself is kept too" in signs.reason


@pytest.mark.parametrize(("first", "last", "layer"), [(0, 4, "up to down"), (1, 2, "act"), (2, 2, "")])
def test_a_segment_is_in_its_first_to_its_last_layer(first: int, last: int, layer: str) -> None:
    """Or in none: what the loss or the model's own forward calls. Here that is the dropout, call 2."""
    plain = replace(GRAPH, ops=tuple(replace(op, call=call) for call, op in enumerate(GRAPH.ops)))
    (decision,) = tile_decisions(plain, plain, [Tile(first, last, Axis(0, samples=8), pieces=2)])
    assert decision.layer == layer


def test_the_whole_step() -> None:
    plan = schedule(GRAPH, Choices(gradients=EARLY))
    reuses = [
        (GRAPH.values[action.overwritten].name, GRAPH.values[action.makes[0]].name, GRAPH.values[action.makes[0]].bytes)
        for action in (*plan.forward, *plan.backward)
        if action.overwritten is not None
    ]
    found = {decision.lever: decision for decision in decide(GRAPH, plan)}
    assert reuses
    assert found["in place"].details["reuses"] == tuple(reuses)
    assert found["in place"].bytes == sum(size for *_, size in reuses)
    assert (found["update early"].bytes, found["update early"].details) == (64 + 32, {"parameters": 2})
    assert "accumulate" not in found
    held = {decision.lever: decision for decision in decide(GRAPH, schedule(GRAPH, Choices(gradients=HELD)))}
    assert held["accumulate"].bytes == 64 + 32
    assert "update early" not in held


def drawn(seed: int) -> tuple[JointGraph, Schedule]:
    draw = random.Random(seed)
    graph = random_graph(seed, draw.randint(2, 12))
    choices = Choices(
        frozenset(value for value in recomputable_values(graph) if draw.random() < 0.5),
        frozenset((form.lever, form.value) for form in graph.forms_by("encode") if draw.random() < 0.6),
        gradients=GradientUse(updates_early=draw.random() < 0.3),
        in_place=draw.random() < 0.8,
    )
    return graph, schedule(graph, choices)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30))
def test_each_value_that_is_there_in_the_backward_pass_is_decided_once_and_times_add_up(seed: int) -> None:
    graph, plan = drawn(seed)
    found = decide(graph, plan)
    assert sum(decision.seconds for decision in found) == pytest.approx(plan.seconds)
    there = {value for action in plan.backward for value in (*action.reads, *action.makes)}
    there |= {form.value for form in graph.forms if form.encoded in there} | {
        graph.base(value) for value in graph.outputs
    }
    forward = {value for op in graph.ops if op.phase == "forward" for value in op.makes}
    named = [decision.scope.names[0] for decision in found if decision.scope.kind == "value"]
    assert sorted(named) == sorted(graph.values[value].name for value in there & forward)
    assert all(decision.reason and decision.grade == "exact" and decision.bytes >= 0 for decision in found)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_is_kept_is_what_lives_between_the_passes(seed: int) -> None:
    graph, plan = drawn(seed)
    encoded = graph.form_by_encoded
    forward = {value for op in graph.ops if op.phase == "forward" for value in op.makes}
    outputs = {graph.base(value) for value in graph.outputs} & forward
    lives = sum(graph.values[value].bytes for value in {*plan.saved} | outputs)
    kept = sum(decision.bytes for decision in decide(graph, plan) if decision.lever == "keep")
    small = sum(graph.values[value].bytes for value in plan.saved if value in encoded)
    beside = sum(graph.values[e.value].bytes for e in encoded.values() if {e.value, e.encoded} <= {*plan.saved})
    assert lives == kept + small + beside
