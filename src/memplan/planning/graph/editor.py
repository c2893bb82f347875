"""Replace ops of a joint graph: values keep their ids, ops are renumbered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Value, refs


class Rebuild:
    """Takes the ops of the new graph one by one, in order."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[GraphOp] = []
        self._moved: dict[int, int] = {}
        """New index of each op, by its old one."""

    def add(self, op: GraphOp, **changes: Any) -> None:
        """Add an op of the old graph, changed; or a new one, with an index below 0."""
        index = len(self.ops)
        if op.index not in self._moved:
            self._moved[op.index] = index
        forward = None if op.gradient_of is None else self._moved[op.gradient_of]
        called = (changes.get("args", op.args), changes.get("kwargs", op.kwargs))
        reads = tuple(dict.fromkeys(self.values[v].base for v in refs(called)))
        self.ops.append(replace(op, **{**changes, "index": index, "gradient_of": forward, "reads": reads}))

    def value(self, name: str, like: Value, **changes: Any) -> int:
        """Add a value that a new op makes: as ``like``, with its own memory unless ``base`` says otherwise."""
        number = len(self.values)
        made = replace(like, id=number, name=f"{name}_{number}", kind="result", path="", **{"base": number, **changes})
        self.values.append(made)
        return number

    def finished(self) -> JointGraph:
        """Return the new graph."""
        made = {value: op.index for op in self.ops for value in op.outputs if value is not None}
        values = tuple(
            value if value.op == made.get(value.id) else replace(value, op=made.get(value.id)) for value in self.values
        )
        return replace(self.graph, values=values, ops=tuple(self.ops))
