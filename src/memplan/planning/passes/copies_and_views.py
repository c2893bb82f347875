"""Remove redundant copies from a functional graph, and add those that mutations require."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref, Value, map_refs, refs

_CLONE = "aten.clone.default"
_PURE_COPIES = (_CLONE, "aten.slice_backward.default")
"""Ops that only copy if the result has the source's shape: clones, and derivatives of slices of a whole dimension."""
_PADDING_AT = {
    "aten.constant_pad_nd.default": 1,
    **{f"aten.{name}_pad{rank}d{derivative}.default": 2 if derivative else 1
       for name in ("replication", "reflection") for rank in (1, 2, 3) for derivative in ("", "_backward")},
}  # fmt: skip
"""By op that pads, or is the derivative of one: the position of its padding. Without any, it copies its first argument,
as where a decoder pads what it has upsampled to the size of what the encoder handed over."""
_ALIAS = "aten.alias.default"


def without_copies(graph: JointGraph) -> JointGraph:
    """Replace copies that have the layout of their source by views of it.

    No op of a graph mutates a value, so a copy and its source are interchangeable, unless the caller sees one of them:
    inputs and outputs are still copied. (Eager mode copies the input of an in-place activation.)
    """
    visible_to_caller = {graph.base(value) for value in graph.outputs}
    visible_to_caller |= {value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")}
    visible_to_caller |= {graph.base(gradient) for _, gradient in graph.gradients}
    owner_of: dict[int, int] = {}
    ops = list(graph.ops)
    for op in graph.ops:
        if not _only_copies(op) or not op.makes:
            continue
        source: Value = graph.values[op.args[0].value]
        copy = graph.values[op.makes[0]]
        base = owner_of.get(source.base, source.base)  # another one if the source is a copy that was replaced
        has_same_layout = (source.shape, source.stride, source.dtype) == (copy.shape, copy.stride, copy.dtype)
        if copy.id in visible_to_caller or base in visible_to_caller or not has_same_layout:
            continue
        owner_of[copy.id] = base
        ops[op.index] = replace(op, target=_ALIAS, args=op.args[:1], kwargs={}, makes=(), scratch=0)
    return with_views(graph, ops, owner_of) if owner_of else graph


def _only_copies(op: GraphOp) -> bool:
    """Return whether an op copies its first argument if the result has the same layout."""
    position = _PADDING_AT.get(op.target)
    return op.target in _PURE_COPIES if position is None else not any(op.args[position])


def with_views(graph: JointGraph, ops: Iterable[GraphOp], owner_of: Mapping[int, int]) -> JointGraph:
    """Return the graph with some values turned into views.

    Args:
        graph: before.
        ops: its new ops. Those that computed such values are views.
        owner_of: by value that becomes a view: the value that owns its memory from now on.
    """
    values = tuple(
        replace(value, base=owner_of[value.base], bytes=0) if value.base in owner_of else value
        for value in graph.values
    )
    new_ops = list[GraphOp]()
    for op in ops:
        reads = dict.fromkeys(values[v].base for v in refs((op.args, op.kwargs)))
        new_ops.append(replace(op, reads=tuple(reads)))
    return replace(graph, values=values, ops=tuple(new_ops))


def copy_before_mutation(graph: JointGraph) -> JointGraph:
    """Copy values that the step mutates and the backward pass reads, before the mutation.

    A training batch norm's derivative does not read the running statistics (`passes.split_convolution_backward`).
    """
    mutated = {value for value, _ in graph.mutations}
    read_later = {value for op in graph.backward_ops for value in op.reads if value in mutated}
    return _CopiesBeforeMutation(graph, read_later).run() if read_later else graph


class _CopiesBeforeMutation(Rebuild):
    """Rebuilds a graph so that its backward pass reads copies of the values that the step mutates."""

    def __init__(self, graph: JointGraph, read_later: set[int]) -> None:
        super().__init__(graph)
        self.copies = {value: self._copy(value) for value in sorted(read_later)}
        """By value that the step mutates: the copy that the backward pass reads."""
        self.views: dict[int, int] = {}
        """View of the copy, by the same view of the mutated value."""

    def run(self) -> JointGraph:
        """Return the new graph."""
        for op in self.graph.ops:
            self.add(self._reading_copies(op) if op.phase == "backward" and not op.is_view else op)
        return self.finished()

    def _reading_copies(self, op: GraphOp) -> GraphOp:
        """Return the op with copies, or views of them, in place of mutated values among its arguments."""
        args, kwargs = map_refs((op.args, op.kwargs), self._reference_before_mutation)
        return replace(op, args=args, kwargs=kwargs)

    def _copy(self, value: int) -> int:
        """Add an op that clones a value before anything mutates it, and return the id of the clone."""
        original = self.values[value]
        clone = self.value(f"{original.name}_before", original)
        self.add(GraphOp(
            index=-1, target=_CLONE, args=(Ref(value),), kwargs={}, phase="forward", outputs=(clone,),
            returns_tuple=False, reads=(value,), makes=(clone,),
            must_run_once=True,  # recomputed later, it would copy what was written
        ))  # fmt: skip
        return clone

    def _reference_before_mutation(self, value: int) -> Any:
        """Return the copy, or view of the copy, to read in place of a mutated value; other values as they are."""
        original = self.values[value]
        if original.base not in self.copies:
            return Ref(value)
        if value in self.copies:
            return Ref(self.copies[value])
        if value not in self.views:
            self._add_view(original)
        return Ref(self.views[value])

    def _add_view(self, value: Value) -> None:
        """Repeat a mutated value's view on the copy, for the backward pass."""
        assert value.op is not None, "a view is made by an op"
        op = self._reading_copies(self.graph.ops[value.op])
        outputs: list[int | None] = []
        for output in op.outputs:
            if output is None:
                outputs.append(None)
                continue
            original = self.graph.values[output]
            self.views[output] = self.value(
                f"{original.name}_before", original, base=self.copies[original.base], bytes=0
            )
            outputs.append(self.views[output])
        self.add(replace(op, index=-1, outputs=tuple(outputs), phase="backward"))
