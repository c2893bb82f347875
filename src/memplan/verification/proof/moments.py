"""Error of an optimizer's moments in 8 bits, over many updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan._display import Printed
from memplan.verification.measurement.state_copies import random_state_restored
from memplan.verification.measurement.trial import Trial

UPDATES = 20
ALLOWED = 0.1
"""Largest relative error. Of a perceptron, a transformer layer, a convolutional network and an embedding with a head,
with Adam's usual options, a rate of 0.01, and betas of 0.9 and 0.95, it was 1.2 to 4.6 % after 20 updates."""

WORST_ALLOWED = 0.2
"""Largest relative error of a single parameter; of those steps it was 1.9 to 6 %."""


@dataclass(frozen=True, slots=True)
class MomentsError(Printed):
    """Error of what updates with moments in 8 bits add to the parameters. The L2 norm of its difference to what the
    same gradients add with the optimizer's own moments, relative to the norm of the latter."""

    updates: int
    relative: float
    """Of all parameters together."""
    worst: str
    """Parameter with the largest relative error, of those that move at least a thousandth as far as the farthest."""
    worst_relative: float
    allowed: float = ALLOWED
    """Largest allowed ``relative``."""
    worst_allowed: float = WORST_ALLOWED
    """Largest allowed ``worst_relative``."""
    compared: bool = True
    """Whether any parameter moved: with a learning rate of zero there is nothing to compare."""

    @property
    def ok(self) -> bool:
        """Whether the error is allowed; that of parameters that are not finite never is. True where nothing was
        compared."""
        return not self.compared or (self.relative <= self.allowed and self.worst_relative <= self.worst_allowed)

    def __str__(self) -> str:
        if not self.compared:
            return f"moments in 8 bits: nothing was compared, as {self.updates} updates move no parameter"
        text = (
            f"moments in 8 bits: what {self.updates} updates by the same gradients add to the parameters is "
            f"{self.relative:.2%} off (relative, in L2)"
        )
        text += "" if self.relative <= self.allowed else f", and {self.allowed:.0%} is allowed"
        text += f"; most of {self.worst}, {self.worst_relative:.2%}" if self.worst else ""
        within = not self.worst or self.worst_relative <= self.worst_allowed
        return text if within else f"{text}, and {self.worst_allowed:.0%} is allowed of a parameter"


def moments_error(trial: Trial, optimizer: Callable[[Any], Any], updates: int = UPDATES) -> MomentsError:
    """Train for some updates, and compare the parameters with copies that the other optimizer updates.

    Both get the gradients of the trial's step, so that the error is that of the moments alone.

    Args:
        trial: the step with the optimizer's own moments; it has not run yet.
        optimizer: a callable of the parameters, which makes the optimizer with moments in 8 bits.
        updates: their number.
    """
    parameters = {name: parameter for name, parameter in trial.parameters.items() if parameter.requires_grad}
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    copies = {
        name: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        for name, parameter in trial.parameters.items()
    }
    other = optimizer(list(copies.values()))
    with random_state_restored():
        for _ in range(updates):
            trial.prepare()
            trial.gradients_of_step()
            for name, parameter in parameters.items():
                copies[name].grad = None if parameter.grad is None else parameter.grad.clone()
            trial.update_step()
            other.step()
        trial.release()
    errors, moves = dict[str, float](), dict[str, float]()
    for name, parameter in parameters.items():
        errors[name] = float(torch.linalg.vector_norm(copies[name].detach().double() - parameter.detach().double()))
        moves[name] = float(torch.linalg.vector_norm(parameter.detach().double() - start[name].double()))
    farthest = max(moves.values(), default=0.0)
    # without parameters that hardly move, whose relative error says nothing
    relative = {name: errors[name] / move for name, move in moves.items() if move > 1e-3 * farthest}
    worst = max(relative, key=lambda name: relative[name], default="")
    total, error = math.hypot(*moves.values()), math.hypot(*errors.values())
    if total == error == 0:
        return MomentsError(updates, 0.0, "", 0.0, compared=False)
    return MomentsError(updates, error / total if total else math.inf, worst, relative.get(worst, 0.0))
