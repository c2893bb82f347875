"""Outcomes of fitting a step, or a script's model, into a budget, as data. All sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memplan._json import Written, named
from memplan.errors import BudgetError
from memplan.planning.plan.plan import Plan
from memplan.verification.fitting.frontier import Frontier
from memplan.verification.proof.proof import Proof


@dataclass(frozen=True, slots=True)
class Outcome(Written):
    """Outcome of fitting a step into a budget."""

    FORMAT: ClassVar[str] = "memplan.fit"

    title: str
    plan: Plan | None
    """None if no plan fits the budget, or if the proof failed."""
    proof: Proof | None = None
    """None if nothing was run."""
    changed: bool = True
    """Whether the model runs the plan; False if the step fits without a plan."""
    shortfall: BudgetError | None = None
    """Why no plan fits the budget."""
    frontier: Frontier | None = None
    notes: tuple[str, ...] = ()
    """Further remarks."""

    @property
    def fits(self) -> bool:
        """Whether the step is within the budget and, if it was run, passed the proof."""
        return self.shortfall is None and (self.proof is None or self.proof.ok)

    def _plain(self) -> dict[str, Any]:
        """Return the outcome as data for JSON, with the smallest budget and the reason of a shortfall."""
        names = ("title", "fits", "changed", "plan", "proof", "frontier", "notes")
        shortfall = self.shortfall
        return named(self, *names) | {
            "smallest_budget": None if shortfall is None else shortfall.smallest_budget,
            "reason": None if shortfall is None else str(shortfall),
        }


@dataclass(frozen=True, slots=True)
class InferenceFigures:
    """What inference takes within a budget."""

    budget: int
    before: int
    """Predicted peak as it is."""
    predicted: int
    """Predicted peak in parts."""
    measured: int
    """Measured peak of one call."""
    parts: int
    """Number of parts; 0 if it fits as it is."""
    largest_part: tuple[int, ...]
    """Elements along each dimension of space that a part reads at most; empty if it fits as it is."""
    overlap: float
    """Elements of the input that are read, per element of the input."""
    difference: float
    """Largest difference of values that two overlapping parts compute, as a share of the largest result."""


@dataclass(frozen=True, slots=True)
class InferenceOutcome(Written):
    """Outcome of fitting inference into a budget."""

    FORMAT: ClassVar[str] = "memplan.fit_inference"

    title: str
    figures: InferenceFigures | None
    """None if it does not fit."""
    reason: str | None = None
    """Why it does not fit."""
    smallest_budget: int | None = None
    """Smallest budget that it fits, where it does not fit this one."""

    @property
    def fits(self) -> bool:
        """Whether inference runs within the budget."""
        return self.figures is not None

    def _plain(self) -> dict[str, Any]:
        return named(self, "title", "fits", "figures", "reason", "smallest_budget")


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines to add to a script."""

    where: str | None
    """``file:line`` before or after which they go; None if no line of the script is known for it."""
    before: bool
    """True: they go before that line; False: after it."""
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fitting(Written):
    """Outcome of planning a script's model."""

    FORMAT: ClassVar[str] = "memplan.fit_script"

    title: str
    budget: int
    """Limit for the whole script."""
    recorded: int
    """Peak of the unchanged script: on a GPU reserved bytes plus the CUDA context, else the allocated peak."""
    beside: int = 0
    """Bytes at the peak outside of the planned model, such as a loss or other models, in addition to the plan's."""
    surplus: int = 0
    """On a GPU: CUDA context, rounding, and reserved but unallocated bytes, as recorded."""
    plan: Plan | None = None
    """None if the script fits without a plan, or no plan fits."""
    shortfall: BudgetError | None = None
    """Why no plan fits."""
    lines: Lines | None = None
    outside: int = 0
    """Allocated peak of the whole script while its model is not being trained."""
    recorded_band: tuple[int, int] | None = None
    """What holds ``recorded`` in 95 % of scripts, where cuDNN's workspaces are expected; None where all are known."""

    @property
    def fits(self) -> bool:
        """Whether the script is within the budget, unchanged or with the plan."""
        return self.shortfall is None

    @property
    def changes(self) -> bool:
        """Whether there is a plan to apply."""
        return self.plan is not None

    @property
    def planned(self) -> int | None:
        """Upper bound in bytes of the whole script's memory after the lines are added; None without a plan.

        It is computed from the budget that the lines name and not from this plan's peak: on another machine, with
        other timings, `memplan.fit` can choose another plan, which may use all of that budget.
        """
        return None if self.plan is None else max(self.plan.budget + self.beside, self.outside) + self.surplus

    @property
    def smallest(self) -> int | None:
        """Smallest budget for which there is a plan; None if the script fits its budget."""
        if self.shortfall is None:
            return None
        least = max(self.shortfall.smallest_budget + self.beside, self.outside) + self.surplus
        return min(least, self.recorded)

    def _plain(self) -> dict[str, Any]:
        """Return the outcome for a script as data for JSON."""
        names = (
            "title", "fits", "budget", "recorded", "recorded_band", "beside", "surplus", "outside", "planned", "plan",
            "lines",
        )  # fmt: skip
        return named(self, *names) | {"changed": self.changes, "smallest_budget": self.smallest}
