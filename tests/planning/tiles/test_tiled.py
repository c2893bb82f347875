"""Segments that run piece by piece, beside the same functions as a whole in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.tiles.recorded_segments import differentiated, recorded
from tests.truth.cpu_allocator import allocations, peak_of
from torch import Tensor, nn

from memplan.planning.ops.tile import TracedTile, register
from memplan.planning.tiles import rules
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Axis, Phase, Tiled
from memplan.planning.tiles.unread import WITHOUT_VALUES


class Residual(nn.Module):
    """A residual block that works in place."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, stride, 1), nn.BatchNorm2d(channels))
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels))
        project = nn.Sequential(nn.Conv2d(channels, channels, 1, stride), nn.BatchNorm2d(channels))
        self.shortcut = project if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        result = self.second(F.relu(self.first(x), inplace=True))
        result += self.shortcut(x)
        return F.relu(result, inplace=True)


class UNet(nn.Module):
    """A U-Net of two levels with three kinds of norms."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, norm, pool, up = (getattr(nn, f"{n}{dims}d") for n in ("Conv", "BatchNorm", "MaxPool", "ConvTranspose"))
        self.first = nn.Sequential(conv(2, 4, 3, padding=1), norm(4), nn.LeakyReLU(inplace=True))
        self.second = nn.Sequential(pool(2), conv(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = up(8, 4, 2, stride=2)
        self.last = nn.Sequential(conv(8, 4, 3, padding=1), getattr(nn, f"InstanceNorm{dims}d")(4), conv(4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of the first level and the result."""
        first = self.first(x)
        return first, self.last(torch.cat([first, self.up(self.second(first))], 1))


class Parts(nn.Module):
    """Chunks, parts of different sizes, and slices of a dimension, as of gated units and packed queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result."""
        value, gate = self.first(x).chunk(2, 1)
        small, large = (value * torch.sigmoid(gate)).split([1, 3], dim=-3)
        query, _, key = self.last(large * small).unflatten(1, (4, 1))[:, :3].unbind(1)
        return query * key


def stem() -> nn.Module:
    """The first layers of a ResNet: sizes that no number of pieces divides."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )


def nnunet_block() -> nn.Module:
    """Instance norm and an activation in place, which changes a view of the norm's own result."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True),
        nn.Conv2d(4, 4, 3, 2, 1), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True),
    )  # fmt: skip


def norm_first(norm: nn.Module, stride: int = 1, *, transposed: bool = False) -> nn.Module:
    """A norm of the input, and a convolution whose result nothing reads."""
    conv = nn.ConvTranspose2d if transposed else nn.Conv2d
    return nn.Sequential(norm, nn.ReLU(), conv(4, 3, 3, stride, padding=1))


