"""Seconds of ops: what is measured, how often, under which conditions; estimates; the same costs twice."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan import devices
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost import op_timing
from memplan.planning.cost.op_timing import costs_of, signature, step_seconds, unmeasured, with_costs
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, SavedForm, Value, recomputable_values
from memplan.planning.ops.tile import TILE
from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.settings import AllocatorSettings


@pytest.fixture(autouse=True)
def nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_timing, "_MEASUREMENTS", {})


def net(width: int = 32, *, drop: bool = True, depth: int = 3) -> nn.Module:
    block = lambda: (nn.Linear(width, width), nn.ReLU(), *([nn.Dropout(0.5)] if drop else []))  # noqa: E731
    return nn.Sequential(*(layer for _ in range(depth) for layer in block()), nn.Linear(width, 1))


def graph_of(model: nn.Module, *shape: int) -> JointGraph:
    return capture(model, call_of((torch.randn(*shape),), {})).graph


def encoded(graph: JointGraph) -> JointGraph:
    """The graph with an encoding of its first recomputable value."""
    first = graph.values[min(recomputable_values(graph))]
    number = len(graph.values)
    form = Value(number, "form", "encoded", number, first.bytes // 32, (first.bytes // 32,), (1,), "uint8")
    return replace(graph, values=(*graph.values, form), forms=(SavedForm("encode", first.id, number, "bits"),))


def op_of(graph: JointGraph, called: Any) -> GraphOp | None:
    """The graph's op that is called so; None for an encoding's call."""
    return next((op for op in graph.ops if (op.target, op.args, op.kwargs) == called), None)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of measuring an op, its roofline times 3; what was measured, in order."""
    asked = list[str]()

    def stand_in(graph: JointGraph, called: Any, on: str) -> float:
        op = op_of(graph, called)
        if op is None:
            return 1e-3
        asked.append(signature(graph, op))
        return 3 * roofline.CPU.seconds(roofline.work_of(graph, op))

    monkeypatch.setattr(op_timing, "_fastest_run", stand_in)
    return asked


# -- measured


def test_measured_seconds_grow_with_the_work() -> None:
    small, large = (with_costs(graph_of(net(width, drop=False), 64, width), limit=60.0) for width in (32, 1024))
    products = [[op.seconds for op in graph.ops if op.target == "aten.addmm.default"] for graph in (small, large)]
    assert min(products[1][:3]) > min(products[0][:3]) > 0  # 1024 times the work, whatever else the machine does
    assert all((op.seconds == 0) == op.is_view for graph in (small, large) for op in graph.ops)
    assert step_seconds(large) == pytest.approx(sum(op.seconds for op in large.ops))


def test_each_distinct_op_is_measured_once(timed: list[str]) -> None:
    graph = graph_of(net(), 8, 32)
    priced = with_costs(graph)
    ops = [op for op in graph.ops if not op.is_view]
    assert sorted(timed) == sorted({signature(graph, op) for op in ops})
    assert len(timed) < len(ops)  # blocks repeat
    assert priced.fingerprint == graph.fingerprint
    with_costs(graph_of(net(), 8, 32))
    assert len(timed) == len(set(timed))  # nothing again


def test_what_may_be_recomputed_is_measured_first(timed: list[str]) -> None:
    graph = graph_of(net(), 8, 32)
    with_costs(graph)
    again = {signature(graph, graph.maker[value]) for value in recomputable_values(graph)}
    backward = {signature(graph, op) for op in graph.backward_ops} - {signature(graph, op) for op in graph.forward_ops}
    assert set(timed[: len(again)]) == again
    assert set(timed[-len(backward) :]) == backward
    largest = max(
        (graph.maker[v] for v in recomputable_values(graph)), key=lambda op: roofline.work_of(graph, op).bytes
    )
    assert timed[0] == signature(graph, largest)


def test_when_the_time_is_up_the_rest_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, asked, clock = graph_of(net(), 8, 32), list[str](), [0.0]
    monkeypatch.setattr(op_timing, "clock_of", lambda place: lambda: clock[0])

    def slow(graph: JointGraph, called: Any, on: str) -> float:
        op = op_of(graph, called)
        assert op is not None
        asked.append(signature(graph, op))
        clock[0] += 0.03
        return 7 * roofline.CPU.seconds(roofline.work_of(graph, op))

    monkeypatch.setattr(op_timing, "_fastest_run", slow)
    priced = with_costs(graph, limit=0.05)
    assert len(asked) == 2
    for op in graph.forward_ops:
        assert priced.ops[op.index].seconds == pytest.approx(7 * roofline.CPU.seconds(roofline.work_of(graph, op)))
    assert set(unmeasured(graph).values()) == {"the time for measuring was up"}
    assert with_costs(graph, limit=0.05) == priced  # and planning anew measures no more
    assert len(asked) == 2
    assert with_costs(graph, limit=0.07) == priced  # nor where measuring workspaces left a little more of the limit
    assert len(asked) == 2
    longer = with_costs(graph, limit=1.0)  # but under a longer limit it does, what was not measured yet
    assert len(asked) == len(set(asked)) > 2
    assert not unmeasured(graph)
    for op in (op for op in graph.ops if not op.is_view):
        assert longer.ops[op.index].seconds == pytest.approx(7 * roofline.CPU.seconds(roofline.work_of(graph, op)))


