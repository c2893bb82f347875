"""Under autocast a parameter is cast once in a region, and the gradients of its uses are summed before they are cast
back. A trace casts it for each use: here that is mended. Casts that the user's code makes stay what they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs, refs

CAST = "aten._to_copy.default"
_SUM = "aten.add.Tensor"


def cast_once(graph: JointGraph, casts: Mapping[int, int]) -> JointGraph:
    """Cast each parameter to a lower precision once, as autocast's cache does in eager mode.

    Args:
        graph: as it was traced.
        casts: by op that is a cast of autocast's own: the region of autocast that it is kept in.
    """
    uses: dict[tuple[int, int, str], list[GraphOp]] = defaultdict(list)
    for index, region in casts.items():
        op = graph.ops[index]
        if op.makes and _lowers(graph, op):
            uses[op.args[0].value, region, repr(op.kwargs)].append(op)
    several = {key: ops for key, ops in uses.items() if len(ops) > 1}
    return _Merger(graph, several).run() if several else graph


def _lowers(graph: JointGraph, op: GraphOp) -> bool:
    source, made = graph.values[op.args[0].value], graph.values[op.makes[0]]
    lower = _itemsize(made.dtype) < _itemsize(source.dtype)
    return source.kind == "parameter" and lower and source.dtype == "float32" and source.id not in dict(graph.mutations)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


@dataclass
class _Total:
    """Sum of the gradients of all uses of a parameter."""

    result: int
    parts: list[int]
    """Gradients to add, in order."""
    left: int
    """Number of gradients still to come."""
    add: GraphOp | None = None
    """One of the ops that add two of them."""
    casts: Counter[int] = field(default_factory=Counter)
    """Number of gradients of the uses of each region's first cast."""
    low: dict[int, Ref] = field(default_factory=dict)
    """Sum so far of the gradients of each region's first cast."""
    high: Ref | None = None
    """The sum so far of what is in the parameter's precision."""


class _Merger(Rebuild):
    def __init__(self, graph: JointGraph, several: Mapping[tuple[int, int, str], list[GraphOp]]) -> None:
        super().__init__(graph)
        self.first = {op.index: ops[0].index for ops in several.values() for op in ops}
        """First cast of the same parameter in its region, by cast."""
        self.same = {op.makes[0]: ops[0].makes[0] for ops in several.values() for op in ops[1:]}
        """Result of the first cast, by the result of a later one."""
        self.users = Counter(v for op in graph.ops for v in refs((op.args, op.kwargs)))
        self.users.update(gradient for _, gradient in graph.gradients)
        self.totals: dict[int, _Total] = {}
        """Totals by gradient that is cast back, and by sum with such."""
        for op in graph.backward_ops:
            self._look_at(op)

    def _look_at(self, op: GraphOp) -> None:
        if len(op.makes) != 1 or op.outputs != op.makes:
            return
        made = op.makes[0]
        if op.target == CAST and op.gradient_of in self.first:
            self.totals[made] = _Total(made, [made], 1, casts=Counter([self.first[op.gradient_of]]))
        elif op.target == _SUM and not op.kwargs and all(isinstance(part, Ref) for part in op.args):
            known = [self.totals.get(part.value) if self.users[part.value] == 1 else None for part in op.args]
            if any(known):
                pairs = zip(op.args, known, strict=True)
                parts = [value for part, one in pairs for value in (one.parts if one else [part.value])]
                casts = sum((one.casts for one in known if one), Counter[int]())
                total = _Total(made, parts, len(parts), op, casts)
                same = [value for value, other in self.totals.items() if any(other is one for one in known)]
                self.totals.update(dict.fromkeys((*same, made), total))

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
        total = self.totals.get(op.makes[0]) if op.makes else None
        if total is None:
            self.add(op)
        elif op.target == CAST:
            self._comes(total, op.args[0], op)
        else:
            for part in op.args:
                if part.value in total.parts and self.totals.get(part.value) is not total:
                    self._comes(total, part)

    def _comes(self, total: _Total, part: Ref, cast: GraphOp | None = None) -> None:
        """Add a gradient; that of a cast in its precision, and cast back when those of all its uses are there."""
        total.left -= 1
        if cast is not None:
            region = cast.gradient_of
            assert region is not None
            total.casts[region] -= 1
            if region in total.low:
                part = self._sum(total, total.low[region], part, self._value(total, self.values[part.value].dtype))
            total.low[region] = part
            if total.casts[region]:
                return
            made = total.result if total.high is None and not total.left else self._value(total)
            self.add(replace(cast, index=-1 - made, args=(part,), outputs=(made,), makes=(made,)))
            part = Ref(made)
        if total.high is not None:
            part = self._sum(total, total.high, part, self._value(total) if total.left else total.result)
        total.high = part

    def _sum(self, total: _Total, one: Ref, other: Ref, made: int) -> Ref:
        assert total.add is not None
        self.add(replace(total.add, index=-1 - made, args=(one, other), outputs=(made,), makes=(made,)))
        return Ref(made)

    def _value(self, total: _Total, dtype: str | None = None) -> int:
        like = self.values[total.result]
        dtype = dtype or like.dtype
        size = like.bytes // _itemsize(like.dtype) * _itemsize(dtype)
        return self.value(f"{like.name}_sum", like, bytes=size, dtype=dtype)
