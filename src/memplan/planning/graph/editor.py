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
        self.ops: list[GraphOp] = []
        self._new_index: dict[int, int] = {}
        """Old index of an op -> new index."""

    def add(self, op: GraphOp, **changes: Any) -> None:
        """Append an op of the old graph with some fields changed, or a new op, whose index is negative. Its index and
        the values that it reads are updated."""
        index = len(self.ops)
        if op.index not in self._new_index:
            self._new_index[op.index] = index
        forward = None if op.gradient_of is None else self._new_index[op.gradient_of]
        arguments = (changes.get("args", op.args), changes.get("kwargs", op.kwargs))
        reads = tuple(dict.fromkeys(self.values[v].base for v in refs(arguments)))
        self.ops.append(replace(op, **{**changes, "index": index, "gradient_of": forward, "reads": reads}))

    def value(self, name: str, like: Value, **changes: Any) -> int:
        """Add a value for a result of a new op and return its id. It is like ``like``, with its own memory unless
        ``base`` is changed."""
        number = len(self.values)
        fields = {"id": number, "name": f"{name}_{number}", "kind": "result", "path": "", "base": number, **changes}
        self.values.append(replace(like, **fields))
        return number

    def finished(self) -> JointGraph:
        """Return the new graph."""
        maker = {value: op.index for op in self.ops for value in op.outputs if value is not None}
        values = tuple(
            value if value.op == maker.get(value.id) else replace(value, op=maker.get(value.id))
            for value in self.values
        )
        return replace(self.graph, values=values, ops=tuple(self.ops))
