"""Options of a plan: as `memplan.plan` and `memplan.fit` take them, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch

from memplan.devices import Device
from memplan.planning.cost.optimizer_memory import Optimizer
from memplan.planning.graph.placement import Home
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.search.search import Heuristics

Engine = Literal["graph", "inductor"]
"""Engines that run a plan: torch's own kernels one by one, or kernels that Inductor fuses within each pass."""

Allow = Literal["exact", "lossy"]
"""Change of the result that a plan may make: none (but for an engine's rounding), or as `Precision` says."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Arguments of `memplan.plan` and `memplan.fit` beside the step itself, as the caller gave them."""

    budget: Any
    """Bytes, a size ("6 GiB") or a card's name: bound on everything on the device at any moment of the step."""
    device: str | torch.device | None = None
    """Card for which seconds are estimated; None: the kernels that the step runs by, measured."""
    allow: Allow = "exact"
    engine: Engine = "graph"
    gradients: GradientUse = STAYS
    """Use of each parameter's gradient once it is complete."""
    accumulate: int = 1
    """Micro-batches between two updates; with more than one, gradients are held when a step begins."""
    clip_norm: float | None = None
    """Global norm at which gradients are clipped."""
    plan: Plan | None = None
    """Plan whose choices are taken instead of a search's."""
    heuristics: Heuristics = field(default_factory=Heuristics)
    costs: Mapping[str, float] | str | None = None
    """Seconds by op; "roofline": estimates that are the same on every machine; None: measured."""
    host_memory: bool = False
    """Values of a model on the CPU may wait in host memory, too: the plan is for a card, and does not run here."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked options of a plan, whatever its budget."""

    optimizer: Optimizer | None = None
    gradients: GradientUse = STAYS
    """Use of each parameter's gradient once it is complete."""
    home: Home = field(default_factory=Home)
    """Device that the step runs on."""
    device: Device | None = None
    """Card for which seconds are estimated; None: the kernels that the step runs by, measured."""
    costs: Mapping[str, float] | str | None = None
    """Seconds by op, as an earlier plan measured them; "roofline": estimates that are the same on every machine."""
    heuristics: Heuristics = field(default_factory=Heuristics)
    plan: Plan | None = None
    """Plan whose choices are taken instead of a search's."""
    engine: Engine = "graph"
    host_memory: bool = False
    """Values may wait in host memory, where the device is a card. What runs on this machine's CPU must not."""
    allow: Allow = "exact"
    precision: Precision | None = None
    """Precision to compute and save in, where lossy plans are allowed; None: the fastest is chosen."""
    without: tuple[Precision, ...] = ()
    """Precisions that are not to be chosen."""
    relaid: bool = True
    """Fused kernels may convolve in channels last."""
    outside: Fraction = Fraction(0)
    """Bytes that a loss outside of the step holds for a moment, for each byte of the gradients of its outputs."""

    @property
    def undecided(self) -> bool:
        """Return whether a precision is still to be chosen."""
        return self.allow == "lossy" and self.precision is None and self.plan is None

    @property
    def settled(self) -> Precision:
        """Precision of the given plan, else the one asked for, else that of the step as it is written."""
        return self.plan.precision if self.plan is not None else self.precision or EXACT
