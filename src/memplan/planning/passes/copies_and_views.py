"""Copies that a functional graph has too many, and those that it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref, Value, map_refs, refs

_CLONE = "aten.clone.default"
_WHOLE = (_CLONE, "aten.slice_backward.default")
"""Copies where the result has the source's shape: the derivative of a slice that is all there is."""
_ALIAS = "aten.alias.default"


def without_copies(graph: JointGraph) -> JointGraph:
    """Replace copies of results in the same layout by views.

    Nothing changes a value in a graph, so nobody can tell, unless somebody outside has one of the two in hands: what
    is handed in or returned is copied as before. (Eager mode copies what an in-place activation saves.)
    """
    outside = {graph.base(value) for value in graph.outputs}
    outside |= {value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")}
    outside |= {graph.base(gradient) for _, gradient in graph.gradients}
    same: dict[int, int] = {}
    ops = list(graph.ops)
    for op in graph.ops:
        if op.target not in _WHOLE or not op.makes:
            continue
        source: Value = graph.values[op.args[0].value]
        made = graph.values[op.makes[0]]
        base = same.get(source.base, source.base)
        if made.id in outside or base in outside or not _alike(source, made):
            continue
        same[made.id] = base
        ops[op.index] = replace(op, target=_ALIAS, args=op.args[:1], kwargs={}, makes=(), scratch=0)
    return looking_into(graph, ops, same) if same else graph


def looking_into(graph: JointGraph, ops: Iterable[GraphOp], same: Mapping[int, int]) -> JointGraph:
    """Return the graph with these ops instead, where values that owned memory look into that of others.

    Args:
        graph: the graph.
        ops: as many, of which those that made such a value now are views.
        same: by such a value: the one that owns the memory from now on.
    """
    values = tuple(
        replace(value, base=same[value.base], bytes=0) if value.base in same else value for value in graph.values
    )
    return replace(graph, values=values, ops=tuple(_with_reads(op, values) for op in ops))


def _alike(source: Value, made: Value) -> bool:
    return (source.shape, source.stride, source.dtype) == (made.shape, made.stride, made.dtype)


def _with_reads(op: GraphOp, values: tuple[Value, ...]) -> GraphOp:
    return replace(op, reads=tuple(dict.fromkeys(values[v].base for v in refs((op.args, op.kwargs)))))


def guarded(graph: JointGraph) -> JointGraph:
    """Copy values that the step changes and the backward pass reads, before the change.

    A training batch norm's derivative does not read the running statistics (`passes.split_convolution_backward`).
    """
    changed = {value for value, _ in graph.mutations}
    late = {v for op in graph.backward_ops for v in op.reads if v in changed}
    return _Guard(graph, late).run() if late else graph


class _Guard(Rebuild):
    def __init__(self, graph: JointGraph, late: set[int]) -> None:
        super().__init__(graph)
        self.copies = {value: self._copy(value) for value in sorted(late)}
        self.views: dict[int, int] = {}
        """View of the copy that corresponds to each view of a changed value."""

    def run(self) -> JointGraph:
        for op in self.graph.ops:
            if op.phase == "backward" and not op.is_view:
                op = replace(op, args=map_refs(op.args, self._safe), kwargs=map_refs(op.kwargs, self._safe))
            self.add(op)
        return self.finished()

    def _copy(self, value: int) -> int:
        old = self.values[value]
        number = self.value(f"{old.name}_before", old)
        self.add(GraphOp(-1, _CLONE, (Ref(value),), {}, "forward", (number,), False, (value,), (number,), once=True))
        return number

    def _safe(self, value: int) -> Any:
        """Return the same value of the copy where it is of something that changes."""
        found = self.values[value]
        if found.base not in self.copies:
            return Ref(value)
        if value in self.copies:
            return Ref(self.copies[value])
        if value not in self.views:
            self._view(found)
        return Ref(self.views[value])

    def _view(self, value: Value) -> None:
        assert value.op is not None, "a view is made by an op"
        op = self.graph.ops[value.op]
        args, kwargs = map_refs(op.args, self._safe), map_refs(op.kwargs, self._safe)
        outputs: list[int | None] = []
        for output in op.outputs:
            if output is None:
                outputs.append(None)
                continue
            old = self.graph.values[output]
            self.views[output] = self.value(f"{old.name}_before", old, base=self.copies[old.base], bytes=0)
            outputs.append(self.views[output])
        self.add(replace(op, index=-1, args=args, kwargs=kwargs, outputs=tuple(outputs), phase="backward"))
