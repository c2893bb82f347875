"""Segments as ops of a captured graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from environment import slow
from tests.planning.tiles.recorded_segments import recorded
from torch import Tensor, nn
from torch.nn import functional as F

from memplan import _torch
from memplan.errors import RecordingError
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.tiling import tile_scratch
from memplan.planning.ops.tile import TILE, TILE_BACKWARD, TILE_STATISTICS, register
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Axis, Tile
from memplan.rewriting.engine import Engine


class Branches(nn.Module):
    """A stem whose first result is read behind the segment, too, and a local that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of two paths."""
        first = self.first(x)
        unread = first.exp()  # noqa: F841  # alive to the end of the call
        second = F.relu(self.norm(first))
        return self.last(second) + first.sum((1, 2, 3), keepdim=True)


def captured(model: nn.Module, x: Tensor, last: str, pieces: int = 2) -> tuple[Captured, Captured]:
    """Return a captured call, and the same with a tile from its first convolution to the op named ``last``."""
    plain = capture(model, call_of((x,), {}))
    calls = {op.target: op.call for op in reversed(plain.graph.forward_ops)}
    first, end = calls["aten.convolution.default"], calls[last]
    assert first is not None
    assert end is not None
    return plain, capture(model, call_of((x,), {}), tiles=[Tile(first, end, Axis(0, x.shape[0]), pieces)])


def test_a_segment_is_one_op_and_its_derivative() -> None:
    """Two results that are read; mean and variance of its norm have an op, running statistics are updated outside."""
    plain, tiled = captured(Branches(), torch.randn(4, 2, 8, 8), "aten.relu.default")
    forward = [op for op in tiled.graph.ops if op.target == TILE]
    backward = [op for op in tiled.graph.ops if op.target == TILE_BACKWARD]
    statistics = [op for op in tiled.graph.ops if op.target == TILE_STATISTICS]
    assert len(forward) == len(backward) == len(statistics) == 1
    shapes = [[tiled.graph.values[value].shape for value in op.makes] for op in (forward[0], statistics[0])]
    assert shapes == [[(4, 4, 8, 8)] * 2, [(1, 4)] * 2]
    assert not any(op.target == "aten.exp.default" for op in tiled.graph.ops)
    written = [[g.values[of].path for of, _ in g.mutations] for g in (plain.graph, tiled.graph)]
    assert sorted(written[0]) == sorted(written[1])
    assert backward[0].gradient_of == statistics[0].index  # the first op of the same autograd function
    assert forward[0].call == statistics[0].call


@pytest.mark.parametrize("pieces", [2, *slow(1, 4)])
def test_scratch_is_what_the_ops_take(pieces: int) -> None:
    """Workspaces of both ops beside the allocator's events of a real run."""
    model, x = (
        nn.Sequential(nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        torch.randn(4, 2, 40, 40),
    )
    _, tiled = captured(model, x, "aten.max_pool2d_with_indices.default", pieces)
    for target in (TILE_STATISTICS, TILE, TILE_BACKWARD):
        op = next(op for op in tiled.graph.ops if op.target == target)

        def tensors(leaf: object, tiled: Captured = tiled) -> object:
            value = tiled.graph.values[leaf.value] if hasattr(leaf, "value") else None  # pyright: ignore
            return leaf if value is None else torch.ones(value.shape)

        args = _torch.tree_map(tensors, op.args)
        run, profile = getattr(torch.ops.memplan, op.target.split(".")[1]).default, _torch.memory_profile()
        run(*args)
        with profile, _torch.marker("op"):
            results = run(*args)
        level = peak = 0
        for event in _torch.Profile.of(profile).events:
            level += event.bytes
            peak = max(peak, level)
        measured = peak - sum(result.untyped_storage().nbytes() for result in results)
        assert tile_scratch(target, args) == pytest.approx(measured, rel=0.02, abs=1024)


@pytest.mark.parametrize("target", [TILE, TILE_BACKWARD])
def test_a_piece_in_halves_takes_more_than_a_larger_one(target: str) -> None:
    """Pieces read 16 or 17 slices, the first and last fewer. torch runs oneDNN for 17 and copies each window of 16,
    which run in halves instead. Scratch is the peak of the allocator's events in a real run of all pieces."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv3d(32, 4, 3, padding=(0, 1, 1)), nn.Conv3d(4, 4, 5, padding=2), nn.Conv3d(4, 4, 5, padding=2)
    )
    volume = torch.randn(1, 32, 40, 40, 16)
    program, tensors = recorded(layers, [volume], layers.parameters())
    _, key = register(program, Axis(2), 6)
    inputs, dy = [tensor.detach() for tensor in tensors], torch.randn(1, 4, 38, 40, 16)
    needed = [tensor.requires_grad for tensor in tensors]
    arguments = (inputs, [], key) if target == TILE else (inputs, [], [dy], needed, key)
    run, profile = getattr(torch.ops.memplan, target.split(".")[1]).default, _torch.memory_profile()
    with profile:
        results = run(*arguments)
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    assert level >= sum(result.untyped_storage().nbytes() for result in results)
    assert tile_scratch(target, arguments) == pytest.approx(peak - level, rel=1e-3)


def without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    y = F.conv2d(x, weight)
    with torch.no_grad():
        mask = (y > 0).float()
    return F.relu(y * mask)


def changes_outside(x: Tensor, weight: Tensor) -> Tensor:
    copy = x.clone()
    return F.relu(F.conv2d(copy, weight) + x.mul_(2))


@pytest.mark.parametrize("function", [without_gradient, changes_outside])
def test_what_a_segment_cannot_hold_is_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A part without gradient, whose derivative would be another; an input that is changed."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return function(x + 1, self.weight)

    with pytest.raises(NotTileable):
        captured(Model(), torch.randn(4, 2, 8, 8), "aten.relu.default")


def test_calls_in_place_are_known() -> None:
    """By their function's name, by ``inplace``, and by what an index writes. A batch norm writes its statistics, and
    may begin a segment."""

    class Clipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, :1] = 0
            return x

    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.ReLU(), nn.BatchNorm2d(2), Clipped())
    found = capture(model, call_of((torch.randn(1, 2, 4, 4),), {}))
    calls = {op.target: op.call for op in found.graph.forward_ops}
    relus = [op.call for op in found.graph.forward_ops if op.target == "aten.relu.default"]
    (norm,) = (call for target, call in calls.items() if "batch_norm" in target)
    assert relus[0] in found.in_place_calls
    assert relus[1] not in found.in_place_calls
    assert norm not in found.in_place_calls
    assert max(call for call in calls.values() if call is not None) in found.in_place_calls


class Stem(nn.Module):
    """Two convolutions with a batch norm between them, called by a function."""

    def __init__(self, function: Callable[[Stem, Tensor], Tensor | tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return what the function returns."""
        return self.function(self, x)


def hook_inside(m: Stem, x: Tensor) -> Tensor:
    first = m.first(x)
    first.register_hook(lambda gradient: gradient * 2)
    return m.last(F.relu(m.norm(first)))


def hook_behind(m: Stem, x: Tensor) -> Tensor:
    first = m.first(x)
    second = F.relu(m.norm(first))
    first.register_hook(lambda gradient: gradient * 2)  # of its whole gradient, through the norm, too
    return m.last(second) + first.mean()


def asks_for_gradient(m: Stem, x: Tensor) -> Tensor:
    first = m.first(x)
    return m.last(F.relu(first * (2 if first.requires_grad else 3)))


def norm_of_other_samples(m: Stem, x: Tensor) -> Tensor:
    single = x[:1] * 2  # not along the batch: it would be normalized as a whole, and its statistics lost
    return m.last(F.relu(m.first(x) + m.norm(F.conv2d(single, m.first.weight, padding=1))))


@pytest.mark.parametrize("function", [hook_inside, hook_behind, asks_for_gradient, norm_of_other_samples])
def test_what_a_segment_would_change_is_refused(function: Callable[[Stem, Tensor], Tensor]) -> None:
    """Hooks on a part of a gradient, a branch on whether there is one, running statistics of what is not in pieces."""
    with pytest.raises(NotTileable):
        captured(Stem(function), torch.randn(4, 2, 8, 8), "aten.relu.default")


def test_results_may_be_returned_or_lead_nowhere() -> None:
    """A value of the middle of a segment as output of the model; a norm that only updates its statistics."""

    def function(m: Stem, x: Tensor) -> tuple[Tensor, Tensor]:
        first = m.first(x)
        m.norm(first)
        return first, m.last(F.relu(first))

    plain, tiled = captured(Stem(function), torch.randn(4, 2, 8, 8), "aten.relu.default")
    shapes = [[g.values[value].shape for value in g.outputs] for g in (plain.graph, tiled.graph)]
    assert shapes[0] == shapes[1]
    assert len(tiled.graph.mutations) == len(plain.graph.mutations)


def written_result(m: Stem, x: Tensor) -> Tensor:
    first = m.first(x) + 1
    part = first[:, :2]
    second = F.relu(first + 1)
    first.mul_(2)  # and so the part
    return m.last(second) + part + first.mean()


def written_operand(m: Stem, x: Tensor) -> Tensor:
    x = x * 1
    y = m.first(x + 0)
    flat = x.view(4, -1)
    second = F.relu(y)
    x.mul_(5)
    return m.last(second) + flat.mean()


@pytest.mark.parametrize("function", [written_result, written_operand])
def test_results_with_memory_of_others_are_refused(function: Callable[[Stem, Tensor], Tensor]) -> None:
    """A view that leaves the segment would not see what is written behind it."""
    with pytest.raises(NotTileable, match=r"view|changes what the segment reads"):
        captured(Stem(function), torch.randn(4, 2, 8, 8), "aten.relu.default")


def halved(buffer: Tensor) -> None:
    buffer.mul_(0.5)


def halved_by_index(buffer: Tensor) -> None:
    buffer[:] = 0.5 * buffer


def halved_into(buffer: Tensor) -> None:
    torch.mul(buffer, 0.5, out=buffer)


@pytest.mark.parametrize("write", [halved, halved_by_index, halved_into])
def test_a_buffer_written_behind_its_reader_is_refused(write: Callable[[Tensor], None]) -> None:
    """The segment runs as a whole behind the write."""

    def written_buffer(m: Stem, x: Tensor) -> Tensor:
        scale = m.norm.running_var
        assert scale is not None
        scaled = F.relu(x.exp() * scale[:2].view(2, 1, 1) + 1)
        write(scale)
        return m.last(m.first(F.relu(scaled)))

    model, x = Stem(written_buffer), torch.randn(4, 2, 8, 8)
    relus = [op.call for op in capture(model, call_of((x,), {})).graph.forward_ops if op.target == "aten.relu.default"]
    assert relus[0] is not None
    assert relus[1] is not None
    with pytest.raises(NotTileable, match="buffer"):
        capture(model, call_of((x,), {}), tiles=[Tile(0, relus[1], Axis(0, 4), 2)])


class Asking(nn.Module):
    """Two layers, the second on the device of what the first returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the second's result."""
        hidden = F.relu(self.first(x))
        return self.second(hidden.to(hidden.device))


def test_a_segment_ends_at_the_same_call() -> None:
    """Of a question for a device there is a call of a torch function with data alone."""
    model, call = Asking(), call_of((torch.randn(6, 4),), {})
    calls = [op.call for op in capture(model, call).graph.forward_ops if op.target == "aten.addmm.default"]
    first, last = calls
    assert first is not None
    assert last is not None
    graph = capture(model, call, tiles=[Tile(first, last, Axis(0, 6), 2)]).graph
    assert [op.target for op in graph.forward_ops].count(TILE) == 1
    assert all(op.target != "aten.addmm.default" for op in graph.forward_ops)


class Skip(nn.Module):
    """A level of a U-Net: its first half is read again in its second, after a network on half of the size."""

    def __init__(self, between: Callable[[Tensor], object] = lambda skip: None, inplace: bool = False) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sigmoid())
        self.inner, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, 2)
        self.last = nn.Sequential(nn.Conv2d(8, 2, 3, padding=1), nn.BatchNorm2d(2))
        self.between, self.inplace = between, inplace

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the scores' logistic loss."""
        y = self.down(x)
        skip = y * 3
        small = torch.tanh(self.inner(F.avg_pool2d(y, 2)))
        self.between(skip)
        up = self.up(small)
        if self.inplace:
            skip.mul_(2)
        return F.softplus(self.last(torch.cat((skip, up), 1))).mean()


