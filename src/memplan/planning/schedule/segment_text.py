"""Write the segments of a planned step that run piece by piece as Python text, which defines them where it runs."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._text import printable
from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.graph.tensor_like import Like
from memplan.planning.ops.tile import TILE_OPS, tile_of
from memplan.planning.schedule.argument_text import argument_text
from memplan.planning.tiles.program import Node
from memplan.planning.tiles.tiled import Tiled

SEGMENT_IMPORTS = (
    "import memplan.planning.ops.tile",
    "from memplan.planning.graph.joint_graph import Ref",
    "from memplan.planning.graph.tensor_like import Like",
    "from memplan.planning.tiles.program import Node, Program",
    "from memplan.planning.tiles.tiled import Axis",
)
"""Lines that import the names of the definitions; ``device``, ``inf`` and ``nan`` of torch come in addition."""


def segment_definitions(graph: JointGraph) -> list[str]:
    """Return the lines that define the segments of a graph, each as a variable: the ops find them while these live.

    Empty without segments.
    """
    op_of_key: dict[str, GraphOp] = {}
    for op in graph.ops:
        if op.target in TILE_OPS:
            op_of_key.setdefault(op.args[-1], op)
    if not op_of_key:
        return []
    lines = ["# -- segments that run piece by piece, as ops on values, which have numbers"]
    for number, (key, op) in enumerate(op_of_key.items(), start=1):
        lines += _definition(f"segment_{number}", key, tile_of(key), printable(op.layer or ""))
    return lines


def _definition(name: str, key: str, tiled: Tiled, layer: str) -> Iterator[str]:
    """Yield the lines that define a segment as a variable. ``key``: by which its ops find it."""
    program = tiled.program
    yield f"{name} = memplan.planning.ops.tile.defined(" + (f"  # {layer}" if layer else "")
    yield f"    {key!r}, axis={tiled.axis!r}, pieces={tiled.pieces},"
    yield "    program=Program("
    yield f"        inputs={program.inputs!r}, outputs={program.outputs!r},"
    yield f"        static_inputs=frozenset({sorted(program.static_inputs)!r}),"
    yield f"        inputs_without_gradient=frozenset({sorted(program.inputs_without_gradient)!r}),"
    yield "        nodes=("
    yield from (f"            {_node_text(node)}," for node in program.nodes)
    yield "        ),"
    yield "        likes={"
    yield from (f"            {value}: {_like_text(like)}," for value, like in sorted(program.likes.items()))
    yield "        },"
    yield "    ),"
    yield ")"


def _node_text(node: Node) -> str:
    """Return an op of a segment as Python text."""
    args = argument_text(node.args, _ref_text)
    kwargs = ", ".join(f"{name!r}: {argument_text(part, _ref_text)}" for name, part in node.kwargs.items())
    return f"Node({node.target!r}, {args}, {{{kwargs}}}, {node.outputs!r})"


def _like_text(like: Like) -> str:
    """Return a description of a tensor as Python text."""
    shape, stride = tuple(like.shape), tuple(like.stride)
    return f"Like({shape!r}, {stride!r}, {like.dtype!r}, {argument_text(like.device, _ref_text)})"


def _ref_text(value: int) -> str:
    """Return a value of a segment as Python text."""
    return f"Ref({value})"
