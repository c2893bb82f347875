from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.steps import mlp

import memplan
from memplan import Trace
from memplan.errors import InputError
from memplan.explanation.explain import explain_trace
from memplan.explanation.memory_timeline import MemoryTimeline, Span
from memplan.explanation.model import Explanation
from memplan.explanation.over_time import memory_timeline_of, selected_moments
from memplan.simulation.simulate import simulate


def build() -> Callable[[], None]:
    model, x = mlp(width=64, layers=3), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


@pytest.fixture(scope="module")
def trace() -> Trace:
    return memplan.record(build, device="h100")


def course(trace: Trace, moments: int = 10**6) -> MemoryTimeline:
    return memory_timeline_of(trace, simulate(trace), moments=moments)


def test_causes_at_each_moment_are_the_storages_that_live_then(trace: Trace) -> None:
    found = course(trace)
    assert found.ticks == tuple(tick for tick, _, _ in simulate(trace).events)
    for place, tick in enumerate(found.ticks):
        live = [one for one in trace.storages if one.device != "cpu" and one.born <= tick]
        live = [one for one in live if one.died is None or one.died > tick]
        for cause, column in found.causes.items():
            if cause != "rounding":
                assert column[place] == sum(one.bytes for one in live if one.cause == cause), (tick, cause)
        assert sum(column[place] for column in found.causes.values()) == found.allocated[place]


def test_the_op_at_each_moment_is_the_last_that_began_before_it(trace: Trace) -> None:
    found = course(trace)
    for place, tick in zip(found.ops, found.ticks, strict=True):
        begun = [op for op in trace.ops if op.start < tick]
        if not begun:
            assert place == -1
            continue
        row = found.op_rows[place]
        assert (row.layer, row.where, row.phase, row.step) == (
            begun[-1].layer, begun[-1].where, begun[-1].phase, begun[-1].step
        )  # fmt: skip


def test_phases_follow_each_other_and_hold_their_ops(trace: Trace) -> None:
    spans = course(trace).spans
    assert [(span.phase, span.step) for span in spans] == [
        ("build", -1), *[(phase, step) for step in (0, 1) for phase in ("forward", "backward", "optimizer")]
    ]  # fmt: skip
    assert all(one.end == other.start for one, other in pairwise(spans))
    assert (spans[0].start, spans[-1].end) == (0, trace.end)
    for op in trace.ops:
        span = next(span for span in spans if span.start <= op.start < span.end)
        assert (span.phase, span.step) == (op.phase, op.step)


def test_segments_at_the_peak_hold_the_peak(trace: Trace) -> None:
    timeline = simulate(trace)
    found = course(trace)
    used = [block for segment in found.segments for block in segment.blocks if block.state != "inactive"]
    at_peak = next(reserved for tick, _, reserved in timeline.events if tick == timeline.peak_tick)
    assert sum(block.size for block in used) == timeline.peak_allocated
    assert sum(segment.size for segment in found.segments) == at_peak
    for segment in found.segments:
        assert sum(block.size for block in segment.blocks) == segment.size
    for block in used:
        one = found.alive[block.alive]
        assert (one.bytes, one.cause) == (block.requested, block.cause)
        assert one.born <= timeline.peak_tick < (one.died or timeline.peak_tick + 1)


levels = st.lists(st.integers(0, 9), min_size=1, max_size=400)