@pytest.mark.parametrize(("first", "expected_runs"), [(0.5, 1), (0.05, 2), (0.001, 4)])
def test_a_long_op_runs_once_and_a_short_one_several_times(
    monkeypatch: pytest.MonkeyPatch, first: float, expected_runs: int
) -> None:
    """The first run takes ``first`` seconds, of which 0.5 ms are the preparation of kernels."""
    now, runs = 0.0, 0

    def run() -> None:
        nonlocal now, runs
        now += first if not runs else first - 5e-4
        runs += 1

    monkeypatch.setattr(op_timing, "_synthetic_call", lambda graph, called, place: run)
    monkeypatch.setattr(op_timing, "clock_of", lambda place: lambda: now)
    graph = capture(nn.Linear(2, 2), call_of((torch.randn(2, 2),), {})).graph
    seconds = op_timing._fastest_run(graph, ("aten.relu.default", (), {}), "cpu")
    assert runs == expected_runs
    assert seconds == pytest.approx(first if runs == 1 else first - 5e-4)


@pytest.mark.parametrize(("piece_seconds", "expected_pieces"), [(0.1, 2 * 1 + 2 * 3), (1e-3, 2 + 2 * 16)])
def test_a_long_segment_in_many_pieces_is_measured_by_few(
    monkeypatch: pytest.MonkeyPatch, piece_seconds: float, expected_pieces: int
) -> None:
    """Of sixteen pieces, which share 5 ms, one runs twice, and three do; those of a short segment all run, twice."""
    now, pieces_run = 0.0, 0

    def run_pieces(target: str, args: Any, pieces: Any) -> None:
        nonlocal now, pieces_run
        now += 5e-3 + len(pieces) * piece_seconds
        pieces_run += len(pieces)

    monkeypatch.setattr(op_timing, "run_pieces", run_pieces)
    monkeypatch.setattr(op_timing, "tile_of", lambda key: SimpleNamespace(pieces=16))
    monkeypatch.setattr(op_timing, "_synthetic_call", lambda *called: lambda: run_pieces("", (), range(16)))
    monkeypatch.setattr(op_timing, "clock_of", lambda place: lambda: now)
    graph = capture(nn.Linear(2, 2), call_of((torch.randn(2, 2),), {})).graph
    seconds = op_timing._fastest_run(graph, (TILE, ([], [], "key"), {}), "cpu")
    assert seconds == pytest.approx(5e-3 + 16 * piece_seconds)
    assert pieces_run == expected_pieces


@pytest.mark.parametrize("slow_run", range(4))
@pytest.mark.parametrize("load", [0.05, 0.5, 5.0])
def test_load_during_one_run_of_a_few_pieces_adds_no_time(
    monkeypatch: pytest.MonkeyPatch, slow_run: int, load: float
) -> None:
    """Of sixteen pieces of 100 ms, each run of a few could be slower than the others by ``load`` seconds."""
    now, runs = 0.0, 0

    def run_pieces(target: str, args: Any, pieces: Any) -> None:
        nonlocal now, runs
        now += len(pieces) * 0.1 + (load if runs == slow_run else 0.0)
        runs += 1

    monkeypatch.setattr(op_timing, "run_pieces", run_pieces)
    monkeypatch.setattr(op_timing, "tile_of", lambda key: SimpleNamespace(pieces=16))
    monkeypatch.setattr(op_timing, "_synthetic_call", lambda *called: lambda: run_pieces("", (), range(16)))
    monkeypatch.setattr(op_timing, "clock_of", lambda place: lambda: now)
    graph = capture(nn.Linear(2, 2), call_of((torch.randn(2, 2),), {})).graph
    assert op_timing._fastest_run(graph, (TILE, ([], [], "key"), {}), "cpu") == pytest.approx(1.6)


