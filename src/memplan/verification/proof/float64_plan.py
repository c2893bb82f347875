"""Run a planned step in float64: the same ops in the same order, segments cut into the same pieces.

In float32, two right steps differ by rounding, which flips decisions of activations and max pools: in plain nets of 20
layers that changes gradients by more than a border of a piece that is a tenth off. In float64 the planned step and the
step as it is differ by 1e-14, so anything else is an error of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value
from memplan.planning.ops.tile import TILE_BACKWARD_INTO, TILE_OPS, register, tile_of
from memplan.planning.tiles.tiled import Tiled
from memplan.rewriting.engine import Engine
from memplan.rewriting.install import Runnable

_NARROW, _WIDE = torch.finfo(torch.float32), torch.finfo(torch.float64)
_NUMBERS = {getattr(_NARROW, name): getattr(_WIDE, name) for name in ("eps", "tiny", "min", "max")}
"""Numbers that models take from the dtype, such as the eps of `nn.RMSNorm`: a graph has them as constants."""


def in_float64(module: nn.Module, planned: Runnable) -> Callable[..., Any] | None:
    """Return a function that runs a planned step in float64, with the parameters and buffers that the module has then,
    which are in float64, too. None for a step with tensors in lower precision than float32, with complex numbers, or
    with calls that cannot be traced.

    Args:
        module: the module that was planned.
        planned: the plan of a call, with the engine ``graph``.
    """
    captured, schedule, tiles = planned.captured, planned.schedule, list[Tiled]()
    dtypes = {getattr(torch, value.dtype) for value in schedule.graph.values}
    is_other = any(dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 4) for dtype in dtypes)
    if is_other or captured.opaque_calls:
        return None
    constants = {
        value: tensor.double() if tensor.dtype == torch.float32 else tensor
        for value, tensor in captured.constants.items()
    }
    graph = _widened_graph(schedule.graph, tiles)
    engine = Engine(
        replace(captured, graph=graph, constants=constants, tiled=tuple(tiles)), replace(schedule, graph=graph)
    )
    engine.close()  # no traceback shows this program's lines

    def run(*args: Any, **kwargs: Any) -> Any:
        """Run a call, whose floating-point tensors are in float64."""
        return engine.run(module, call_of(args, kwargs))

    return run


def has_numbers_of_float32(planned: Runnable) -> bool:
    """Return whether a planned step has numbers as constants that `in_float64` takes for those of its dtype. The
    model's code may have such a number for another reason: then its step in float64 keeps it."""
    tiled = [tile_of(op.args[-1]) for op in planned.schedule.graph.ops if op.target in (*TILE_OPS, TILE_BACKWARD_INTO)]
    nodes = (node for segment in tiled for node in segment.program.nodes)
    calls = [(op.args, op.kwargs) for op in planned.schedule.graph.ops] + [(node.args, node.kwargs) for node in nodes]
    return any(map(_has_number, calls))


def _has_number(part: Any) -> bool:
    """Return whether arguments of an op, at any depth, have one of `_NUMBERS`."""
    if isinstance(part, (tuple, list)):
        return any(map(_has_number, part))
    if isinstance(part, Mapping):
        return any(map(_has_number, part.values()))
    return isinstance(part, float) and part in _NUMBERS


def _widened_graph(graph: JointGraph, tiles: list[Tiled]) -> JointGraph:
    """Return a graph in which float32 is float64. Its segments, which have to be kept alive, are added to ``tiles``."""
    ops = tuple(_widened_op(op, tiles) for op in graph.ops)
    return replace(graph, values=tuple(map(_widened_value, graph.values)), ops=ops)


def _widened_value(value: Value) -> Value:
    return replace(value, dtype="float64", bytes=2 * value.bytes) if value.dtype == "float32" else value


def _widened_op(op: GraphOp, tiles: list[Tiled]) -> GraphOp:
    """Return an op of the widened graph."""
    args, kwargs, again = _widened(op.args), _widened(op.kwargs), op.cheaper_recompute
    if op.target in (*TILE_OPS, TILE_BACKWARD_INTO):
        tiled, key = _widened_tile(tile_of(args[-1]))
        tiles.append(tiled)
        args = (*args[:-1], key)
    again = None if again is None else _widened_op(again, tiles)
    return replace(op, args=args, kwargs=kwargs, cheaper_recompute=again)


def _widened_tile(tiled: Tiled) -> tuple[Tiled, str]:
    """Return a segment in float64, cut into the same pieces, and its key."""
    program = tiled.program
    nodes = tuple(replace(node, args=_widened(node.args), kwargs=_widened(dict(node.kwargs))) for node in program.nodes)
    likes = {value: replace(like, dtype=_widened(like.dtype)) for value, like in program.likes.items()}
    return register(replace(program, nodes=nodes, likes=likes), tiled.axis, tiled.pieces)


def _widened(part: Any) -> Any:
    """Return arguments of an op, at any depth, with float64 for float32."""
    if isinstance(part, (tuple, list)):
        return type(part)(map(_widened, part))
    if isinstance(part, dict):
        return {name: _widened(value) for name, value in part.items()}
    if isinstance(part, float):
        return _NUMBERS.get(part, part)
    return torch.float64 if part == torch.float32 else part
