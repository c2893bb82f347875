"""The ops of a tile in a graph: the statistics of a segment's norms, the segment that runs piece by piece, and its
derivative.

They are functions of tensors alone: a plan may save the statistics, and so compute the segment again in a single pass.
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
from memplan.planning.tiles.tiled import Axis, Phase, Tiled

TILE_STATISTICS = "memplan.tile_statistics.default"
TILE = "memplan.tile.default"
TILE_BACKWARD = "memplan.tile_backward.default"
TILE_BACKWARD_INTO = "memplan.tile_backward_.default"
"""Writes its first result over a gradient of a result, see `overwritten_gradient`."""
TILE_WITH_GRADIENTS = "memplan.tile_with_gradients.default"
"""A tile whose result is a single number, with the gradients for a gradient of 1."""
TILE_OPS = TILE_STATISTICS, TILE, TILE_BACKWARD, TILE_WITH_GRADIENTS

_TILES: weakref.WeakValueDictionary[str, Tiled] = weakref.WeakValueDictionary()
"""Tiles by key: the argument ``key`` of their ops, the last."""


def register(program: Program, axis: Axis, pieces: int) -> tuple[Tiled, str]:
    """Return a tile and its key: the same in every process for the same segment.

    Raises:
        NotTileable: the segment cannot run piece by piece.
    """
    likes = sorted(program.likes.items())
    fixed, static = sorted(program.inputs_without_gradient), sorted(program.static_inputs)
    text = repr((program.nodes, program.inputs, static, fixed, program.outputs, likes, axis, pieces))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _TILES.setdefault(key, Tiled(program, axis, pieces)), key


def defined(key: str, program: Program, axis: Axis, pieces: int) -> Tiled:
    """Return the tile with a key, built unless there is one: the text of a planned step defines its tiles so, which
    its ops find by their keys while the results live."""
    return _TILES.get(key) or _TILES.setdefault(key, Tiled(program, axis, pieces))


def tile_of(key: str) -> Tiled:
    """Return the tile with a key."""
    return _TILES[key]


def run_pieces(target: str, args: Sequence[Any], pieces: Sequence[int]) -> Any:
    """Run some pieces of a tile's op, to measure what they take. ``target``: of `TILE_OPS`; ``args``: the op's."""
    tiled = tile_of(args[-1])
    run: Any = {
        TILE_STATISTICS: tiled.statistics, TILE: tiled.forward, TILE_WITH_GRADIENTS: tiled.forward_with_gradients,
    }.get(target, tiled.backward)  # fmt: skip
    return run(*args[:-1], pieces)


def _gradients_without_data(inputs: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Return fake gradients of the inputs that need one. ``needed``: whether each input does."""
    return [torch.empty_like(tensor) for tensor, needs in zip(inputs, needed, strict=True) if needs]


def _backward_without_data(
    inputs: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool],
    key: str,
) -> list[Tensor]:  # fmt: skip
    """Fake kernel of a tile's derivative."""
    return _gradients_without_data(inputs, needed)