def test_a_segment_whose_first_piece_takes_most_of_the_time_is_measured_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first piece is as slow as a busy machine makes it, or the pieces share so much: sixteen take 0.8 s, whatever
    one takes by itself."""
    now = 0.0

    def run_pieces(target: str, args: Any, pieces: Any) -> None:
        nonlocal now
        now += 0.8 if len(pieces) == 16 else 0.3 + 0.02 * len(pieces)

    monkeypatch.setattr(op_timing, "run_pieces", run_pieces)
    monkeypatch.setattr(op_timing, "tile_of", lambda key: SimpleNamespace(pieces=16))
    monkeypatch.setattr(op_timing, "_synthetic_call", lambda *called: lambda: run_pieces("", (), range(16)))
    monkeypatch.setattr(op_timing, "clock_of", lambda place: lambda: now)
    graph = capture(nn.Linear(2, 2), call_of((torch.randn(2, 2),), {})).graph
    assert op_timing._fastest_run(graph, (TILE, ([], [], "key"), {}), "cpu") == pytest.approx(0.8)


def test_a_segment_in_many_pieces_runs_as_a_whole_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece returns when its kernels are launched, in 30 ms; all pieces take 10 s, for which synchronizing waits."""
    now = 0.0

    def launch(*called: Any) -> None:
        nonlocal now
        now += 0.03

    def synchronize(place: str) -> None:
        nonlocal now
        now = 10.0 * math.ceil(now / 10.0)

    monkeypatch.setattr(op_timing, "run_pieces", launch)
    monkeypatch.setattr(op_timing, "tile_of", lambda key: SimpleNamespace(pieces=16))
    monkeypatch.setattr(op_timing, "_synthetic_call", lambda *called: launch)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=synchronize))
    monkeypatch.setattr(op_timing, "clock_of", lambda place: lambda: now)
    graph = capture(nn.Linear(2, 2), call_of((torch.randn(2, 2),), {})).graph
    assert op_timing._fastest_run(graph, (TILE, ([], [], "key"), {}), "cuda:0") == pytest.approx(10.0)


def test_the_random_stream_grad_mode_and_autocast_of_the_caller_are_as_before() -> None:
    graph = graph_of(net(), 8, 32)
    seen = list[tuple[str, bool, tuple[Any, ...]]]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addmm.default:
                seen.append((str(made.dtype), torch.is_grad_enabled(), made.shape))
            return made

    state = torch.random.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        with_costs(graph)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {(dtype, grad) for dtype, grad, _ in seen} == {("torch.float32", False)}


@pytest.fixture
def foreign() -> Iterator[list[int]]:
    """An op of another library that counts its calls."""
    calls = list[int]()
    with torch.library._scoped_library("test_costs", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")

        def twice(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x * 2

        library.impl("twice", twice, "CPU")
        library.impl("twice", torch.empty_like, "Meta")
        yield calls


def test_an_op_of_another_library_is_not_run_and_named(foreign: list[int]) -> None:
    graph = graph_of(net(depth=1, drop=False), 8, 32)
    op = next(op for op in graph.ops if op.target == "aten.relu.default")
    graph = replace(
        graph, ops=tuple(replace(o, target="test_costs.twice.default") if o is op else o for o in graph.ops)
    )
    priced = with_costs(graph)
    assert not foreign
    assert priced.ops[op.index].seconds > 0
    assert list(unmeasured(graph)) == ["test_costs.twice.default(float32[8, 32])"]


def test_an_op_that_fails_alone_is_estimated_and_named() -> None:
    graph = graph_of(net(depth=1, drop=False), 8, 32)
    op = next(op for op in graph.ops if op.target == "aten.relu.default")
    broken = replace(op, target="aten.there_is_no_such_op.default")
    graph = replace(graph, ops=tuple(broken if one is op else one for one in graph.ops))
    assert with_costs(graph).ops[op.index].seconds > 0
    assert "there_is_no_such_op" in "".join(unmeasured(graph).values())


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "complex64", "int64", "uint8", "bool"]),
    turned=st.booleans(),
    expanded=st.booleans(),
)
def test_synthetic_tensors_are_what_the_graph_says(shape: list[int], dtype: str, turned: bool, expanded: bool) -> None:
    like = torch.empty(shape, dtype=getattr(torch, dtype))
    like = like.mT if turned and like.dim() > 1 else like
    like = like.expand(3, *like.shape) if expanded else like
    found = op_timing._synthetic(Value(0, "v", "input", 0, 0, tuple(like.shape), like.stride(), dtype), "cpu")
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
    if dtype in ("int64", "uint8"):
        assert not found.any()
    elif like.is_floating_point():
        assert ((found > 0) & (found <= 1)).all()


def test_large_synthetic_tensors_are_filled_to_the_end() -> None:
    found = op_timing._synthetic(Value(0, "v", "input", 0, 0, (300, 1001), (1001, 1), "float32"), "cpu")
    assert ((found >= 0.1) & (found <= 1)).all()
    assert found.std() > 0.2


# -- the same costs twice


def test_by_roofline_the_same_graph_costs_the_same() -> None:
    one, two = (with_costs(encoded(graph_of(net(), 8, 32)), how="roofline") for _ in range(2))
    assert one.ops == two.ops
    assert one.forms == two.forms
    assert not unmeasured(one)
    for op in one.forward_ops:
        assert op.seconds == roofline.CPU.seconds(roofline.work_of(one, op))


