"""Recompute values in the backward pass instead of saving them."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.graph.joint_graph import JointGraph, Value
from memplan.planning.graph.op_schema import short
from memplan.planning.levers.lever import Lever, PlannedStep, Reason, Situation


class Recompute(Lever):
    """Free a value after its last use in the forward pass, and rerun its op just before the backward pass needs it.

    It has no encodings: `memplan.planning.graph.joint_graph.recomputable` lists the values that `why_not` allows, and
    `Choices.recompute` those that a plan recomputes.
    """

    name = "recompute"

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Return the reason why a forward value cannot be recomputed, empty if it can."""
        op = graph.maker[value.id]
        if value.id in {graph.base(output) for output in graph.outputs}:
            return "returned by the model"
        if op.random:
            return "random: never drawn again"
        if op.must_run_once:
            return "its op must run once only"
        if value.id in graph.irreplaceable:
            return "held by a call that is kept as it is"
        recompute_op = op.recompute_op  # a cheaper op recomputes the first result alone, from the others
        if value.id not in recompute_op.makes:
            return f"with it {short(recompute_op.target)} can make {graph.values[recompute_op.makes[0]].name} again"
        return ""

    def counted(self, values: int, host_bytes: int) -> str:
        """Return the number of recomputed values."""
        return f"{values} value{'' if values == 1 else 's'} recomputed" if values else ""

    def recomputed(self, planned: PlannedStep, value: int) -> Reason:
        """Describe what recomputing a value costs, and what reads it."""
        graph, seconds = planned.graph, planned.added_seconds
        op, size = graph.maker[value], graph.values[value].bytes
        if value in seconds:
            by = "" if op.cheaper_recompute is None else f" by {short(op.cheaper_recompute.target)}"
            cost = f"recomputing it{by} takes {format_seconds(seconds[value])}"
        else:
            others = [graph.values[other].name for other in op.makes if other in seconds]
            cost = f"recomputed together with {others[0]}" if others else "recomputed"
        return Reason(size, f"{cost} for {format_bytes(size)}; {planned.value_readers(value)}")

    def saved(self, planned: PlannedStep, value: int, *, costs_most: bool) -> Reason:
        """Describe why a value is saved: it cannot be recomputed, or recomputing it would take time.

        ``costs_most``: whether it takes the most seconds per byte of all saved values that could be recomputed.
        """
        graph, needed = planned.graph, planned.value_readers(value)
        op, size = graph.maker[value], graph.values[value].bytes
        obstacle = self.why_not(graph, graph.values[value], Situation())
        if obstacle.startswith("with it"):  # a clause that continues the sentence on what reads the value
            return Reason(size, f"{needed}; {obstacle}")
        if obstacle:
            return Reason(size, f"{obstacle}; {needed}" if needed else obstacle)
        most = ", the most per byte of all that is kept" if costs_most else ""
        return Reason(size, f"{needed}; recomputing it would take {format_seconds(op.recompute_op.seconds)}{most}")