def repeating(model: nn.Module, x: Tensor) -> tuple[Captured, Captured]:
    """Return a captured call, and the same with a tile of each half of the outer level; the second repeats the
    first."""
    plain = capture(model, call_of((x,), {}))
    names = [op.target.split(".")[1] for op in plain.graph.forward_ops]
    calls = [op.call for op in plain.graph.forward_ops]
    up = next(at for at, op in enumerate(plain.graph.forward_ops) if op.layer == "up")
    first, pool, begin, end = calls[0], calls[names.index("avg_pool2d")], calls[up], calls[-1]
    assert first is not None
    assert pool is not None
    assert begin is not None
    assert end is not None
    tiles = [Tile(first, pool, Axis(2), 4), Tile(begin, end, Axis(2), 4, (first,))]
    return plain, capture(model, call_of((x,), {}), tiles=tiles)


def test_a_tile_that_repeats_another_needs_none_of_its_results() -> None:
    """The skip is no tensor of the step, nor its gradient; loss, gradients and running statistics are those of the
    whole, but for the order of sums."""
    torch.manual_seed(0)
    model, x = Skip().double(), torch.randn(2, 2, 16, 8, dtype=torch.float64)
    other = copy.deepcopy(model)
    plain, tiled = repeating(model, x)
    skip = (2, 4, 16, 8)
    assert skip in [value.shape for value in plain.graph.values]
    assert skip not in [value.shape for value in tiled.graph.values]
    loss = Engine(tiled, schedule(tiled.graph, Choices())).run(model, call_of((x,), {}))
    expected = other(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    ours, theirs = ([*m.buffers(), *(p.grad for p in m.parameters())] for m in (model, other))
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)


