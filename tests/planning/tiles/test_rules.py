"""Ops in pieces, beside the same ops as a whole in float64: what is run is equal, all else is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.planning.tiles.recorded_segments import differentiated, recorded
from torch import Tensor, nn

from memplan.planning.ops.tile import TracedTile, register
from memplan.planning.tiles.program import NotTileable
from memplan.planning.tiles.tiled import Axis

IMAGE = (4, 4, 15, 16)
MATRIX, MASK = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 1, 3, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "shape", "dim"),
    [
        (lambda x: x.sum(1), IMAGE, 2),
        (lambda x: x.sum((2, 3)), IMAGE, 0),
        (lambda x: x.mean(-1, keepdim=True), IMAGE, 2),
        (lambda x: x.squeeze(1) * 2, IMAGE, 2),
        (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), IMAGE, 0),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGE, 2),
        (lambda x: x * x[:, :, :1].sum(2, keepdim=True).sigmoid(), IMAGE, 0),
        (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (2, 2, 8, 5, 6), 2),
        (lambda x: F.prelu(x, MATRIX[0, :4]), IMAGE, 2),
        (lambda x: x * (1 - x.sigmoid()), IMAGE, 2),
        (lambda x: torch.maximum(x, torch.zeros_like(x)) * torch.full_like(x, 2.0) + torch.ones_like(x), IMAGE, 2),
        (lambda x: torch.bmm(x, MATRIX.expand(4, 4, 5)), (4, 6, 4), 0),
        (lambda x: torch.bmm(x, MATRIX.expand(3, 4, 5)), (3, 6, 4), 1),
        (lambda x: torch.baddbmm(x, x, x.transpose(1, 2)), (4, 3, 3), 0),
        (lambda x: torch.baddbmm(MASK[0], x, x), (4, 3, 3), 0),
        (lambda x: x.transpose(0, 1).reshape(12, 5).mul(2).view(3, 4, 5).transpose(0, 1), (4, 3, 5), 0),
        (lambda x: (x.transpose(0, 1).reshape(24, 5) @ MATRIX.t()).view(3, 8, 4)[1], (8, 3, 5), 0),
        (lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=MASK[:1]), (4, 2, 3, 8), 0),
        (lambda x: x.select(1, 2) * x[:, 0], IMAGE, 2),
        (lambda x: x.mean(-4), IMAGE, 0),
        (lambda x: x.reshape(24, 5), (3, 8, 5), 1),
        (lambda x: x.transpose(0, 1).reshape(12, 5), (4, 3, 5), 0),
        (lambda x: F.pad(x, []) * 2, IMAGE, 2),
        (lambda x: F.pad(x, (1, 2, 3, 4), mode="replicate"), IMAGE, 2),
        (lambda x: F.pad(x, (1, 2, 3, 0), mode="replicate"), IMAGE, 0),
        (lambda x: F.pad(x, (0, 0, 9, 0), mode="replicate"), (2, 3, 5, 4), 2),
        (lambda x: F.pad(x, (0, 0, 0, 12), mode="replicate"), (2, 3, 5, 4), 2),
        (lambda x: F.pad(x, (0, 0, 0, 0, 0, 0), mode="replicate"), (2, 3, 6, 4, 4), 2),
        (lambda x: F.pad(x, (1, 2, 3, 4), mode="reflect"), IMAGE, 2),
        (lambda x: F.pad(x, (0, 0, 4, 0), mode="reflect"), (2, 3, 5, 4), 2),
        (lambda x: F.pad(x, (0, 0, 0, 4), mode="reflect"), (2, 3, 5, 4), 2),
    ],
)
def test_equal_to_the_whole(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dim: int) -> None:
    """Results and gradients of ops that move, keep or stretch dimensions."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    whole = function(x)
    program, tensors = recorded(function, [x], [MATRIX, MASK])
    tiled, key = register(program, Axis(dim, shape[0] if dim == 0 else 0), 2)
    (result,) = TracedTile.apply(key, *tensors)
    torch.testing.assert_close(result, whole)
    torch.testing.assert_close(differentiated([result], [x]), differentiated([whole], [x]))
    assert tiled.pieces == 2


