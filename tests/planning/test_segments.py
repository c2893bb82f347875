"""Which segments are found, and which of them is chosen."""

from __future__ import annotations

import pytest
import torch
from models.skip_levels import Levels
from torch import nn

from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.cost.op_timing import with_costs
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.segments import Segments, over_budget_ops
from memplan.planning.tiles.tiled import Axis, Tile


@pytest.fixture(scope="module")
def stem() -> Captured:
    """Return a captured net with large tensors in the first layers."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Conv2d(16, 4, 3),
        nn.Dropout(0.5), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip
    return capture(model, call_of((torch.randn(4, 3, 20, 20),), {}))


def segments_of(captured: Captured) -> Segments:
    """Return the segments of a step, with modelled seconds."""
    return Segments(with_costs(captured.graph, how="roofline"), captured.in_place_calls)


def call_named(captured: Captured, target: str) -> int:
    """Return the call of the first op of this name."""
    call = next(op.call for op in captured.graph.ops if op.target == target)
    assert call is not None
    return call


def test_bytes_of_a_segment_are_those_of_its_tensors(stem: Captured) -> None:
    """By hand: it reads the step's input, which is there anyway; three tensors of 102,400 B inside."""
    segments = segments_of(stem)
    first, last = (
        call_named(stem, f"aten.{name}") for name in ("convolution.default", "max_pool2d_with_indices.default")
    )
    segment = segments.segment(first, last, Axis(0, 4), 2)
    assert segment is not None
    assert (segment.operands, segment.result_bytes) == ((), 4 * 16 * 5 * 5 * 4)
    statistics, indices = 4 * 64, 4 * 16 * 5 * 5 * 8
    assert segment.inner_bytes == 3 * 4 * 16 * 20 * 20 * 4 + statistics + indices
    assert len(segment.tiled.norms) == 1


def test_axes_are_the_batch_and_the_largest_of_space() -> None:
    """A batch of one has no axis of samples."""
    model = nn.Conv2d(1, 1, 3)
    for shape, dims in (((4, 1, 8, 9), [0, 3]), ((1, 1, 9, 8), [2])):
        graph = capture(model, call_of((torch.randn(shape),), {})).graph
        assert [axis.dim for axis in Segments(graph).axes] == dims


def test_random_ops_are_in_no_segment(stem: Captured) -> None:
    """A dropout would draw other numbers."""
    segments, convolution = segments_of(stem), call_named(stem, "aten.convolution.default")
    assert segments.segment(convolution, segments.calls[-1], Axis(0, 4), 2) is None


def test_no_segment_cuts_the_channels_of_a_batch_norm_that_updates_statistics() -> None:
    """A piece would update its channels' statistics alone, which the trace refuses. In evaluation it updates none."""
    for training in (True, False):
        captured = capture(nn.BatchNorm1d(6).train(training), call_of((torch.randn(2, 6, 8),), {}))
        segments = segments_of(captured)
        (call,) = segments.calls
        segment = segments.segment(call, call, Axis(1, samples=2, tokens=6), 2)
        assert (segment is None) == training


@pytest.mark.parametrize("axis", [Axis(0, samples=2), Axis(2)], ids=str)
def test_a_batch_norm_in_evaluation_runs_along_samples_and_space(axis: Axis) -> None:
    """Its statistics are those of the whole: none is a norm that needs a pass."""
    captured = capture(nn.Sequential(nn.BatchNorm2d(6).eval()), call_of((torch.randn(2, 6, 8, 8),), {}))
    segments = segments_of(captured)
    (call,) = segments.calls
    segment = segments.segment(call, call, axis, 2)
    assert segment is not None
    assert not segment.tiled.norms


def test_hot_ops_are_above_the_target(stem: Captured) -> None:
    """Levels beside a walk through the schedule by hand."""
    graph = with_costs(stem.graph, how="roofline")
    kept = schedule(graph, Choices())
    everything = over_budget_ops(graph, kept, OutsideMemory(), 0)
    highest = everything[0]
    live, peak = {value.id for value in graph.values if value.kind in ("parameter", "buffer", "input", "constant")}, 0
    for action in (*kept.forward, *kept.backward):
        live |= set(action.makes)
        scratch = 0 if action.op is None or action.overwritten is not None else graph.ops[action.op].scratch
        discarded = 0 if action.op is None else graph.ops[action.op].discarded
        peak = max(peak, sum(graph.values[value].bytes for value in live) + scratch + discarded)
        live -= set(action.frees)
        if action.overwritten is not None:
            live.discard(action.overwritten)
    assert highest.level == pytest.approx(peak, rel=0.05)
    assert all(
        hot.level > highest.level - 1 for hot in over_budget_ops(graph, kept, OutsideMemory(), highest.level - 1)
    )
    assert not over_budget_ops(graph, kept, OutsideMemory(), highest.level)