def test_what_is_changed_behind_a_tile_is_not_computed_again() -> None:
    """A write between the two tiles: the second reads the tensor. A write in the second is refused."""
    torch.manual_seed(0)
    model, x = Skip(lambda skip: skip.mul_(2)).double(), torch.randn(2, 2, 16, 8, dtype=torch.float64)
    other = copy.deepcopy(model)
    _, tiled = repeating(model, x)
    loss = Engine(tiled, schedule(tiled.graph, Choices())).run(model, call_of((x,), {}))
    expected = other(x)
    loss.backward()
    expected.backward()
    for mine, their in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert their.grad is not None
        torch.testing.assert_close(mine.grad, their.grad, rtol=1e-10, atol=1e-12)
    with pytest.raises(NotTileable, match="changes a tensor from outside of the segment"):
        repeating(Skip(inplace=True).double(), x)


class Centred(Skip):
    """A level that begins with less of a buffer; ``change`` is called between its halves, with the model and the
    input."""

    def __init__(self, change: Callable[[Centred, Tensor], object]) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.full((2, 1, 1), 0.5))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the scores' logistic loss."""
        y = self.down(x - self.mean)
        small = torch.tanh(self.inner(F.avg_pool2d(y, 2)))
        self.change(self, x)
        return F.softplus(self.last(torch.cat((y * 3, self.up(small)), 1))).mean()