@define(
    "tile_statistics(Tensor[] inputs, str key) -> Tensor[]",
    lambda inputs, key: [like.empty() for like in _TILES[key].statistic_likes],
)
def _tile_statistics(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    """Return the statistics of the norms of a segment, then totals of its sums, as `Tiled.statistics`."""
    return _TILES[key].statistics(inputs)


@define(
    "tile(Tensor[] inputs, Tensor[] statistics, str key) -> Tensor[]",
    lambda inputs, statistics, key: [like.empty() for like in _TILES[key].result_likes],
)
def _tile(inputs: Sequence[Tensor], statistics: Sequence[Tensor], key: str) -> list[Tensor]:
    """Return the results of a segment, which runs piece by piece."""
    return _TILES[key].forward(inputs, statistics)


@define(
    "tile_with_gradients(Tensor[] inputs, Tensor[] statistics, bool[] needed, str key) -> Tensor[]",
    lambda inputs, statistics, needed, key: [
        *(like.empty() for like in _TILES[key].result_likes), *_gradients_without_data(inputs, needed)
    ],
)  # fmt: skip
def _tile_with_gradients(
    inputs: Sequence[Tensor], statistics: Sequence[Tensor], needed: Sequence[bool], key: str
) -> list[Tensor]:
    """Return the result of a segment, a single number, and the gradients of the inputs that need one."""
    return _TILES[key].forward_with_gradients(inputs, statistics, needed)


@define(
    "tile_backward(Tensor[] inputs, Tensor[] statistics, Tensor?[] gradients, bool[] needed, str key) -> Tensor[]",
    _backward_without_data,
)
def _tile_backward(
    inputs: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool],
    key: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the inputs that need one. ``gradients``: of the results, None for zeros."""
    computed = _TILES[key].backward(inputs, statistics, gradients, needed)
    return [gradient for gradient in computed if gradient is not None]


@define(
    "tile_backward_(Tensor[] inputs, Tensor[] statistics, Tensor(a!)?[] gradients, bool[] needed, str key) -> Tensor[]",
    _backward_without_data,
)
def _tile_backward_(
    inputs: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool],
    key: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the inputs that need one; the first overwrites a gradient of a result."""
    target = overwritten_gradient((inputs, statistics, gradients, needed, key))
    computed = _TILES[key].backward(inputs, statistics, gradients, needed, into=target)
    return [gradient for gradient in computed if gradient is not None]


def overwritten_gradient(args: Sequence[Any]) -> Any:
    """Return the gradient of a result that the first gradient of an input can overwrite; None if there is none.

    ``args``: of `TILE_BACKWARD`, with tensors or with Refs in their place; the gradient is such, too.
    """
    _, _, gradients, needed, key = args
    position = _TILES[key].overwritable_gradient(needed) if True in needed else None
    return None if position is None else gradients[position]


class TracedTile(torch.autograd.Function):
    """A tile in a traced graph: one op, and one for its derivative."""

    @staticmethod
    def forward(ctx: Any, key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the segment, then the statistics of its norms."""
        tiled, needed = _TILES[key], list(ctx.needs_input_grad[1:])
        statistics = []
        if tiled.statistic_likes:
            statistics = torch.ops.memplan.tile_statistics.default(list(tensors), key)
        ctx.key, ctx.has_gradients = key, tiled.yields_gradients and any(needed)
        if ctx.has_gradients:  # of a single number, such as a loss: computed in the forward pass
            result, *gradients = torch.ops.memplan.tile_with_gradients.default(list(tensors), statistics, needed, key)
            outputs = [result]
            ctx.save_for_backward(*gradients)
        else:
            outputs = torch.ops.memplan.tile.default(list(tensors), statistics, key)
            ctx.save_for_backward(*tensors, *statistics)
        ctx.output_count = len(outputs)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)  # None for gradients that are 0
        return *outputs, *statistics

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return None for the key, and the gradients of the tensors."""
        needed = list(ctx.needs_input_grad[1:])
        if not ctx.has_gradients:
            tensors, statistics = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
            computed = torch.ops.memplan.tile_backward.default(
                list(tensors), list(statistics), list(gradients[: ctx.output_count]), needed, ctx.key
            )
        elif gradients[0] is None:  # no gradient flows into the result
            return None, *[None] * len(needed)
        else:  # those for a gradient of 1 were saved
            computed = [saved * gradients[0] for saved in ctx.saved_tensors]
        remaining = iter(computed)
        return None, *(next(remaining) if needs else None for needs in needed)


def _work(key: str, phase: Phase, *, differentiated: bool = False) -> Work:
    """Return the FLOPs and bytes of a tile's op in a phase: those of all runs of its program's ops. The rate is that of
    the last op with FLOPs.

    ``differentiated``: the op computes gradients in the forward pass, too.
    """
    tiled = _TILES[key]
    likes, flops, moved_bytes, rate = tiled.program.likes, 0.0, 0.0, "float32"
    runs_of_nodes = tiled.runs_by_op(phase)
    if phase == "backward" or differentiated:  # a derivative counts as two runs
        runs_of_nodes = [
            runs + 2 * derivatives for runs, derivatives in zip(runs_of_nodes, tiled.derivatives_by_op, strict=True)
        ]
    overlaps = tiled.overlap_by_op(tiled.pieces)  # how often the pieces of a run compute an element, on average
    for node, runs, overlap in zip(tiled.program.nodes, runs_of_nodes, overlaps, strict=True):
        moved_bytes += sum(likes[value].bytes for value in (*node.reads, *node.outputs[:1])) * runs * overlap
        formula = _torch.flop_formula(node.target)
        if formula is not None:
            args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda value: _meta(likes[value]))
            flops += formula(*args, **kwargs, out_val=_meta(likes[node.outputs[0]])) * runs * overlap
            dtype = str(likes[node.outputs[0]].dtype).removeprefix("torch.")
            rate = "tf32" if dtype == "float32" and "conv" in node.target else dtype
    return Work(int(flops), int(moved_bytes), rate)


def _meta(like: Like) -> Tensor:
    """Return a meta tensor of the shape and dtype of ``like``."""
    return torch.empty(like.shape, dtype=like.dtype, device="meta")


WORKS[TILE_STATISTICS] = lambda args: _work(args[-1], "statistics")
WORKS[TILE] = lambda args: _work(args[-1], "forward")
WORKS[TILE_WITH_GRADIENTS] = lambda args: _work(args[-1], "forward", differentiated=True)
WORKS[TILE_BACKWARD] = lambda args: _work(args[-1], "backward")