def test_the_segment_around_a_hot_op_holds_it_and_does_not_begin_in_place(stem: Captured) -> None:
    """The choice lowers the level; beside a tile, it is none or one that takes the tile in."""
    graph, segments = with_costs(stem.graph, how="roofline"), segments_of(stem)
    hot = over_budget_ops(graph, schedule(graph, Choices()), OutsideMemory(), 0)[0]
    tile = segments.tile_around(hot, hot.level // 2, [], 2.0)
    assert tile is not None
    assert tile.first <= hot.call <= tile.last
    assert tile.first not in stem.in_place_calls
    other = segments.tile_around(hot, hot.level // 2, [tile], 2.0)
    assert other is None or (other.first <= tile.first and tile.last <= other.last)


def test_levels_are_the_calls_on_the_largest_tensors() -> None:
    """By hand: a level's half of the encoder ends with the pool; its half of the decoder begins with the transposed
    convolution, and repeats the other. The outer level goes on to the loss. Tensors a quarter as large are the next."""
    captured = capture(Levels(), call_of((torch.randn(1, 1, 64, 64),), {}))
    segments, graph = segments_of(captured), captured.graph
    calls = {layer: [op.call for op in graph.forward_ops if op.layer == layer] for layer in ("down.0", "up.0", "up.1")}
    pools = [op.call for op in graph.forward_ops if op.target == "aten.avg_pool2d.default"]
    (first,), (up_0,), (up_1,) = calls.values()
    joins = [op.call for op in graph.forward_ops if op.layer == "join.1"]
    loss = max(segments.calls)
    outer = segments.with_next_level((), budget=1 << 30)
    assert [(t.first, t.last, t.repeats) for t in outer] == [(first, pools[0], ()), (up_0, loss, (first,))]
    second = next(op.call for op in graph.forward_ops if op.layer == "down.1")
    both = segments.with_next_level(outer, budget=1 << 30)
    inner = [(second, pools[1], ()), (up_1, joins[-1], (second,))]
    assert [(t.first, t.last, t.repeats) for t in both] == [
        (first, pools[0], ()), *inner, (up_0, loss, (first,)),
    ]  # fmt: skip
    assert segments.with_next_level(outer, budget=1 << 10)[0].pieces == outer[0].pieces  # what is there stays


class Bottleneck(nn.Module):
    """A residual block of four norms: three in a row, and that of the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        inner = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        self.branch = nn.Sequential(
            *inner, nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        )
        self.shortcut = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.row = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's result after four more norms in a row."""
        x = self.first(x)
        return self.row(self.branch(x) + self.shortcut(x))


def test_norms_that_share_a_pass_count_once() -> None:
    """The block's four norms need three passes; the four in a row need four, which is too much."""
    captured = capture(Bottleneck(), call_of((torch.randn(4, 3, 16, 16),), {}))
    segments, calls = segments_of(captured), dict[str, list[int]]()
    for op in captured.graph.forward_ops:
        assert op.call is not None
        calls.setdefault(op.layer, []).append(op.call)
    block = segments.segment(calls["branch.0"][0], calls["shortcut.1"][-1], Axis(0, 4), 2)
    assert block is not None
    assert len(block.tiled.norms) == 4
    assert segments.segment(calls["row.0"][0], calls["row.5"][-1], Axis(0, 4), 2) is not None
    assert segments.segment(calls["row.0"][0], calls["row.7"][-1], Axis(0, 4), 2) is None


def test_more_pieces_are_not_along_an_axis_that_takes_more_memory() -> None:
    """By samples, the gradient of what the segment reads is written over that of its result. By rows it would be a
    tensor more, 512 KiB, which is more than pieces half as large save."""
    captured = capture(Bottleneck(), call_of((torch.randn(4, 3, 64, 64),), {}))
    segments = segments_of(captured)
    calls = {op.layer: op.call or 0 for op in captured.graph.forward_ops}
    first, last = calls["row.0"], calls["row.1"]
    segment = segments.segment(first, last, Axis(0, 4), 4)
    assert segment is not None
    assert segment.overwritten_bytes == 4 * 8 * 64 * 64 * 4
    assert segments.tile_in_more_pieces(Tile(first, last, Axis(0, 4), 4)) is None
    assert segments.tile_in_more_pieces(Tile(first, last, Axis(2), 4)) == Tile(first, last, Axis(2), 8)


class Gated(nn.Module):
    """A gate: two views of a convolution's result, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.conv(x).chunk(2, 1)
        return self.norm(value * torch.sigmoid(gate))


def test_a_group_norm_runs_in_pieces_and_its_derivative_computes_the_statistics() -> None:
    """Its derivative reads them detached: no op of the forward pass does."""
    captured = capture(Gated(), call_of((torch.randn(4, 3, 20, 20),), {}))
    ops = captured.graph.ops
    detached = [op.call for op in ops if op.target == "aten.detach.default" and op.phase == "forward"]
    norm = call_named(captured, "aten.native_group_norm.default")
    assert detached.count(norm) == 2
    for axis, norms in ((Axis(0, 4), 0), (Axis(2), 1)):  # each sample has statistics of its own
        segment = segments_of(captured).segment(norm, norm, axis, 2)
        assert segment is not None
        assert len(segment.tiled.norms) == norms


def test_no_segment_ends_between_the_parts_of_a_tensor_and_what_reads_them() -> None:
    """The parts share memory, as the results of a segment must not. A longer one has the parts inside."""
    captured = capture(Gated(), call_of((torch.randn(4, 3, 20, 20),), {}))
    names = "convolution.default", "split.Tensor", "mul.Tensor"
    conv, chunk, product = (call_named(captured, f"aten.{name}") for name in names)
    ranges = {(segment.first, segment.last) for segment, _, _ in segments_of(captured)._candidates(conv, ())}
    assert (conv, product) in ranges
    assert all(last != chunk for _, last in ranges)