def normalize(model: Centred, x: Tensor) -> None:
    with torch.no_grad():
        F.batch_norm(x, model.mean.view(-1), torch.ones(2), training=True)


CHANGES: dict[str, Callable[[Centred, Tensor], object]] = {
    "a buffer": lambda model, x: model.mean.lerp_(x.mean((0, 2, 3)).view(2, 1, 1), 0.1),
    "a view of a buffer": lambda model, x: model.mean[:1].mul_(3),
    "the data of a buffer": lambda model, x: model.mean.data.mul_(3),
    "running statistics": normalize,
    "the input": lambda model, x: x.clamp_(0, 1),
    "the data of the input": lambda model, x: x.data.clamp_(0, 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_segment_whose_operand_is_changed_behind_it_is_refused(change: Callable[[Centred, Tensor], object]) -> None:
    """Its derivative, and the tile that repeats it, would compute it from what is there then."""
    with pytest.raises(NotTileable, match="changes what the segment reads") as caught:
        repeating(Centred(change), torch.randn(2, 2, 16, 8))
    assert caught.value.at == 0


def test_what_no_segment_reads_may_be_changed() -> None:
    """A buffer beside that which the first tile reads."""
    _, tiled = repeating(Centred(lambda model, x: model.down[1].num_batches_tracked.mul_(2)), torch.randn(2, 2, 16, 8))  # pyright: ignore
    assert [op.target for op in tiled.graph.forward_ops].count(TILE) == 1


def test_a_capture_with_segments_has_the_reads_of_the_one_without() -> None:
    """They are not observed again. Where one changed in the meantime, there is no capture."""

    class Scaled(Branches):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            """Return the sum of two paths times an attribute."""
            return super().forward(x) * self.scale

    model, call = Scaled(), call_of((torch.randn(4, 2, 8, 8),), {})
    plain = capture(model, call)
    tiles = [Tile(0, 0, Axis(0, 4), 2)]
    assert plain.reads is not None
    tiled = capture(model, call, tiles=tiles, reads=plain.reads)
    assert tiled.reads is plain.reads
    observed = capture(model, call, tiles=tiles)
    assert observed.graph.fingerprint == tiled.graph.fingerprint
    model.scale = 3.0
    for each in (observed, tiled):
        assert each.reads is not None
        assert not each.reads.are_unchanged()
    with pytest.raises(RecordingError, match=r"what forward\(\) reads changed since the step was traced: .*Scaled"):
        capture(model, call, tiles=tiles, reads=plain.reads)


def test_a_segment_that_does_not_end_is_refused() -> None:
    """A plan of a model with its loss can have a segment that only the loss ends."""
    with pytest.raises(NotTileable, match="the step ends before the segment does"):
        capture(Branches(), call_of((torch.randn(4, 2, 8, 8),), {}), tiles=[Tile(0, 99, Axis(0, 4), 2)])
