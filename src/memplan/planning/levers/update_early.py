"""Update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient."""

from __future__ import annotations

from memplan.planning.levers.lever import Lever, PlannedStep, Reason


class UpdateEarly(Lever):
    """Let the optimizer apply each gradient early: no more than one, and no more than one update, is there at once."""

    name = "update early"
    option = ("early=True (--early)", "an update after the backward pass (early=False)")
    field = "early"
    """Name in the choices of a saved plan, and of the argument that asks for it."""
    summary = "each parameter updated early"
    remedy = "let the optimizer update early"
    """What else a step that fits no budget could do."""

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Say how many parameters are updated in the backward pass, and the bytes of their gradients."""
        if not (planned.gradients.updates and planned.trained):
            return None
        return Reason(
            sum(value.own_bytes for value in planned.trained),
            "each parameter is updated and its gradient freed as soon as nothing reads them any more",
            {"parameters": len(planned.trained)},
        )
