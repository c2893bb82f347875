"""The two ops of a tile in a graph: a segment that runs piece by piece, and its derivative.

Both are functions of tensors alone: the derivative takes the inputs of the segment and the statistics of its norms, so
that a plan may save these or make them again like any other value.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memplan import _torch
from memplan.planning.graph.joint_graph import map_refs
from memplan.planning.graph.roofline import WORKS, Work
from memplan.planning.graph.tensor_like import Like
from memplan.planning.ops.custom_ops import define
from memplan.planning.tiles.program import Program
from memplan.planning.tiles.tiled import Axis, Tiled

TILE, TILE_BACKWARD = TILE_OPS = "memplan.tile.default", "memplan.tile_backward.default"

_TILES: weakref.WeakValueDictionary[str, Tiled] = weakref.WeakValueDictionary()
"""Tiles by key, the last argument of their ops."""


def register(program: Program, axis: Axis, pieces: int) -> tuple[Tiled, str]:
    """Return a tile and its key: the same in every process for the same segment.

    Raises:
        NotTileable: the segment cannot run piece by piece.
    """
    likes = sorted(program.likes.items())
    text = repr((program.nodes, program.inputs, sorted(program.static), program.outputs, likes, axis, pieces))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _TILES.setdefault(key, Tiled(program, axis, pieces)), key


def tile_of(key: str) -> Tiled:
    """Return the tile with a key."""
    return _TILES[key]


def _tile_without_data(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    tiled = _TILES[key]
    return [like.empty() for like in (*tiled.result_likes, *tiled.statistic_likes)]


def _backward_without_data(
    inputs: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool],
    key: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor) for tensor, needs in zip(inputs, needed, strict=True) if needs]


@define("tile(Tensor[] inputs, str key) -> Tensor[]", _tile_without_data)
def _tile(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    results, statistics = _TILES[key].forward(inputs)
    return [*results, *statistics]


@define(
    "tile_backward(Tensor[] inputs, Tensor[] statistics, Tensor?[] gradients, bool[] needed, str key) -> Tensor[]",
    _backward_without_data,
)
def _tile_backward(
    inputs: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool],
    key: str,
) -> list[Tensor]:  # fmt: skip
    computed = _TILES[key].backward(inputs, statistics, gradients, needed)
    return [gradient for gradient in computed if gradient is not None]


class TracedTile(torch.autograd.Function):
    """A tile in a traced graph: one op, and one for its derivative."""

    @staticmethod
    def forward(ctx: Any, key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the segment, then the statistics of its norms."""
        outputs = torch.ops.memplan.tile.default(list(tensors), key)
        count = len(_TILES[key].program.outputs)
        ctx.key, ctx.count = key, count
        ctx.save_for_backward(*tensors, *outputs[count:])
        ctx.mark_non_differentiable(*outputs[count:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradients of the tensors."""
        needed = list(ctx.needs_input_grad[1:])
        tensors, statistics = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        computed = iter(
            torch.ops.memplan.tile_backward.default(
                list(tensors), list(statistics), list(gradients[: ctx.count]), needed, ctx.key
            )
        )
        return None, *(next(computed) if needs else None for needs in needed)


def _work(key: str, *, backward: bool) -> Work:
    """Return the FLOPs and bytes of a tile's op: those of its program's ops, as often as they run."""
    tiled = _TILES[key]
    likes, flops, moved, rate = tiled.program.likes, 0.0, 0.0, "float32"
    shares = zip(tiled.program.nodes, tiled.runs(backward), tiled.overlap(tiled.pieces), strict=True)
    for node, runs, share in shares:
        formula, read = _torch.flop_formula(node.target), [likes[value] for value in (*node.reads, *node.outputs[:1])]
        moved += sum(like.bytes for like in read) * runs * share
        if formula is not None:
            args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda value: _meta(likes[value]))
            flops += formula(*args, **kwargs, out_val=_meta(likes[node.outputs[0]])) * runs * share
            dtype = str(likes[node.outputs[0]].dtype).removeprefix("torch.")
            rate = "tf32" if dtype == "float32" and "conv" in node.target else dtype
    return Work(int(flops), int(moved), rate)


def _meta(like: Like) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta")


WORKS[TILE] = lambda args: _work(args[-1], backward=False)
WORKS[TILE_BACKWARD] = lambda args: _work(args[-1], backward=True)
