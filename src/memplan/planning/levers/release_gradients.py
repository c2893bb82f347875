"""Add each gradient to the accumulated gradient of earlier micro-batches as soon as it is complete, and free it."""

from __future__ import annotations

from memplan.planning.levers.lever import Lever, PlannedStep, Reason


class ReleaseGradients(Lever):
    """Free each gradient as soon as it is accumulated."""

    name = "accumulate"
    option = ("held gradients (accumulate=2 or more)", "no held gradients (accumulate=1)")
    field = "held"
    """Name in the choices of a saved plan."""

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Report how many gradients are accumulated at once, and their bytes."""
        if not (planned.gradient_use.accumulates and planned.trained_parameters):
            return None
        return Reason(
            sum(value.contiguous_bytes for value in planned.trained_parameters),
            "each gradient is added to the held one as soon as it is complete, and freed",
            {"parameters": len(planned.trained_parameters)},
        )
