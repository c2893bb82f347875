from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environment import needs_cuda_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.graphs import random_graph
from tests.emulated_card import HERE
from tests.emulated_card.dry_process import run_there

from memplan._bytes import round_to_blocks
from memplan.devices import find
from memplan.planning.graph.joint_graph import recomputable_values
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule, with_fewest_piecewise_ops
from memplan.planning.schedule.to_trace import reserved_bytes, timeline_of, trace_of
from memplan.trace.records import Cause


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_the_simulator_counts_what_the_plain_account_does(seed: int, early: bool, held: bool) -> None:
    graph, draw = random_graph(seed, 8, hooks=True), random.Random(seed)
    drop = frozenset(value for value in sorted(recomputable_values(graph)) if draw.random() < 0.5)
    kept = frozenset((form.lever, form.value) for form in graph.forms if draw.random() < 0.5)
    made = schedule(graph, Choices(drop, kept, GradientUse(early, held and not early)))
    others: dict[Cause, int] = {"weight": 30, "parameter_gradient": 20}
    outside = draw.choice([0, 800])
    outside_memory = OutsideMemory(1000, 500, {of: 70 for of, _ in graph.gradients}, others, outside)
    assert timeline_of(made, outside_memory).peak_allocated == levels(made, outside_memory).peak


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 30))
def test_pieces_are_used_only_where_the_budget_asks_for_them(seed: int) -> None:
    graph = random_graph(seed, 8)
    made = schedule(graph, Choices(recomputable_values(graph)))
    peak = levels(made).peak

    def fits(one: object, budget: int) -> list[bool]:
        found = levels(one)  # pyright: ignore[reportArgumentType]  # a Schedule
        return [level <= budget for level in (*found.forward, *found.backward)]

    tight = with_fewest_piecewise_ops(made, lambda one: fits(one, peak))
    assert levels(tight).peak <= peak
    wide = with_fewest_piecewise_ops(made, lambda one: fits(one, 1 << 40))
    assert wide.choices.pieces == frozenset()
    assert not any(a.overwritten is not None and a.called_op(graph).in_place_scratch is not None for a in wide.backward)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 30), st.booleans())
def test_reserved_bytes_are_those_of_the_timeline(seed: int, held: bool) -> None:
    graph, draw = random_graph(seed, 12, hooks=True), random.Random(seed)
    values = tuple(replace(value, bytes=value.bytes << draw.randrange(18)) for value in graph.values)
    graph = replace(graph, values=values)
    drop = frozenset(value for value in sorted(recomputable_values(graph)) if draw.random() < 0.5)
    made = schedule(graph, Choices(drop, frozenset(), GradientUse(False, held)))
    outside_memory = OutsideMemory(1000, 3 << 20, home=Home("cuda:0", find("h100")))
    assert reserved_bytes(made, outside_memory) == timeline_of(made, outside_memory).peak_reserved


def test_a_librarys_workspace_is_allocated_by_the_op_that_calls_it_first() -> None:
    graph = random_graph(3, 12)
    made = schedule(graph, Choices())
    last = next(action.op for action in reversed(made.forward) if action.op is not None)
    outside_memory = OutsideMemory(other_bytes={"workspace": 5000}, workspace_by_op={last: 4000})
    trace = trace_of(made, outside_memory)
    early, late = (one for one in trace.storages if one.cause == "workspace")
    assert (early.bytes, early.op) == (1000, None)
    assert late.bytes == 4000
    assert late.op == max(op.index for op in trace.ops if op.phase == "forward" and not op.name.startswith("memplan."))
    assert late.died is None


def test_the_requests_of_an_op_are_made_one_by_one() -> None:
    graph = random_graph(3, 12)
    op = graph.ops[0]
    sized = replace(op, scratch=700, requests=(500, 200, -1, 300, -2, -3), in_place_scratch=None, discarded=0)
    made = schedule(replace(graph, ops=(sized, *graph.ops[1:])), Choices())
    first = next(one for one in trace_of(made).ops if one.phase == "forward")
    temporary = [one for one in trace_of(made).storages if one.op == first.index and one.cause == "temporary"]
    assert [one.bytes for one in temporary] == [500, 200, 300]
    assert temporary[0].died is not None
    assert temporary[1].born < temporary[0].died < temporary[2].born


