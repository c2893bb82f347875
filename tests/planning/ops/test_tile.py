"""The ops of a tile: their keys, and that torch can trace them."""

from __future__ import annotations

import torch
from tests.planning.tiles.recorded_segments import recorded
from torch import nn

from memplan.planning.graph.roofline import WORKS
from memplan.planning.ops.tile import TILE, TILE_BACKWARD, register, tile_of
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
    torch.library.opcheck(torch.ops.memplan.tile.default, (detached, key), test_utils=tests)
    results = torch.ops.memplan.tile.default(detached, key)
    needed = [tensor.requires_grad for tensor in tensors]
    arguments = detached, list(results[1:]), [torch.ones_like(results[0])], needed, key
    torch.library.opcheck(torch.ops.memplan.tile_backward.default, arguments, test_utils=tests)
    assert tiled


def test_work_is_what_the_pieces_compute() -> None:
    """FLOPs of a convolution before a norm, by hand: twice forward (once for the statistics); backward twice again, and
    a derivative of twice its work."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3))
    program, _ = recorded(model, [torch.randn(4, 2, 8, 8)], [*model.parameters(), *model.buffers()])
    tiled, key = register(program, Axis(0, 4), 2)
    once = 2 * 4 * 8 * 8 * 3 * 2 * 9
    assert WORKS[TILE]((None, key)).flops == 2 * once
    assert WORKS[TILE_BACKWARD]((None, key)).flops == 4 * once
    assert tiled
