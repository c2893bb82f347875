"""The ops of a tile: their keys, and that torch can trace them."""

from __future__ import annotations

import pytest
import torch
from tests.planning.tiles.recorded_segments import recorded
from torch import nn

from memplan import _torch
from memplan.planning.capture.tiling import tile_scratch
from memplan.planning.graph.roofline import WORKS
from memplan.planning.ops.tile import TILE, TILE_BACKWARD, TILE_STATISTICS, register, tile_of
from memplan.planning.tiles.tiled import Axis


def test_a_key_is_that_of_the_segment() -> None:
    """Equal segments share it; others, and other pieces, have another. It ends with its last tile."""
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(4, 2, 8, 8)
    tiled, key = register(recorded(layer, [x], layer.parameters())[0], Axis(0, 4), 2)
    again, same = register(recorded(layer, [x], layer.parameters())[0], Axis(0, 4), 2)
    assert again is tiled
    assert same == key
    assert tile_of(key) is tiled
    other, different = register(recorded(layer, [x], layer.parameters())[0], Axis(0, 4), 4)
    assert different != key
    assert other is not tiled


def test_torch_accepts_the_ops() -> None:
    """`torch.library.opcheck`: schema, and that fake results have the shapes and strides of real ones."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    program, tensors = recorded(model, [torch.randn(4, 2, 8, 8)], [*model.parameters(), *model.buffers()])
    tiled, key = register(program, Axis(0, 4), 2)
    tests = ("test_schema", "test_faketensor")
    detached = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(torch.ops.memplan.tile_statistics.default, (detached, key), test_utils=tests)
    statistics = torch.ops.memplan.tile_statistics.default(detached, key)
    torch.library.opcheck(torch.ops.memplan.tile.default, (detached, statistics, key), test_utils=tests)
    (result,) = torch.ops.memplan.tile.default(detached, statistics, key)
    needed = [tensor.requires_grad for tensor in tensors]
    arguments = detached, statistics, [torch.ones_like(result)], needed, key
    torch.library.opcheck(torch.ops.memplan.tile_backward.default, arguments, test_utils=tests)
    assert tiled


def test_work_is_what_the_pieces_compute() -> None:
    """FLOPs of a convolution before a norm, by hand: once for the statistics, once forward; backward twice again, and a
    derivative of twice its work."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3))
    program, _ = recorded(model, [torch.randn(4, 2, 8, 8)], [*model.parameters(), *model.buffers()])
    tiled, key = register(program, Axis(0, 4), 2)
    once = 2 * 4 * 8 * 8 * 3 * 2 * 9
    assert WORKS[TILE_STATISTICS]((None, key)).flops == WORKS[TILE]((None, key)).flops == once
    assert WORKS[TILE_BACKWARD]((None, key)).flops == 4 * once
    assert tiled


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_gradient_takes_the_place_of_another(norm_first: bool) -> None:
    """The same bits as without, in the memory of the result's gradient."""
    conv, norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    model = nn.Sequential(*((norm, nn.ReLU(), conv) if norm_first else (conv, norm, nn.ReLU())))
    x = torch.randn(6, 4, 9, 9, requires_grad=True)
    program, tensors = recorded(model, [x], [*model.parameters(), *model.buffers()])
    needed = [tensor.requires_grad for tensor in tensors]
    tensors = [tensor.detach() for tensor in tensors]
    tiled, key = register(program, Axis(0, 6), 3)
    statistics, gradient = tiled.statistics(tensors), torch.randn(6, 4, 9, 9)
    expected = torch.ops.memplan.tile_backward.default(tensors, statistics, [gradient], needed, key)
    computed = torch.ops.memplan.tile_backward_.default(tensors, statistics, [gradient], needed, key)
    assert all(map(torch.equal, computed, expected))
    assert computed[0].data_ptr() == gradient.data_ptr()


def test_a_gradient_that_other_pieces_read_stays() -> None:
    """Rows with borders, and another shape."""
    same, x = nn.Conv2d(4, 4, 3, padding=1), torch.randn(6, 4, 9, 9)
    rows, _ = register(recorded(same, [x], same.parameters())[0], Axis(2), 3)
    assert rows.overwritable_gradient([True] * 3) is None
    smaller = nn.Conv2d(4, 4, 3)
    samples, _ = register(recorded(smaller, [x], smaller.parameters())[0], Axis(0, 6), 3)
    assert samples.overwritable_gradient([True] * 3) is None


@pytest.mark.parametrize("piece_is_small", [False, True])
def test_what_a_gradient_in_place_takes_is_predicted(piece_is_small: bool) -> None:
    """The peak above the other gradients, by torch's profiler: also where the pass for a norm's sums takes the most,
    and where a piece takes less than the whole gradient."""
    layers = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()
    small, large = (nn.BatchNorm2d(8), nn.SiLU()), (*layers, nn.Conv2d(8, 8, 1))
    model = nn.Sequential(*(small if piece_is_small else large))
    x = torch.randn(8, 8, 40, 40, requires_grad=True)
    program, tensors = recorded(model, [x], [*model.parameters(), *model.buffers()])
    needed = [tensor.requires_grad for tensor in tensors]
    tensors = [tensor.detach() for tensor in tensors]
    tiled, key = register(program, Axis(0, 8), 8 if piece_is_small else 4)
    arguments = tensors, tiled.statistics(tensors), [torch.randn_like(x)], needed, key
    torch.ops.memplan.tile_backward_.default(*arguments)
    profile = _torch.memory_profile()
    with profile:
        results = torch.ops.memplan.tile_backward_.default(*arguments)
    level = peak = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        peak = max(peak, level)
    assert peak - level == pytest.approx(tile_scratch(TILE_BACKWARD, arguments), abs=2048)
    assert level < results[0].numel() * 4
