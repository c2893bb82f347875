"""What, besides a model and its call, a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from memplan.devices import Device
from memplan.planning.cost.optimizer_memory import Optimizer
from memplan.planning.graph.placement import Home
from memplan.planning.graph.precision import EXACT, Precision
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.plan.plan import Plan
from memplan.planning.search.search import Heuristics

Engine = Literal["graph", "inductor"]
"""What runs a plan: torch's own kernels one by one, or fused ones that Inductor makes of each half."""


Allow = Literal["exact", "lossy"]
"""What a plan may change of the result: nothing (but for an engine's rounding), or as `Precision` says."""


@dataclass(frozen=True)
class Settings:
    """What, besides a model and its call, a plan is made for."""

    budget: int
    """Bytes: all that is on the device at any moment of the step."""
    optimizer: Optimizer | None = None
    gradients: GradientUse = STAYS
    """What becomes of each parameter's gradient once it is complete."""
    home: Home = field(default_factory=Home)
    """Where the step runs."""
    device: Device | None = None
    """Whose kernels the seconds are of; None: those that the step runs by, measured."""
    costs: Mapping[str, float] | str | None = None
    """Seconds by op, as an earlier plan measured them (`costs.costs_of`); "roofline": estimates, always the same."""
    heuristics: Heuristics = field(default_factory=Heuristics)
    plan: Plan | None = None
    """A plan whose choices are taken, instead of a search's."""
    engine: Engine = "graph"
    host_memory: bool = False
    """Values may wait in host memory, where the device is a card. What runs on this machine's CPU must not."""
    allow: Allow = "exact"
    precision: Precision | None = None
    """What is computed and kept in fewer bits, where lossy plans are allowed; None: the fastest is chosen."""
    without: tuple[Precision, ...] = ()
    """Of those to choose from, what is not to be taken."""
    relaid: bool = True
    """Fused kernels may convolve in channels last."""

    @property
    def undecided(self) -> bool:
        """Whether there is a precision to be chosen."""
        return self.allow == "lossy" and self.precision is None and self.plan is None

    @property
    def settled(self) -> Precision:
        """The precision of a plan that is there, the one that is asked for, or none lower than the step's own."""
        return self.plan.precision if self.plan is not None else self.precision or EXACT