def test_known_costs_come_back_through_json_and_nothing_is_measured(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = encoded(graph_of(net(), 8, 32))
    priced = with_costs(graph)
    known = json.loads(json.dumps(costs_of(priced)))
    monkeypatch.setattr(op_timing, "_MEASUREMENTS", {})
    timed.clear()
    assert with_costs(graph, known=known) == priced
    assert timed == []
    changed = with_costs(graph, known={key: 2 * seconds for key, seconds in known.items()})
    assert step_seconds(changed) == pytest.approx(2 * step_seconds(priced))
    assert changed.forms[0].store_seconds == pytest.approx(2 * priced.forms[0].store_seconds) != 0


def test_what_is_not_known_is_measured(timed: list[str]) -> None:
    graph = graph_of(net(), 8, 32)
    known = costs_of(with_costs(graph))
    missing = max(known)
    del known[missing]
    timed.clear()
    op_timing._MEASUREMENTS.clear()
    with_costs(graph, known=known)
    assert timed == [missing]


def test_a_card_is_never_measured(timed: list[str]) -> None:
    graph = graph_of(net(2048, drop=False), 2048, 2048)
    slow, fast = (with_costs(graph, device=devices.find(name)) for name in ("v100", "h100"))
    assert timed == []
    assert step_seconds(fast) < step_seconds(slow)


# -- encodings


def test_encodings_are_measured_by_what_runs() -> None:
    """Packing a large value takes longer than a small one; a reader of bits is charged what it takes more."""
    found: list[tuple[SavedForm, ...]] = []
    for batch in (1, 64):
        model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2))
        graph = graph_of(model, batch, 3, 64, 64)
        priced = with_costs(graph, limit=60.0)
        assert not unmeasured(priced)
        found.append(priced.forms)
    for small, large in zip(*found, strict=True):
        assert large.store_seconds > small.store_seconds > 0
        assert (large.fetch_seconds > 0) == large.can_restore_value
        assert large.direct_reader_extra_seconds >= 0
        assert large.use_seconds == large.store_seconds + large.direct_reader_extra_seconds
    assert [one.codec for one in found[1]] == ["sign", "index", "bits"]


def test_what_a_direct_reader_takes_more_is_timed_against_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), 64, 64)
    times = {"memplan.threshold_backward_bits.default": 5.0, "aten.threshold_backward.default": 3.5}
    monkeypatch.setattr(op_timing, "_fastest_run", lambda graph, called, on: times.get(called[0], 1.0))
    (encoding,) = with_costs(graph).forms
    assert (encoding.store_seconds, encoding.direct_reader_extra_seconds) == (1.0, 1.5)


class _Card:
    """`torch.cuda`'s counters over memplan's caching allocator, whose blocks may be longer than their requests."""

    def __init__(self) -> None:
        self.allocator, self.requests = CachingAllocator(AllocatorSettings()), dict[int, int]()
        self.most_allocated = self.most_requested = self.allocations = 0

    def malloc(self, size: int) -> int:
        address = self.allocator.malloc(size)
        self.requests[address] = size
        self.allocations += 1
        self.most_allocated = max(self.most_allocated, self.allocator.allocated)
        self.most_requested = max(self.most_requested, sum(self.requests.values()))
        return address

    def free(self, address: int) -> None:
        del self.requests[address]
        self.allocator.free(address)

    def reset(self, _: str) -> None:
        self.most_allocated, self.most_requested = self.allocator.allocated, sum(self.requests.values())

    def stats(self, _: str) -> dict[str, int]:
        requested = {"current": sum(self.requests.values()), "peak": self.most_requested}
        counts = {"current": len(self.requests), "allocated": self.allocations}
        stats = {f"requested_bytes.all.{name}": size for name, size in requested.items()}
        return stats | {f"allocation.all.{name}": count for name, count in counts.items()}


@pytest.mark.parametrize("counts_requests", [True, False])
def test_a_workspace_is_what_is_requested(counts_requests: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached block of 14 MiB serves a request of 13.3 MiB whole: at most 1 MiB would be left of it."""
    card, large, small = _Card(), 13_959_168, 700
    card.free(card.malloc(14 << 20))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", card.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: card.most_allocated)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: card.allocator.allocated)
    monkeypatch.setattr(torch.cuda, "memory_stats", card.stats if counts_requests else lambda _: {})

    def call() -> None:
        card.malloc(5000)  # the result
        for workspace in [card.malloc(size) for size in (large, small)]:
            card.free(workspace)

    exact = large + 1024
    assert exact <= op_timing.workspace_on("cuda:0", call) <= (exact + 512 if counts_requests else (14 << 20) + 1024)
    assert counts_requests == (op_timing.workspace_on("cuda:0", call) < 14 << 20)
