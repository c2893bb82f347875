"""Share autocast's casts of a parameter: in eager mode it is cast once in an autocast region, and the gradients of its
uses are summed before they are cast back, while a trace casts it for each use. Casts of the user's code stay."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs, refs
from memplan.planning.graph.op_schema import itemsize

CAST = "aten._to_copy.default"
_SUM = "aten.add.Tensor"


def cast_once(graph: JointGraph, casts: Mapping[int, int]) -> JointGraph:
    """Cast each parameter to a lower precision once, as autocast's cache does in eager mode. ``casts`` has the autocast
    region of each cast that autocast inserted, by index of the op."""
    same_casts: dict[tuple[int, int, str], list[GraphOp]] = defaultdict(list)  # by parameter, region and options
    for index, region in casts.items():
        op = graph.ops[index]
        if not op.makes:
            continue
        source, result = graph.values[op.args[0].value], graph.values[op.makes[0]]
        is_lower = itemsize(result.dtype) < itemsize(source.dtype) and source.dtype == "float32"
        if is_lower and source.kind == "parameter" and source.id not in dict(graph.mutations):
            same_casts[op.args[0].value, region, repr(op.kwargs)].append(op)
    repeated = [ops for ops in same_casts.values() if len(ops) > 1]
    return _CastSharing(graph, repeated).run() if repeated else graph


@dataclass
class _GradientTotal:
    """Sum of the gradients of all uses of a parameter."""

    result: int
    """Value of the complete sum."""
    parts: list[int]
    """Gradients to add, in order."""
    gradients_left: int
    """Number of gradients still to come."""
    add_op: GraphOp | None = None
    """Any of the ops that add two gradients."""
    casts_left: Counter[int] = field(default_factory=Counter)
    """Number of lower-precision gradients still to come, by index of the region's first cast."""
    lower_precision_sums: dict[int, Ref] = field(default_factory=dict)
    """Sum so far of the lower-precision gradients, by index of the region's first cast."""
    full_precision_sum: Ref | None = None
    """Sum so far of the gradients in the parameter's precision."""


class _CastSharing(Rebuild):
    """Rebuilds a graph so that each parameter is cast once, and the gradients of its uses are summed before a cast."""

    def __init__(self, graph: JointGraph, repeated: Sequence[Sequence[GraphOp]]) -> None:
        """``repeated``: groups of casts of the same parameter in the same autocast region."""
        super().__init__(graph)
        self.first_cast_of = {op.index: ops[0].index for ops in repeated for op in ops}
        """By index of a cast: that of the first cast of its group."""
        self.first_result_of = {op.makes[0]: ops[0].makes[0] for ops in repeated for op in ops[1:]}
        """By result of a later cast: the result of the first."""
        self.read_count = Counter(value for op in graph.ops for value in refs((op.args, op.kwargs)))
        """How often each value is read."""
        self.read_count.update(gradient for _, gradient in graph.gradients)
        self.total_of: dict[int, _GradientTotal] = {}
        """By gradient that is cast back, and by sum of such gradients: the total that it is part of."""
        for op in graph.backward_ops:
            self._collect(op)

    def _collect(self, op: GraphOp) -> None:
        """Record the total to which the result of a backward op belongs: a cast of a shared parameter's gradient begins
        a total, and a sum merges the totals of its terms."""
        if len(op.makes) != 1 or op.outputs != op.makes:
            return
        result = op.makes[0]
        if op.target == CAST and op.gradient_of in self.first_cast_of:
            region = self.first_cast_of[op.gradient_of]
            self.total_of[result] = _GradientTotal(result, [result], gradients_left=1, casts_left=Counter([region]))
        elif op.target == _SUM and not op.kwargs and all(isinstance(term, Ref) for term in op.args):
            terms = [term.value for term in op.args]
            # a term that something else reads, too, stays a value of its own
            totals = [self.total_of.get(term) if self.read_count[term] == 1 else None for term in terms]
            if any(totals):
                parts, casts = list[int](), Counter[int]()
                for term, total in zip(terms, totals, strict=True):
                    parts += [term] if total is None else total.parts
                    casts += Counter[int]() if total is None else total.casts_left
                merged = _GradientTotal(result, parts, len(parts), add_op=op, casts_left=casts)
                members = [value for value, total in self.total_of.items() if any(total is other for other in totals)]
                self.total_of.update(dict.fromkeys((*members, result), merged))

    def run(self) -> JointGraph:
        """Return the new graph."""
        for value in self.graph.values:
            if value.base in self.first_result_of:
                self.values[value.id] = replace(value, base=self.first_result_of[value.base])
        for op in self.graph.ops:
            if self.first_cast_of.get(op.index, op.index) == op.index:  # later casts are left out
                gradient_of = None if op.gradient_of is None else self.first_cast_of.get(op.gradient_of, op.gradient_of)
                args, kwargs = map_refs((op.args, op.kwargs), lambda value: Ref(self.first_result_of.get(value, value)))
                self._add_op(replace(op, args=args, kwargs=kwargs, gradient_of=gradient_of))
        return self.finished()

    def _add_op(self, op: GraphOp) -> None:
        """Add an op. Casts and sums of gradients of a shared parameter instead add their terms to its total."""
        total = self.total_of.get(op.makes[0]) if op.makes else None
        if total is None:
            self.add(op)
        elif op.target == CAST:
            self._add_gradient(total, op.args[0], op)
        else:
            for term in op.args:
                is_new = self.total_of.get(term.value) is not total  # else a cast or sum that was added before
                if term.value in total.parts and is_new:
                    self._add_gradient(total, term)

    def _add_gradient(self, total: _GradientTotal, gradient: Ref, cast: GraphOp | None = None) -> None:
        """Add ops that add a gradient to a total.

        Gradients in lower precision are summed by autocast region, and the last of a region is followed by a single
        cast. ``cast``: the op that casts such a gradient back to the parameter's precision; None for others.
        """
        total.gradients_left -= 1
        if cast is not None:
            region = cast.gradient_of  # index of the region's first cast
            assert region is not None
            total.casts_left[region] -= 1
            if region in total.lower_precision_sums:
                new_sum = self._new_sum(total, self.values[gradient.value].dtype)
                gradient = self._sum(total, total.lower_precision_sums[region], gradient, new_sum)
            total.lower_precision_sums[region] = gradient
            if total.casts_left[region]:
                return
            is_alone = total.full_precision_sum is None and not total.gradients_left
            result = total.result if is_alone else self._new_sum(total)
            self.add(replace(cast, index=-1 - result, args=(gradient,), outputs=(result,), makes=(result,)))
            gradient = Ref(result)
        if total.full_precision_sum is not None:
            result = self._new_sum(total) if total.gradients_left else total.result
            gradient = self._sum(total, total.full_precision_sum, gradient, result)
        total.full_precision_sum = gradient

    def _sum(self, total: _GradientTotal, first: Ref, second: Ref, result: int) -> Ref:
        """Add an op that adds two gradients into the value ``result``."""
        assert total.add_op is not None
        self.add(replace(total.add_op, index=-1 - result, args=(first, second), outputs=(result,), makes=(result,)))
        return Ref(result)

    def _new_sum(self, total: _GradientTotal, dtype: str | None = None) -> int:
        """Add a value for an intermediate sum of gradients, in the parameter's dtype by default, and return its id."""
        complete = self.values[total.result]
        dtype = dtype or complete.dtype
        size = complete.bytes // itemsize(complete.dtype) * itemsize(dtype)
        return self.value(f"{complete.name}_sum", complete, bytes=size, dtype=dtype)