SEGMENTS = {
    "batch norm first": (lambda: norm_first(nn.BatchNorm2d(4), 2), (4, 4, 20, 21)),
    "plain norm first": (lambda: norm_first(nn.BatchNorm2d(4, affine=False), transposed=True), (4, 4, 20, 21)),
    "group norm first": (lambda: norm_first(nn.GroupNorm(2, 4), 3), (4, 4, 20, 21)),
    "nnunet": (nnunet_block, (4, 2, 20, 21)),
    "stem": (stem, (4, 3, 37, 41)),
    "residual": (lambda: Residual(4, 1), (4, 4, 20, 21)),
    "strided": (lambda: Residual(4, 2), (4, 4, 21, 20)),
    "unet 2d": (lambda: UNet(2), (4, 2, 24, 20)),
    "parts": (Parts, (4, 2, 20, 21)),
    "unet 3d": (lambda: UNet(3), (2, 2, 16, 8, 8)),
}


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize(("dim", "pieces"), [(0, 1), (0, 2), (2, 1), (2, 2), (2, 3), (3, 4)])
def test_results_and_gradients_are_those_of_the_whole(name: str, dim: int, pieces: int) -> None:
    """Outputs, gradients of the input and of each parameter, but for the order of sums."""
    torch.manual_seed(0)
    build, shape = SEGMENTS[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parameters = list(model.parameters())
    whole = model(x)
    whole = [whole] if isinstance(whole, Tensor) else list(whole)
    program, tensors = recorded(model, [x], [*parameters, *model.buffers()])
    tiled, key = register(program, Axis(dim, shape[0] if dim == 0 else 0), pieces)
    results = TracedTile.apply(key, *tensors)[: len(whole)]
    for result, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
    expected = differentiated(whole, [x, *parameters])
    for gradient, other in zip(differentiated(results, [x, *parameters]), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)
    assert tiled.pieces == pieces


REDUCED = {
    "bias of a convolution": (lambda: nn.Conv2d(4, 2, 1), (1, 4, 512, 64), torch.float32),
    "bias of a product": (lambda: nn.Linear(8, 3), (1, 8192, 8), torch.float32),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), (1, 4, 512, 64), torch.float32),
    "group norm first": (lambda: norm_first(nn.GroupNorm(2, 4)), (1, 4, 512, 64), torch.float32),
    "weight in bfloat16": (lambda: nn.Conv2d(4, 8, 3, padding=1), (1, 4, 512, 64), torch.bfloat16),
}
"""Layers whose parameters' gradients are sums over the axis: their shape of inputs and dtype."""


@pytest.mark.parametrize("name", REDUCED)
def test_sums_over_many_pieces_are_as_exact_as_over_the_whole(name: str) -> None:
    """The gradient of each parameter, over four seeds: at most twice as far from float64 as PyTorch's own."""
    build, shape, dtype = REDUCED[name]
    errors = dict[str, list[float]]()
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = build().to(dtype), torch.randn(shape).to(dtype)
        incoming = torch.randn(model(x).shape)
        if name == "bias of a convolution":  # sums of pieces are large, their sum is small
            incoming += torch.linspace(-8, 8, 512)[:, None]
        parameters = dict(model.named_parameters())
        wide = copy.deepcopy(model).double()
        true = torch.autograd.grad(wide(x.double()), list(wide.parameters()), incoming.to(dtype).double())
        whole = torch.autograd.grad(model(x), list(parameters.values()), incoming.to(dtype))
        program, tensors = recorded(model, [x], [*parameters.values(), *model.buffers()])
        tiled = Tiled(program, Axis(2) if x.dim() == 4 else Axis(1, shape[0], shape[1]), 64)
        needed = [tensor.requires_grad for tensor in tensors]
        computed = tiled.backward(tensors, tiled.statistics(tensors), [incoming.to(dtype)], needed)
        ours = {id(tensor): total for tensor, total in zip(tensors, computed, strict=True) if total is not None}
        for (key, parameter), theirs, exact in zip(parameters.items(), whole, true, strict=True):
            gradients = ours[id(parameter)], theirs
            here = [(gradient.double() - exact).norm().item() / exact.norm().item() for gradient in gradients]
            errors[key] = [a + b for a, b in zip(errors.get(key, [0.0, 0.0]), here, strict=True)]
    assert {key: pair for key, pair in errors.items() if pair[0] > 2 * pair[1]} == {}


@settings(deadline=None, max_examples=40)
@given(
    kernel=st.integers(1, 5), stride=st.integers(1, 3), padding=st.integers(0, 3), dilation=st.integers(1, 2),
    transposed=st.booleans(), size=st.integers(12, 25), pieces=st.integers(1, 4), groups=st.sampled_from([1, 2]),
)  # fmt: skip
def test_any_convolution(
    kernel: int, stride: int, padding: int, dilation: int, transposed: bool, size: int, pieces: int, groups: int
) -> None:
    """Windows of convolutions and transposed ones."""
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        layer = nn.ConvTranspose1d(2, 4, kernel, output_padding=max(stride, dilation) - 1, **options).double()
    else:
        layer = nn.Conv1d(2, 4, kernel, **options).double()
    x = torch.randn(2, 2, size, dtype=torch.float64, requires_grad=True)
    try:
        whole = layer(x)
    except RuntimeError:  # the kernel is larger than the padded input
        return
    program, tensors = recorded(layer, [x], layer.parameters())
    try:
        tiled, key = register(program, Axis(2), pieces)
    except NotTileable:
        rows = whole.shape[2] // pieces  # of the smallest piece
        assert whole.shape[2] < pieces or rows * stride <= padding + stride  # a piece of nothing but padding
        return
    (result,) = TracedTile.apply(key, *tensors)
    torch.testing.assert_close(result, whole)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(differentiated([result], leaves), differentiated([whole], leaves))
    assert tiled.pieces == pieces