@given(levels, st.lists(st.integers(0, 400), max_size=8), st.integers(1, 60))
def test_thinning_loses_no_peak(values: list[int], bounds: list[int], moments: int) -> None:
    column, other = np.array(values), np.array(values[::-1])
    kept = selected_moments(column, [other], bounds, moments).tolist()
    assert kept == sorted(set(kept))
    assert {0, len(values) - 1} <= set(kept)
    edges = sorted({0, len(values), *(bound for bound in bounds if bound < len(values))})
    for start, end in pairwise(edges):
        inside = [place for place in kept if start <= place < end]
        for one in (column, other):
            assert max(one[place] for place in inside) == max(one[start:end])
    near = -(-len(values) // max(1, moments // 3))
    for place, value in enumerate(values):
        assert any(abs(one - place) <= near and values[one] >= value for one in kept)


@given(st.integers(20, 5000))
def test_thinning_keeps_about_as_many_as_asked(count: int) -> None:
    kept = selected_moments(np.arange(count) % 17, [], [], 90)
    assert len(kept) <= min(count, 92)


def test_a_long_course_keeps_the_peak_of_every_phase_and_cause(trace: Trace) -> None:
    whole, short = course(trace), course(trace, moments=9)
    assert len(short.ticks) < len(whole.ticks) == short.total
    for span in whole.spans:
        for cause in whole.causes:
            assert highest(short, cause, span) == highest(whole, cause, span), (span, cause)


def highest(found: MemoryTimeline, cause: str, span: Span) -> int:
    moments = zip(found.ticks, found.causes[cause], strict=True)
    return max((value for tick, value in moments if span.start < tick <= span.end), default=0)


def test_an_explanation_is_read_back_equal(trace: Trace) -> None:
    explanation = explain_trace(trace)
    text = explanation.to_json()
    again = Explanation.from_json(text)
    assert again.to_json() == text
    assert again.course == explanation.course
    assert again.layers == explanation.layers


def _changed(text: str, *path: str | int, to: object) -> str:
    data = json.loads(text)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "to", "found"),
    [
        (("schema",), 2, "has schema version 2; this memplan reads 1"),
        (("by_cause", "saved"), 1, "causes that do not add up"),
        (("course", "ticks"), [1], "columns of different lengths"),
        (("course", "causes", "weight", 3), 7, "causes that do not add up"),
        (("course", "ops", 3), 10**6, "has ops that are not in op_rows"),
        (("title",), 3, "it.title is 3"),
        (("layers", 1, "needed_for"), [3], "it.layers[1].needed_for[0] is 3"),
        (("unknown",), 3, "unknown"),
    ],
)
def test_a_damaged_explanation_is_refused(trace: Trace, path: tuple[str, ...], to: object, found: str) -> None:
    with pytest.raises(InputError, match=r"x\.json is no explanation") as error:
        Explanation.from_json(_changed(explain_trace(trace).to_json(), *path, to=to), "x.json")
    assert found in str(error.value)


def test_a_step_of_a_course_is_its_moments_alone(trace: Trace) -> None:
    whole = course(trace)
    last = whole.step(1)
    start = trace.steps[1]
    assert last.ticks == tuple(tick for tick in whole.ticks if tick > start)
    assert max(last.allocated) == simulate(trace).steps[1].peak_allocated
    more = last.plus({"weight": 5, "saved": 0})
    assert more.allocated == tuple(one + 5 for one in last.allocated)
    assert more.causes["weight"] == tuple(one + 5 for one in last.causes["weight"])


def test_the_data_beside_these_tests_are_read(tmp_path: Path) -> None:
    trace = Trace.from_json((Path(__file__).parents[1] / "data" / "step.trace.json").read_text())
    assert max(course(trace).allocated) == simulate(trace).peak_allocated


@pytest.mark.parametrize("name", ["lines", "batches", "peaks"])
def test_a_scaling_without_what_it_is_made_of_is_refused(name: str) -> None:
    explanation = memplan.explain(mlp(width=64, layers=2), "8x64", device="cpu")
    data = json.loads(explanation.to_json())
    assert data["scaling"][name]
    data["scaling"][name] = []
    with pytest.raises(InputError, match="scaling"):
        Explanation.from_json(json.dumps(data))


def test_storages_at_the_peak_of_no_moments_are_refused(trace: Trace) -> None:
    data = json.loads(explain_trace(trace).to_json())
    empty = {name: [] for name in ("ticks", "allocated", "reserved", "ops")}
    data["course"] |= empty | {"causes": {}}
    data["timeline"]["peak_allocated"] = 0
    data["by_cause"] = {}
    with pytest.raises(InputError, match="no moments"):
        Explanation.from_json(json.dumps(data))
