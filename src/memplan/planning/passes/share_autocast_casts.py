"""Share autocast's casts of a parameter: in eager mode it is cast once in an autocast region, and the gradients of its
uses are summed before they are cast back, while a trace casts it for each use. Casts of the user's code stay."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs, refs
from memplan.planning.graph.op_schema import itemsize

CAST = "aten._to_copy.default"
_SUM = "aten.add.Tensor"


def cast_once(graph: JointGraph, casts: Mapping[int, int]) -> JointGraph:
    """Cast each parameter to a lower precision once, as autocast's cache does in eager mode. ``casts`` has the autocast
    region of each cast that autocast inserted, by index of the op."""
    uses: dict[tuple[int, int, str], list[GraphOp]] = defaultdict(list)
    for index, region in casts.items():
        op = graph.ops[index]
        if not op.makes:
            continue
        source, result = graph.values[op.args[0].value], graph.values[op.makes[0]]
        is_lower = itemsize(result.dtype) < itemsize(source.dtype) and source.dtype == "float32"
        if is_lower and source.kind == "parameter" and source.id not in dict(graph.mutations):
            uses[op.args[0].value, region, repr(op.kwargs)].append(op)
    repeated = {key: ops for key, ops in uses.items() if len(ops) > 1}
    return _CastSharing(graph, repeated).run() if repeated else graph


@dataclass
class _Total:
    """Sum of the gradients of all uses of a parameter."""

    result: int
    """Value of the complete sum."""
    parts: list[int]
    """Gradients to add, in order."""
    left: int
    """Number of gradients still to come."""
    add: GraphOp | None = None
    """Any of the ops that add two gradients."""
    casts: Counter[int] = field(default_factory=Counter)
    """Number of lower-precision gradients still to come, by index of the region's first cast."""
    low: dict[int, Ref] = field(default_factory=dict)
    """Sum so far of the lower-precision gradients, by index of the region's first cast."""
    high: Ref | None = None
    """Sum so far of the gradients in the parameter's precision."""


class _CastSharing(Rebuild):
    """Rebuilds a graph so that each parameter is cast once, and the gradients of its uses are summed before a cast."""

    def __init__(self, graph: JointGraph, repeated: Mapping[tuple[int, int, str], list[GraphOp]]) -> None:
        super().__init__(graph)
        self.first = {op.index: ops[0].index for ops in repeated.values() for op in ops}
        """Index of the first cast of the same parameter in its region, by index of the cast."""
        self.shared = {op.makes[0]: ops[0].makes[0] for ops in repeated.values() for op in ops[1:]}
        """Result of a later cast -> result of the first cast."""
        self.users = Counter(v for op in graph.ops for v in refs((op.args, op.kwargs)))
        """How often each value is read."""
        self.users.update(gradient for _, gradient in graph.gradients)
        self.totals: dict[int, _Total] = {}
        """Total of each gradient that is cast back, and of each sum of such gradients."""
        for op in graph.backward_ops:
            self._collect(op)

    def _collect(self, op: GraphOp) -> None:
        """Record the total to which the result of a backward op belongs: a cast of a shared parameter's gradient begins
        a total, and a sum merges the totals of its terms."""
        if len(op.makes) != 1 or op.outputs != op.makes:
            return
        result = op.makes[0]
        if op.target == CAST and op.gradient_of in self.first:
            self.totals[result] = _Total(result, [result], 1, casts=Counter([self.first[op.gradient_of]]))
        elif op.target == _SUM and not op.kwargs and all(isinstance(term, Ref) for term in op.args):
            terms = [term.value for term in op.args]
            totals = [self.totals.get(term) if self.users[term] == 1 else None for term in terms]
            if any(totals):
                parts, casts = list[int](), Counter[int]()
                for term, total in zip(terms, totals, strict=True):
                    parts += [term] if total is None else total.parts
                    casts += Counter[int]() if total is None else total.casts
                merged = _Total(result, parts, len(parts), op, casts)
                members = [value for value, total in self.totals.items() if any(total is other for other in totals)]
                self.totals.update(dict.fromkeys((*members, result), merged))

    def run(self) -> JointGraph:
        """Return the new graph."""
        for value in self.graph.values:
            if value.base in self.shared:
                self.values[value.id] = replace(value, base=self.shared[value.base])
        for op in self.graph.ops:
            if self.first.get(op.index, op.index) == op.index:
                forward = None if op.gradient_of is None else self.first.get(op.gradient_of, op.gradient_of)
                args, kwargs = map_refs((op.args, op.kwargs), lambda value: Ref(self.shared.get(value, value)))
                self._add_op(replace(op, args=args, kwargs=kwargs, gradient_of=forward))
        return self.finished()

    def _add_op(self, op: GraphOp) -> None:
        """Add an op. Casts and sums of gradients of a shared parameter instead add their terms to its total."""
        total = self.totals.get(op.makes[0]) if op.makes else None
        if total is None:
            self.add(op)
        elif op.target == CAST:
            self._add_gradient(total, op.args[0], op)
        else:
            for term in op.args:
                is_new = self.totals.get(term.value) is not total  # else a cast or sum that was added before
                if term.value in total.parts and is_new:
                    self._add_gradient(total, term)

    def _add_gradient(self, total: _Total, gradient: Ref, cast: GraphOp | None = None) -> None:
        """Add ops that add a gradient to a total. ``cast``: the op that casts it back to the parameter's precision.
        Such gradients are summed in lower precision by autocast region, and the last is followed by a single cast."""
        total.left -= 1
        if cast is not None:
            region = cast.gradient_of
            assert region is not None
            total.casts[region] -= 1
            if region in total.low:
                new_sum = self._new_sum(total, self.values[gradient.value].dtype)
                gradient = self._sum(total, total.low[region], gradient, new_sum)
            total.low[region] = gradient
            if total.casts[region]:
                return
            result = total.result if total.high is None and not total.left else self._new_sum(total)
            self.add(replace(cast, index=-1 - result, args=(gradient,), outputs=(result,), makes=(result,)))
            gradient = Ref(result)
        if total.high is not None:
            gradient = self._sum(total, total.high, gradient, self._new_sum(total) if total.left else total.result)
        total.high = gradient

    def _sum(self, total: _Total, first: Ref, second: Ref, result: int) -> Ref:
        """Add an op that adds two gradients into the value ``result``."""
        assert total.add is not None
        self.add(replace(total.add, index=-1 - result, args=(first, second), outputs=(result,), makes=(result,)))
        return Ref(result)

    def _new_sum(self, total: _Total, dtype: str | None = None) -> int:
        """Add a value for an intermediate sum of gradients, in the parameter's dtype by default, and return its id."""
        like = self.values[total.result]
        dtype = dtype or like.dtype
        size = like.bytes // itemsize(like.dtype) * itemsize(dtype)
        return self.value(f"{like.name}_sum", like, bytes=size, dtype=dtype)