@pytest.mark.parametrize(
    ("function", "dim", "why"),
    [
        (lambda x: x.flip(0), 0, "no rule"),
        (lambda x: x - x.mean(0), 0, "sub reads a sum over the axis"),
        (lambda x: x.softmax(2), 2, "_softmax"),
        (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), 2, "fraction"),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), 2, "corners"),
        (lambda x: torch.cat([x, x], 0), 0, "cat"),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), 2, "borders"),
        (lambda x: F.adaptive_avg_pool2d(x, 3), 2, "axis"),
        (lambda x: F.max_pool2d(x, 2, return_indices=True)[1].double(), 0, "second result"),
    ],
)
def test_what_mixes_the_axis_is_refused(function: object, dim: int, why: str) -> None:
    """No op is taken to be independent along an axis that it mixes."""
    x = torch.randn(4, 2, 16, 16, dtype=torch.float64, requires_grad=True)
    program, _ = recorded(function, [x])  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotTileable, match=why):
        Tiled(program, Axis(dim, 4 if dim == 0 else 0), 2)


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_loss_of_a_class_for_each_pixel(pieces: int) -> None:
    """The classes have no channels: the axis of the scores' third dimension is in their second."""
    head = nn.Conv2d(2, 3, 3, padding=1).double()
    x, classes = torch.randn(2, 2, 7, 5, dtype=torch.float64, requires_grad=True), torch.randint(3, (2, 7, 5))
    loss = F.cross_entropy(head(x), classes)
    program, tensors = recorded(lambda x, y: F.cross_entropy(head(x), y), [x, classes], head.parameters())
    _, key = register(program, Axis(2), pieces)
    result, *_ = TracedTile.apply(key, *tensors)
    torch.testing.assert_close(result, loss)
    leaves = [x, *head.parameters()]
    torch.testing.assert_close(differentiated([result], leaves), differentiated([loss], leaves))


def test_more_pieces_than_elements_are_refused() -> None:
    """Each piece makes a part of each result."""
    program, _ = recorded(torch.relu, [torch.randn(3, 2)])
    with pytest.raises(NotTileable, match="3 elements for 4 pieces"):
        Tiled(program, Axis(0, 3), 4)


def test_overlap_is_what_neighbours_compute_twice() -> None:
    """Two 3x3 convolutions in two pieces of eight rows: the first has a row more at the border, by hand."""
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1))
    program, _ = recorded(model, [torch.randn(1, 1, 16, 16)], model.parameters())
    assert Tiled(program, Axis(2), 2).overlap_by_op(2) == [9 * 2 / 16, 1.0]


