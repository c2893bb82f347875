"""Make values again in the backward pass, by the ops that made them, instead of keeping them."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.graph.joint_graph import JointGraph, Value
from memplan.planning.graph.op_schema import short
from memplan.planning.levers.lever import Lever, PlannedStep, Reason, Situation


class Recompute(Lever):
    """Free a value after its last use in the forward pass, and run its op again just before the value is needed.

    It needs no form: `memplan.planning.graph.joint_graph.recomputable` lists the values that `why_not` has nothing
    against, and `Choices.recompute` names those that are made again.
    """

    name = "recompute"

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Say why a forward value is never made again; empty where it may be."""
        op = graph.maker[value.id]
        if value.id in {graph.base(one) for one in graph.outputs}:
            return "returned by the model"
        if op.random:
            return "random: never drawn again"
        if op.once:
            return "its op must run once only"
        if value.id in graph.irreplaceable:
            return "held by a call that is kept as it is"
        if value.id not in op.rerun.makes:
            return f"with it {short(op.rerun.target)} can make {graph.values[op.rerun.makes[0]].name} again"
        return ""

    def counted(self, values: int, host_bytes: int) -> str:
        """Say how many values are made again."""
        return f"{values} value{'' if values == 1 else 's'} recomputed"

    def made_again(self, planned: PlannedStep, value: int) -> Reason:
        """Say what making a value again takes, and what it is for."""
        graph, seconds = planned.graph, planned.seconds
        op, size = graph.maker[value], graph.values[value].bytes
        if value in seconds:
            by = "" if op.again is None else f" by {short(op.again.target)}"
            made = f"making it again{by} takes {format_seconds(seconds[value])}"
        else:
            others = [graph.values[other].name for other in op.makes if other in seconds]
            made = f"made again together with {others[0]}" if others else "made again"
        return Reason(size, f"{made} for {format_bytes(size)}; {planned.needed(value)}")

    def kept(self, planned: PlannedStep, value: int, *, costs_most: bool) -> Reason:
        """Say why a value is kept: it cannot be made again, or that would take time.

        ``costs_most``: of all that is kept and could be made again, it takes the most time for each byte.
        """
        graph, needed = planned.graph, planned.needed(value)
        op, size = graph.maker[value], graph.values[value].bytes
        fixed = self.why_not(graph, graph.values[value], Situation())
        if fixed.startswith("with it"):
            return Reason(size, f"{needed}; {fixed}")
        if fixed:
            return Reason(size, f"{fixed}; {needed}" if needed else fixed)
        most = ", the most per byte of all that is kept" if costs_most else ""
        return Reason(size, f"{needed}; making it again would take {format_seconds(op.rerun.seconds)}{most}")
