"""Run ops of the backward pass earlier or later than autograd does, where the peak of the step falls."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.planning.graph.op_schema import short
from memplan.planning.levers.lever import Lever, PlannedStep, Reason


class Order(Lever):
    """Move ops of the backward pass. `memplan.planning.search.order` chooses them."""

    name = "order of ops"
    switch = "order"

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Report how many ops are moved, the one with the most bytes, and by how much the peak falls."""
        moved, values = planned.moved_ops, planned.graph.values
        if not moved:
            return None
        largest = max(moved, key=lambda op: sum(values[value].bytes for value in op.makes))
        layer, freed = planned.graph.layer_of(largest), planned.freed_by_order
        text = f"{len(moved)} of {len(planned.graph.backward_ops)} ops of the backward pass run earlier or later than "
        text += f"autograd runs them, such as {short(largest.target)}{f' of {layer}' if layer else ''}; "
        if freed > 0:
            text += f"in autograd's order the same decisions have a peak that is {format_bytes(freed)} higher"
        else:
            text += "this lowers the least budget"
        return Reason(max(0, freed), text, {"moved": len(moved)})