@pytest.mark.parametrize("first", ["conv", "norm"])
def test_runs_are_counted_as_they_happen(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """How often each convolution runs in each pass, beside a count of its calls.

    With a norm first its statistics take no run, and the last convolution does not run in the backward pass.
    """
    convs = [nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)]
    norms = [nn.BatchNorm2d(2), nn.BatchNorm2d(2)]
    pairs = zip(convs, norms, strict=True) if first == "conv" else zip(norms, convs, strict=True)
    model = nn.Sequential(*(layer for pair in pairs for layer in pair)).double()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    program, tensors = recorded(model, [x], [*model.parameters(), *model.buffers()])
    tiled = Tiled(program, Axis(0, 2), 1)
    indices = [at for at, node in enumerate(program.nodes) if node.name == "convolution"]
    calls = dict.fromkeys(indices, 0)
    rule = rules.RULES["aten.convolution.default"]
    run = rule.run

    def counted(call: Any, window: Any, tensors: Any, op: Any) -> Any:
        calls[program.nodes.index(call.node)] += op is not WITHOUT_VALUES[call.node.target]
        return run(call, window, tensors, op)

    monkeypatch.setattr(rule, "run", counted)

    def counts() -> list[int]:
        now = list(calls.values())
        calls.update(dict.fromkeys(indices, 0))
        return now

    def expected(phase: Phase) -> list[float]:
        return [tiled.runs_by_op(phase)[at] for at in indices]

    statistics = tiled.statistics(tensors)
    assert counts() == expected("statistics") == ([2, 1] if first == "conv" else [1, 0])
    results = tiled.forward(tensors, statistics)
    assert counts() == expected("forward") == [1, 1]
    tiled.backward(tensors, statistics, [torch.ones_like(results[0])], [t.requires_grad for t in tensors])
    assert counts() == expected("backward") == ([3, 3] if first == "conv" else [2, 0])


def test_norms_that_do_not_depend_on_each_other_share_passes() -> None:
    """The second norm of a residual block and that of its shortcut; a derivative goes the other way."""
    model = Residual(4, 2)
    program, _ = recorded(model, [torch.randn(4, 4, 8, 8)], [*model.parameters(), *model.buffers()])
    tiled = Tiled(program, Axis(0, 4), 2)
    first, second, shortcut = tiled.norms
    assert tiled.statistic_passes == [[first, shortcut], [second]]
    assert tiled.derivative_sum_passes == [[shortcut, second], [first]]


def test_derivatives_of_what_is_behind_a_norm_are_computed_for_its_sums() -> None:
    """In the pass for the sums of the first norm the second convolution needs no gradient of its weight."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.ReLU())
    program, _ = recorded(model, [torch.randn(2, 2, 4, 4)], [*model.parameters(), *model.buffers()])
    tiled = Tiled(program, Axis(0, 2), 1)
    counts = {node.name: [] for node in program.nodes}
    for node, count in zip(program.nodes, tiled.derivatives_by_op, strict=True):
        counts[node.name].append(count)
    assert counts["convolution"] == [1.0, 1.5]
    assert counts["relu"] == [2.0]


def test_of_pieces_with_windows_of_the_same_sizes_one_is_measured() -> None:
    """Twenty rows in eight pieces of 2, 3, 2, 3 and so on, with a border on each side; the first and last have one."""
    model = nn.Conv2d(1, 1, 3, padding=1)
    program, _ = recorded(model, [torch.randn(1, 1, 20, 4)], model.parameters())
    assert Tiled(program, Axis(2), 8).unlike_pieces == [0, 1, 2, 7]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
    ],
)
def test_nothing_of_a_piece_is_alive_in_the_next(model: nn.Sequential) -> None:
    """Peak of the passes over eight equal pieces, by torch's profiler: that of the passes over a single piece."""
    x = torch.randn(8, 3, 32, 32)
    program, tensors = recorded(model, [x], [*model.parameters(), *model.buffers()])
    tiled = Tiled(program, Axis(0, 8), 8)
    statistics, needed = tiled.statistics(tensors), [tensor.requires_grad for tensor in tensors]
    gradients = [torch.randn(like.shape) for like in tiled.result_likes]
    passes: list[Callable[[Sequence[int] | None], object]] = [
        lambda pieces: tiled.statistics(tensors, pieces),
        lambda pieces: tiled.forward(tensors, statistics, pieces),
        lambda pieces: tiled.backward(tensors, statistics, gradients, needed, pieces),
    ]
    for run in passes:
        one, all_pieces = (peak_of(allocations(partial(run, pieces))) for pieces in ((0,), None))
        assert all_pieces == pytest.approx(one, abs=1024)  # vectors of sums; an inner tensor of a piece has 64 KiB
