"""Update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient."""

from __future__ import annotations

from memplan.planning.levers.lever import Lever, PlannedStep, Reason


class UpdateEarly(Lever):
    """Let the optimizer apply each gradient early, so that only a single gradient and update is alive at a time."""

    name = "update early"
    option = ("early=True (--early)", "an update after the backward pass (early=False)")
    field = "early"
    """Name in the choices of a saved plan, and of the public argument."""
    summary = "each parameter updated early"
    remedy = "let the optimizer update early"
    """Remedy in the message for a budget that is too small."""

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Report how many parameters are updated in the backward pass, and the bytes of their gradients."""
        if not (planned.gradient_use.updates_early and planned.trained_parameters):
            return None
        return Reason(
            sum(value.contiguous_bytes for value in planned.trained_parameters),
            "each parameter is updated and its gradient freed as soon as nothing reads them any more",
            {"parameters": len(planned.trained_parameters)},
        )
