"""Under autocast a parameter is cast once in a step, and the gradients of its uses are summed before they are cast
back. A trace casts it for each use: here that is mended."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from memplan.planning.graph import GraphOp, JointGraph, Ref, Value, map_refs, refs
from memplan.planning.rebuild import Rebuild

_CAST = "aten._to_copy.default"
_SUM = "aten.add.Tensor"


def cast_once(graph: JointGraph) -> JointGraph:
    """The same graph with one cast of each parameter to a lower precision, as eager mode's cache of casts has it."""
    uses: dict[tuple[int, str], list[GraphOp]] = defaultdict(list)
    for op in graph.ops:
        if op.phase == "forward" and op.target == _CAST and op.makes and _lowers(graph, op):
            uses[op.args[0].value, repr(op.kwargs)].append(op)
    several = {key: ops for key, ops in uses.items() if len(ops) > 1}
    return _Merger(graph, several).run() if several else graph


def _lowers(graph: JointGraph, op: GraphOp) -> bool:
    source, made = graph.values[op.args[0].value], graph.values[op.makes[0]]
    lower = _itemsize(made) < _itemsize(source)
    return source.kind == "parameter" and lower and source.dtype == "float32" and source.id not in dict(graph.mutations)


def _itemsize(value: Value) -> int:
    return getattr(torch, value.dtype).itemsize


class _Merger(Rebuild):
    def __init__(self, graph: JointGraph, several: dict[tuple[int, str], list[GraphOp]]) -> None:
        super().__init__(graph)
        self.first = {op.index: ops[0].index for ops in several.values() for op in ops}
        """By cast: the first one of the same parameter."""
        self.same = {op.makes[0]: ops[0].makes[0] for ops in several.values() for op in ops[1:]}
        """By result of a later cast: that of the first."""
        self.group: dict[int, int] = {}
        """By gradient that is cast back, and by sum of such: the parameter's first cast."""
        self.sums: set[int] = set()
        """Ops that add two gradients of one cast."""
        for op in graph.backward_ops:
            self._look_at(op)
        self.wanted = {
            graph.base(v) for op in graph.ops if op.index not in self.sums for v in refs((op.args, op.kwargs))
        }
        self.wanted |= {graph.base(gradient) for _, gradient in graph.gradients}
        self.low: dict[int, tuple[Ref, GraphOp]] = {}
        """By gradient in the parameter's precision: the lower one, and the op that casts it."""

    def _look_at(self, op: GraphOp) -> None:
        if len(op.makes) != 1 or op.outputs != op.makes:
            return
        if op.target == _CAST and op.gradient_of in self.first:
            self.group[op.makes[0]] = self.first[op.gradient_of]
        elif op.target == _SUM and not op.kwargs and all(isinstance(part, Ref) for part in op.args):
            one, other = (self.group.get(part.value) for part in op.args)
            if one is not None and one == other:
                self.group[op.makes[0]] = one
                self.sums.add(op.index)

    def run(self) -> JointGraph:
        for value in self.graph.values:
            if value.base in self.same:
                self.values[value.id] = replace(value, base=self.same[value.base])
        for op in self.graph.ops:
            if self.first.get(op.index, op.index) == op.index:
                forward = None if op.gradient_of is None else self.first.get(op.gradient_of, op.gradient_of)
                args, kwargs = map_refs(op.args, self._kept), map_refs(op.kwargs, self._kept)
                self._take(replace(op, args=args, kwargs=kwargs, gradient_of=forward))
        return self.finished()

    def _kept(self, value: int) -> Ref:
        return Ref(self.same.get(value, value))

    def _take(self, op: GraphOp) -> None:
        made = op.makes[0] if op.makes else -1
        if op.index in self.sums:
            self._sum(op)
        elif made in self.group:
            self.low[made] = op.args[0], op
            if made in self.wanted:
                self.add(op)
        else:
            self.add(op)

    def _sum(self, op: GraphOp) -> None:
        """Sum in the lower precision, and cast the sum where it is wanted in the higher one."""
        made = op.makes[0]
        (one, cast), (other, _) = (self.low[part.value] for part in op.args)
        high, low = self.values[made], self.values[one.value]
        size = high.bytes // _itemsize(high) * _itemsize(low)
        number = self.value(f"{high.name}_low", high, bytes=size, dtype=low.dtype)
        self.add(replace(op, index=-1 - number, args=(one, other), outputs=(number,), makes=(number,)))
        self.low[made] = Ref(number), cast
        if made in self.wanted:
            self.add(replace(cast, index=op.index, args=(Ref(number),), outputs=op.outputs, makes=op.makes))
