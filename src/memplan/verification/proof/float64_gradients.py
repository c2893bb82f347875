"""Compare the gradients of a step with those of the same step in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from memplan.verification.proof.rounding import FACTOR, SANE, SLACK, distance
from memplan.verification.proof.rounding import LOSSY as _LOSSY

SAME_LOSS = 1e-3
"""Relative difference up to which two losses come from the same random numbers."""
SAME_LOSSY = 1e-2
"""The same for a step that computes in fewer bits, where a rounding is up to 4e-3."""
_ROUNDING = SLACK * torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Errors of a step's gradients from float64, by parameter, as shares of the largest gradient's norm (L2)."""

    errors: Mapping[str, float]
    """Norm (L2) of the difference."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Norm (L2) of the gradient in float64: 1 for the largest."""

    @property
    def relative(self) -> float:
        """Error of all gradients together, as a share of their norm."""
        error, norm = (math.hypot(*values.values()) for values in (self.errors, self.norms))
        return error / norm if norm else math.inf if error else 0.0

    @property
    def sane(self) -> bool:
        """Return whether it can serve as a yardstick for other steps."""
        return all(error <= SANE for error in self.errors.values())

    def over(self, *beside: GradientErrors, lossy: bool = False) -> dict[str, float]:
        """Return the parameters whose error is over the bound, with the error as a share of their own gradient's norm.

        The bound is `rounding.FACTOR` times the largest error of the sane steps ``beside`` it, and `rounding.SLACK` eps
        of the largest gradient; where the step computes in fewer bits (``lossy``), what `rounding.LOSSY` allows. Where
        the gradient itself is rounding, the error is a share of the largest gradient.
        """
        steps, found = [step for step in beside if step.sane], dict[str, float]()
        for name, error in self.errors.items():
            allowed = max((step.errors.get(name, 0.0) for step in steps), default=0.0)
            bound = _LOSSY.allowed(allowed, 1.0, torch.float32) if lossy else FACTOR * allowed + _ROUNDING
            if not error <= bound:  # a nan is over it, too
                norm = self.norms.get(name, 0.0)
                found[name] = error / norm if norm > _ROUNDING else error
        return found


def same_numbers(loss: float, true: float, *, lossy: bool = False) -> bool:
    """Return whether a step and the one in float64 drew the same random numbers, judged by their losses. ``lossy``: the
    step computes in fewer bits."""
    return abs(loss - true) <= (SAME_LOSSY if lossy else SAME_LOSS) * max(abs(loss), abs(true))


def gradient_errors(
    found: Mapping[str, torch.Tensor | None], true: Mapping[str, torch.Tensor | None]
) -> GradientErrors:
    """Measure the errors of gradients from those in float64, by name; a missing one counts as zeros."""
    errors, norms = dict[str, float](), dict[str, float]()
    for name, exact in true.items():
        given = found.get(name)
        if exact is None and given is None:
            continue
        norms[name] = 0.0 if exact is None else _norm(exact)
        if exact is None or given is None:
            errors[name] = norms[name] if given is None else _norm(given)
        else:
            errors[name] = distance(exact, given)
    largest = max(norms.values(), default=0.0) or 1.0
    return GradientErrors(*({name: value / largest for name, value in each.items()} for each in (errors, norms)))


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.detach().to(torch.float64).norm())