@pytest.mark.parametrize(
    ("function", "shape", "dim"),
    [
        (lambda x: x.amax(-3), (4, 4, 4), 0),
        (lambda x: F.interpolate(x, scale_factor=2.1), (4, 2, 5, 8), 2),
        (lambda x: F.interpolate(x, scale_factor=(2.0, 1.5), mode="bilinear"), (4, 4, 16, 15), 2),
        (lambda x: F.avg_pool2d(x, (15, 16)).sigmoid().expand(-1, -1, 15, 16) * x, IMAGE, 2),
        (lambda x: x * F.avg_pool2d(x, (15, 16)).sigmoid(), IMAGE, 2),
        (lambda x: torch.addmm(MATRIX, x, MATRIX), (4, 4), 0),
        (lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=MASK), (4, 2, 3, 8), 0),
        (lambda x: torch.bmm(x.transpose(1, 2), x), (4, 6, 4), 1),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), (4, 6, 4), 1),
        (
            lambda x: (
                F.conv1d(x.transpose(0, 1).reshape(12, 5, 6), MATRIX[:, :, None]).view(3, 4, 4, 6).transpose(0, 1)
            ),
            (4, 3, 5, 6),
            0,
        ),
        (lambda x: x.select(0, 2), IMAGE, 0),
        (lambda x: torch.baddbmm(MASK[:, 0], x, x), (4, 3, 3), 0),
    ],
)
def test_refused(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dim: int) -> None:
    """What reads other samples or rows than its own, by a negative dimension, a broadcast, or a fractional factor."""
    program, _ = recorded(function, [torch.randn(shape, dtype=torch.float64)], [MATRIX, MASK])
    with pytest.raises(NotTileable):
        register(program, Axis(dim, shape[0] if dim == 0 else 0), 2)


def test_a_norm_has_elements_in_each_piece() -> None:
    """Four rows at the lowest level are too few for eight pieces, though the result has 32."""
    program, _ = recorded(
        lambda x: F.interpolate(F.batch_norm(F.avg_pool2d(x, 8), None, None, training=True), scale_factor=8),
        [torch.randn(2, 4, 32, 32)],
    )
    with pytest.raises(NotTileable, match="4 elements for 8 pieces"):
        register(program, Axis(2), 8)


def test_a_gate_of_one_row_is_read_by_each_piece() -> None:
    """What has a single element along the axis is computed as a whole."""
    x, gate = (torch.randn(4, 4, rows, 1, dtype=torch.float64, requires_grad=True) for rows in (16, 1))
    program, tensors = recorded(lambda x, gate: x * gate.sigmoid(), [x, gate])
    tiled, key = register(program, Axis(2), 4)
    (result,) = TracedTile.apply(key, *tensors)
    whole = x * gate.sigmoid()
    torch.testing.assert_close(differentiated([result], [x, gate]), differentiated([whole], [x, gate]))
    assert tiled.pieces == 4


def test_an_embedding_that_counts_its_indices_is_refused() -> None:
    """Its derivative divides by how often an index occurs in the whole batch."""
    table, indices = torch.randn(5, 3), torch.randint(5, (4, 6))
    for counts in (False, True):
        program, _ = recorded(lambda i, c=counts: F.embedding(i, table, scale_grad_by_freq=c), [indices], [table])
        if not counts:
            register(program, Axis(0, 4), 2)
            continue
        with pytest.raises(NotTileable):
            register(program, Axis(0, 4), 2)


def test_what_is_written_in_place_keeps_its_dtype() -> None:
    """A sum of bfloat16 and float32 that is written to a bfloat16 tensor is rounded."""

    def function(x: Tensor) -> Tensor:
        y = x.to(torch.bfloat16) * 2
        y += x
        return y * 3

    x = torch.randn(4, 3, 5, requires_grad=True)
    program, tensors = recorded(function, [x])
    tiled, key = register(program, Axis(0, 4), 2)
    (result,) = TracedTile.apply(key, *tensors)
    assert torch.equal(result, function(x))
    assert tiled.pieces == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).unsqueeze(3).expand(-1, -1, -1, 3),
        lambda x: F.pad(F.avg_pool1d(x, 3, 1), (8, 8)),
        lambda x: F.instance_norm(x, x.new_zeros(2), x.new_ones(2)),
    ],
)
def test_results_that_repeat_pieces_of_padding_and_computed_statistics(function: Callable[[Tensor], Tensor]) -> None:
    """Refused, and nothing fails later."""
    with pytest.raises(NotTileable):
        register(recorded(function, [torch.randn(4, 2, 16)])[0], Axis(2), 8)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_along_samples(batch_first: bool, weights: bool, masked: bool) -> None:
    """`nn.MultiheadAttention`, which merges positions, samples and heads in turn, between two layers."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, batch_first=batch_first).double()
    last = nn.Sequential(nn.Linear(12, 12), nn.PReLU(5)).double()
    mask = torch.ones(5, 5).tril() == 0 if masked else None

    def function(x: Tensor) -> list[Tensor]:
        tokens = x if batch_first else x.transpose(0, 1)
        result, probabilities = attention(tokens, tokens, tokens, need_weights=weights, attn_mask=mask)
        result = last(result if batch_first else result.transpose(0, 1)) + x
        return [result, *([probabilities] if weights else [])]

    x = torch.randn(4, 5, 12, dtype=torch.float64, requires_grad=True)
    parameters = [*attention.parameters(), *last.parameters()]
    whole = function(x)
    program, tensors = recorded(function, [x], [*parameters, *([] if mask is None else [mask])])
    tiled, key = register(program, Axis(0, 4), 2)
    results = TracedTile.apply(key, *tensors)
    for result, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(result, expected)
    leaves = [x, *parameters]
    torch.testing.assert_close(differentiated(results, leaves), differentiated(whole, leaves))
    assert tiled.pieces == 2
