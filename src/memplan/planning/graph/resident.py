"""Memory on the device that the joint graph does not contain: optimizer state, other gradients, the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memplan.planning.graph.placement import Home
from memplan.trace.records import Cause


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Memory on the device in addition to the graph's values, and the device itself."""

    state: int = 0
    """Bytes of optimizer state for the parameters that get a gradient in the graph."""
    update: int = 0
    """Bytes that the optimizer allocates while it updates all parameters after the backward pass."""
    update_of: Mapping[int, int] = field(default_factory=dict)
    """By parameter (its value's id): the same if each parameter is updated by itself, in the backward pass."""
    others: Mapping[Cause, int] = field(default_factory=dict)
    """Bytes for parameters that get gradients in other steps only: their gradients and optimizer state."""
    outside: int = 0
    """Bytes that a loss outside of the graph allocates between the passes, in addition to outputs and tangents."""
    home: Home = field(default_factory=Home)
    """Device that the step runs on."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are live throughout the step. The graph itself counts the gradients of its parameters."""
        return self.state + sum(self.others.values())

    def by_cause(self) -> dict[Cause, int]:
        """Return ``held_bytes`` by cause, without zeros."""
        sizes = dict(self.others)
        sizes["optimizer_state"] = sizes.get("optimizer_state", 0) + self.state
        return {cause: size for cause, size in sizes.items() if size}
