"""Bytes on the device beside those of the joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memplan.planning.graph.placement import Home
from memplan.trace.records import Cause


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Memory on the device beside the graph's values."""

    state: int = 0
    """Bytes of the optimizer's state of the parameters that get a gradient in the graph."""
    update: int = 0
    """Bytes that the optimizer holds for a moment when it updates all parameters after the backward pass."""
    update_of: Mapping[int, int] = field(default_factory=dict)
    """The same for one parameter (its value's id), where each is updated by itself, in the backward pass."""
    others: Mapping[Cause, int] = field(default_factory=dict)
    """Bytes of parameters that get no gradient in the graph but do in other steps: held gradients, state."""
    outside: int = 0
    """Bytes that a loss outside of the graph holds for a moment between the passes, beside outputs and tangents."""
    home: Home = field(default_factory=Home)
    """Device that the step runs on."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are there all the time. Not the gradients of the graph's parameters: where those are held, they
        are counted by the graph."""
        return self.state + sum(self.others.values())

    def by_cause(self) -> dict[Cause, int]:
        """Return the same, by cause."""
        found = dict(self.others)
        found["optimizer_state"] = found.get("optimizer_state", 0) + self.state
        return {cause: size for cause, size in found.items() if size}