def test_early_requests_of_an_op_come_before_its_results() -> None:
    graph = random_graph(3, 12)
    op = graph.ops[0]
    assert op.makes
    sized = replace(
        op, scratch=700, requests=(500, 200, -2, -1), requests_before_results=1, in_place_scratch=None, discarded=0
    )  # fmt: skip
    trace = trace_of(schedule(replace(graph, ops=(sized, *graph.ops[1:])), Choices()))
    first = next(one for one in trace.ops if one.phase == "forward")
    early, *results, late = sorted((one for one in trace.storages if one.op == first.index), key=lambda one: one.born)
    assert [one.cause == "temporary" for one in (early, *results, late)] == [True, *[False] * len(op.makes), True]
    assert (early.bytes, late.bytes) == (500, 200)


def test_unread_results_are_requested_one_by_one() -> None:
    graph = random_graph(3, 12)
    op = next(op for op in graph.forward_ops if len(op.outputs) == 1 and op.makes)
    sized = replace(
        op, target="aten.sized.default", outputs=(None, *op.outputs, None, None), returns_tuple=True, discarded=700,
        discarded_by_output=(500, 0, 0, 200), scratch=300, in_place_scratch=None,
    )  # fmt: skip
    ops = (*graph.ops[: op.index], sized, *graph.ops[op.index + 1 :])
    trace = trace_of(schedule(replace(graph, ops=ops), Choices()))
    storages = [one for one in trace.storages if one.op is not None and trace.ops[one.op].name == sized.target]
    first, made, second, workspace = storages[:4]
    assert (first.bytes, made.bytes, second.bytes, workspace.bytes) == (500, graph.values[op.makes[0]].bytes, 200, 300)
    assert (workspace.died, first.died, second.died) == tuple(workspace.born + later for later in (1, 2, 3))


@needs_cuda_torch
@pytest.mark.parametrize(
    ("step", "kernels", "direct"),
    [
        ("convolutional", ["batch_norm_act", "cross_entropy"], []),
        ("text", [], ["aten.leaky_relu_backward.default", "aten.native_dropout_backward.default"]),
    ],
)
def test_a_planned_step_makes_the_requests_that_are_predicted(
    step: str, kernels: list[str], direct: list[str], tmp_path: Path
) -> None:
    """All of them, in their order; at the end torch frees the loss and its gradient, which the caller held."""
    found = _planned_there(step, tmp_path)
    assert found["kernels"] == kernels
    assert set(direct) <= set(found["direct"])
    predicted, actual = ([_blocks(request) for request in found[name]] for name in ("predicted", "actual"))
    assert len(predicted) > 200
    assert actual[: len(predicted)] == predicted
    assert actual[len(predicted) :] in ([], [-512], [-512, -512])
    planned, reserved = found["reserved"]
    assert reserved == planned


@needs_cuda_torch
def test_a_step_whose_weights_do_not_lie_side_by_side_reserves_what_is_predicted(tmp_path: Path) -> None:
    found = _planned_there("scattered", tmp_path)
    planned, reserved = found["reserved"]
    assert found["gaps"] > 20 << 20
    assert reserved == planned


def _planned_there(step: str, folder: Path) -> dict[str, Any]:
    """What a planned step predicts and does in a process that sees an emulated card."""
    out, folders = folder / "requests.json", [str(HERE), str(HERE.parents[1])]
    run_there(
        f"import sys; sys.path[:0] = {folders!r}\nfrom planned_step import main; main({step!r}, {str(out)!r})", folder
    )
    return json.loads(out.read_text(encoding="utf-8"))


def _blocks(request: int) -> int:
    """The bytes of a request, or of a free below 0, in whole blocks."""
    return round_to_blocks(request) if request > 0 else -round_to_blocks(-request)
