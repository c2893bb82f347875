"""Gradients of a step beside those of the same step in float64: how far they are off, and when that is too far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TIMES, EPSILONS = 2, 64
"""A gradient's error may be so many times that of what it is held against, and so many eps of the largest gradient."""
SANE = 0.01
"""A step whose error is above this share of the largest gradient is nothing to hold others against."""
SAME_LOSS = 1e-3
"""Two losses this close, relative to the larger, came of the same random numbers."""
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Of one step's gradients against float64, per parameter."""

    errors: Mapping[str, float]
    """The difference's norm (L2)."""
    norms: Mapping[str, float]
    """The norm (L2) of the gradient in float64."""

    @property
    def largest(self) -> float:
        """The norm of the largest gradient."""
        return max(self.norms.values(), default=0.0)

    @property
    def relative(self) -> float:
        """The error of all gradients together, as a share of their norm."""
        error, norm = (math.hypot(*values.values()) for values in (self.errors, self.norms))
        return error / norm if norm else math.inf if error else 0.0

    @property
    def sane(self) -> bool:
        """Whether others can be held against it."""
        return all(error <= SANE * self.largest for error in self.errors.values())

    def over(self, *beside: GradientErrors) -> dict[str, float]:
        """The parameters whose error is over the bound, each with its error as a share of its gradient's norm.

        The bound is `TIMES` the largest error of the steps beside it, where these are sane, and `EPSILONS` eps of the
        largest gradient. A norm that rounding alone explains does not serve as a measure: then it is the largest one.
        """
        rounding = EPSILONS * _EPS * self.largest
        steps, found = [step for step in beside if step.sane], dict[str, float]()
        for name, error in self.errors.items():
            allowed = max((step.errors.get(name, 0.0) for step in steps), default=0.0)
            if not error <= TIMES * allowed + rounding:  # a nan is over it, too
                norm = self.norms[name]
                measure = norm if norm > rounding else self.largest
                found[name] = error / measure if measure else math.inf
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: four digits of each."""
        short = {name: (float(f"{error:.4g}"), float(f"{self.norms[name]:.4g}")) for name, error in self.errors.items()}
        return {name: list(pair) for name, pair in short.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GradientErrors:
        """What `to_dict` gave."""
        return cls({name: pair[0] for name, pair in data.items()}, {name: pair[1] for name, pair in data.items()})


def same_numbers(loss: float, true: float) -> bool:
    """Whether a step and the one in float64 drew the same random numbers, as far as their losses tell."""
    return abs(loss - true) <= SAME_LOSS * max(abs(loss), abs(true))


def gradient_errors(
    found: Mapping[str, torch.Tensor | None], true: Mapping[str, torch.Tensor | None]
) -> GradientErrors:
    """Hold gradients against those in float64, by name; one that is missing counts as zeros."""
    errors, norms = dict[str, float](), dict[str, float]()
    for name, exact in true.items():
        given = found.get(name)
        if exact is None and given is None:
            continue
        norms[name] = 0.0 if exact is None else _norm(exact)
        if exact is None or given is None:
            errors[name] = _norm(given) if given is not None else norms[name]
        else:
            errors[name] = _norm(given.detach().to(torch.float64) - exact.detach().to(torch.float64))
    return GradientErrors(errors, norms)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.detach().to(torch.float64).norm())
