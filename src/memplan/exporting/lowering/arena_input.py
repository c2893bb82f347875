"""Put an input of the model in the arena: its bytes are free for other buffers after the last op that reads it.

An op at the beginning of a pass makes the value that all others read. The caller writes the input to its place in the
arena, and then the op does nothing; of an input elsewhere it makes a copy.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.exporting.lowering.byte_inputs import BYTES
from memplan.exporting.lowering.device_graph import ARENA_INPUT
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import JointGraph, Ref, map_refs, refs

IN_ARENA = ("float32", *BYTES)
"""Types of inputs that can lie in the arena, which is an array of floats."""


def with_input_in_arena(graph: JointGraph, path: str) -> JointGraph:
    """Return the graph, which has no saved forms, with an input in the arena; unchanged if no op reads the input.

    `path` is the input's index as text (see `Value.path`); empty: no input.
    """
    original = next((value for value in graph.values if value.kind == "input" and value.path == path), None)
    bases_read = {graph.base(value) for op in graph.ops for value in refs((op.args, op.kwargs))}
    if original is None or original.id not in bases_read:
        return graph
    rebuild = Rebuild(graph)
    in_arena = rebuild.value(original.name, original)
    # views of the input become views of its place in the arena, which alone takes bytes
    rebuild.values = [replace(v, base=in_arena) if v.base == original.id != v.id else v for v in rebuild.values]
    rebuild.values[original.id] = replace(rebuild.values[original.id], bytes=0)

    def moved(value: int) -> Ref:
        return Ref(in_arena if value == original.id else value)

    arena_op = replace(
        graph.ops[0], index=-1, target=ARENA_INPUT, phase="forward", kwargs={}, outputs=(in_arena,), makes=(in_arena,),
        returns_tuple=False, discarded=0, scratch=0, in_place_scratch=None, overwrites=(), random=False,
        must_run_once=True, layer="", where=None, gradient_of=None, held_values=(), cheaper_recompute=None, call=None,
        seconds=0.0,
    )  # fmt: skip
    rebuild.add(arena_op, args=(Ref(original.id),))
    for op in graph.ops:
        overwrites = tuple(moved(value).value for value in op.overwrites)
        args, kwargs = map_refs(op.args, moved), map_refs(op.kwargs, moved)
        rebuild.add(op, args=args, kwargs=kwargs, overwrites=overwrites)
    return replace(rebuild.finished(), outputs=tuple(moved(value).value for value in graph.outputs))
