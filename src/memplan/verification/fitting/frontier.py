"""Plans of a step for several budgets, and measured baselines, as data."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.verification.peers.trials import PeerResult


@dataclass(frozen=True, slots=True)
class Point:
    """A plan on the frontier."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """Predicted time added to the step; negative if lower precision makes it faster."""
    lost: str = ""
    """What a lossy plan computes or saves in lower precision; "" for exact plans."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Pareto-optimal plans of a step: none has both a larger peak and more added seconds than another."""

    title: str
    points: tuple[Point, ...]
    """The largest peak, where all activations stay saved, first; the floor last."""
    eager_peak: int
    """Predicted bytes of the step without a plan."""
    step_seconds: float | None = None
    """Predicted time of the step without a plan."""
    budget: int | None = None
    """The user's budget in bytes: tables and charts mark it."""
    peers: tuple[PeerResult, ...] = ()
    """Measured memory and time of other approaches, such as eager mode (first) and torch.compile."""
