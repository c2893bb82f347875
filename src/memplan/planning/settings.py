"""Options of a plan: as passed to `memplan.plan` and `memplan.fit`, and after the checks."""

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
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.ops.eight_bit_moments import EightBitMoments
from memplan.planning.plan.plan import Plan
from memplan.planning.search.search import Heuristics

Engine = Literal["graph", "inductor"]
"""Engines of a plan: torch's own kernels one by one, or kernels that Inductor fuses within each pass."""

Allow = Literal["exact", "reordered", "lossy"]
"""Changes of results that a plan may cause: none (except an engine's rounding), another order of sums, or those of
`Precision`."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Unchecked arguments of `memplan.plan` and `memplan.fit`, without the step."""

    budget: Any
    """Bytes, a size ("6 GiB") or a card's name: limit of all memory on the device at any time of the step."""
    device: str | torch.device | None = None
    """Card for which seconds are estimated; None: the kernels that the step runs by, measured."""
    allow: Allow = "exact"
    engine: Engine = "graph"
    gradients: GradientUse = KEPT_UNTIL_UPDATE
    """Use of each parameter's gradient once it is complete."""
    accumulate: int = 1
    """Micro-batches per update; with more than one, gradients exist when a step begins."""
    clip_norm: float | None = None
    """Global norm at which gradients are clipped."""
    plan: Plan | None = None
    """Plan whose choices are used instead of a search."""
    heuristics: Heuristics = field(default_factory=Heuristics)
    costs: Mapping[str, float] | str | None = None
    """Seconds by op; "roofline": estimates that are the same on every machine; None: measured."""
    host_memory: bool = False
    """Whether values of a model on the CPU may be offloaded: the plan is for a card and does not run here."""
    moments_in_8_bits: bool = True
    """Whether a lossy plan may have moments in 8 bits; not where the program trains by its own optimizer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked options of a plan, without the budget."""

    optimizer: Optimizer | None = None
    """The user's optimizer; see `counted_optimizer`."""
    gradients: GradientUse = KEPT_UNTIL_UPDATE
    """Use of each parameter's gradient once it is complete."""
    home: Home = field(default_factory=Home)
    """Device that the step runs on."""
    device: Device | None = None
    """Card for which seconds are estimated; None: the kernels that the step runs by, measured."""
    costs: Mapping[str, float] | str | None = None
    """Seconds by op from an earlier plan; "roofline": estimates that are the same on every machine."""
    heuristics: Heuristics = field(default_factory=Heuristics)
    plan: Plan | None = None
    """Plan whose choices are used instead of a search."""
    engine: Engine = "graph"
    host_memory: bool = False
    """Whether values may be offloaded if the device is a card. Steps that run on this CPU must not."""
    allow: Allow = "exact"
    precision: Precision | None = None
    """Precision to compute and save in, if lossy plans are allowed; None: the fastest."""
    moments_in_8_bits: bool = True
    """Whether the fastest may have moments in 8 bits; not where the program trains by its own optimizer."""
    excluded_precisions: tuple[Precision, ...] = ()
    """Precisions that a lossy plan must not use, such as those whose plans failed their proof."""
    channels_last: bool = True
    """Whether fused kernels may convolve in channels last."""
    loss_bytes_ratio: Fraction = Fraction(0)
    """Temporary bytes of a loss outside of the step, per byte of the gradients of its outputs."""

    @property
    def chooses_precision(self) -> bool:
        """Whether the planner chooses the precision."""
        return self.allow == "lossy" and self.precision is None and self.plan is None

    @property
    def fixed_precision(self) -> Precision:
        """Precision of ``plan``, else the requested precision, else that of the step as written."""
        return self.plan.precision if self.plan is not None else self.precision or EXACT

    @property
    def counted_optimizer(self) -> Optimizer | None:
        """Optimizer whose state and update are part of the planned step: the user's, or its counterpart with moments in
        8 bits where the precision has these."""
        if self.optimizer is None or not self.fixed_precision.moments:
            return self.optimizer
        return EightBitMoments(self.optimizer)
