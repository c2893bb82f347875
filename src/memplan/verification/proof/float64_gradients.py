"""Compare the gradients of a step with those of the same step in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from memplan.verification.proof.differences import relative_error
from memplan.verification.proof.rounding import FACTOR, SANE, SLACK, distance
from memplan.verification.proof.rounding import LOSSY as _LOSSY

SAME_LOSS = 1e-3
"""Relative difference up to which two losses count as of the same random numbers."""
SAME_LOSSY = 1e-2
"""The same for a step in lower precision, where a rounding is up to 4e-3."""
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
        return relative_error(math.hypot(*self.errors.values()), math.hypot(*self.norms.values()))

    @property
    def is_usable_yardstick(self) -> bool:
        """Whether each error is small enough that it can be rounding: then others may have errors of that size."""
        return all(error <= SANE for error in self.errors.values())

    def exceeding(self, *yardsticks: GradientErrors, lossy: bool = False) -> dict[str, float]:
        """Return the parameters whose error exceeds the bound, with the error as a share of their own gradient's norm.

        The bound is `rounding.FACTOR` times the largest error of the sane yardsticks, plus `rounding.SLACK` eps of the
        largest gradient; in lower precision (``lossy``), it is that of `rounding.LOSSY`. Where the gradient itself is
        no more than rounding, the error is a share of the largest gradient instead.
        """
        usable, wrong = [yardstick for yardstick in yardsticks if yardstick.is_usable_yardstick], dict[str, float]()
        for name, error in self.errors.items():
            reference = max((yardstick.errors.get(name, 0.0) for yardstick in usable), default=0.0)
            bound = _LOSSY.allowed(reference, 1.0, torch.float32) if lossy else FACTOR * reference + _ROUNDING
            if not error <= bound:  # true of a nan, too
                norm = self.norms.get(name, 0.0)
                wrong[name] = error / norm if norm > _ROUNDING else error
        return wrong


def drew_same_numbers(loss: float, true: float, *, lossy: bool = False) -> bool:
    """Return whether a step drew the same random numbers as the step in float64, judged by their losses. ``lossy``:
    whether the step computes in lower precision."""
    return abs(loss - true) <= (SAME_LOSSY if lossy else SAME_LOSS) * max(abs(loss), abs(true))


def gradient_errors(
    gradients: Mapping[str, torch.Tensor | None], true: Mapping[str, torch.Tensor | None]
) -> GradientErrors:
    """Measure the errors of gradients from the true gradients in float64; both are given by name of the parameter.

    Both errors and norms are shares of the largest true gradient's norm (L2). A gradient that is missing on one side
    counts as zeros; parameters without either are left out.
    """
    errors, norms = dict[str, float](), dict[str, float]()
    for name, exact in true.items():
        gradient = gradients.get(name)
        if exact is None and gradient is None:
            continue
        norms[name] = 0.0 if exact is None else _norm(exact)
        if exact is None or gradient is None:
            errors[name] = norms[name] if gradient is None else _norm(gradient)
        else:
            errors[name] = distance(exact, gradient)
    largest = max(norms.values(), default=0.0) or 1.0
    return GradientErrors(
        {name: error / largest for name, error in errors.items()},
        {name: norm / largest for name, norm in norms.items()},
    )


def _norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm, computed in float64."""
    return float(tensor.detach().to(torch.float64).norm())
