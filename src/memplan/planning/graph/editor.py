"""Replace ops of a joint graph. Values keep their ids, ops are renumbered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value, refs


class Rebuild:
    """Builds a new graph from the values of an old graph: call `add` for every op, in order."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        """The old values, which keep their ids, and those that were added."""
        self.ops: list[GraphOp] = []
        self._new_index: dict[int, int] = {}
        """Old index of an op -> new index."""

    def add(self, op: GraphOp, **changes: Any) -> None:
        """Append an op of the old graph, or a new op with a negative index. ``changes`` replace fields of the op. Its
        index, the index of its forward op and the values that it reads are updated here."""
        index = len(self.ops)
        self._new_index.setdefault(op.index, index)  # of several ops that replace one, the first
        gradient_of = None if op.gradient_of is None else self._new_index[op.gradient_of]
        arguments = (changes.get("args", op.args), changes.get("kwargs", op.kwargs))
        reads = tuple(dict.fromkeys(self.values[v].base for v in refs(arguments)))
        self.ops.append(replace(op, **{**changes, "index": index, "gradient_of": gradient_of, "reads": reads}))

    def value(self, name: str, like: Value, **changes: Any) -> int:
        """Add a value for a result of a new op and return its id. It is a copy of ``like`` with memory of its own, in
        which ``changes`` replace fields (``base`` makes it a view)."""
        number = len(self.values)
        fields = {"id": number, "name": f"{name}_{number}", "kind": "result", "path": "", "base": number, **changes}
        self.values.append(replace(like, **fields))
        return number

    def finished(self) -> JointGraph:
        """Return the new graph."""
        maker = {value: op.index for op in self.ops for value in op.outputs if value is not None}
        values = tuple(replace(value, op=maker.get(value.id)) for value in self.values)
        return replace(self.graph, values=values, ops=tuple(self.ops))
