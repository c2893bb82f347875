"""Memory on the device that the joint graph does not contain: optimizer state, other gradients, the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memplan.planning.graph.placement import Home
from memplan.trace.records import Cause


@dataclass(frozen=True, slots=True)
class OutsideMemory:
    """Memory on the device in addition to the graph's values, and the device itself."""

    state_bytes: int = 0
    """Bytes of optimizer state for the parameters that get a gradient in the graph."""
    update_bytes: int = 0
    """Bytes that the optimizer allocates while it updates all parameters after the backward pass."""
    update_by_parameter: Mapping[int, int] = field(default_factory=dict)
    """By parameter (its value's id): the same if each parameter is updated by itself, in the backward pass."""
    other_bytes: Mapping[Cause, int] = field(default_factory=dict)
    """Gradients and optimizer state of parameters that get gradients in other steps only, and libraries' workspaces."""
    loss_bytes: int = 0
    """Bytes that a loss outside of the graph allocates between the passes, in addition to outputs and tangents."""
    home: Home = field(default_factory=Home)
    """Device that the step runs on."""
    packed_half_bytes: int = 0
    """Bytes of ``state_bytes`` that are low halves of master weights."""
    moment_bytes_saved: int = 0
    """Bytes by which moments in 8 bits make ``state_bytes`` smaller than the optimizer's own moments."""
    moments_fit_8_bits: bool = False
    """Whether ``state_bytes`` has the moments of an optimizer that has a counterpart with moments in 8 bits."""
    workspace_by_op: Mapping[int, int] = field(default_factory=dict)
    """Bytes of libraries' workspaces in ``other_bytes``, by index of the op whose first run allocates them: where a
    block lies, and so what the allocator reserves, depends on when it is allocated. Counts of live bytes have them from
    the step's begin on."""
    addresses: Mapping[int, int] = field(default_factory=dict)
    """Addresses of the resident values that lie in ``home.occupied``, by value."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are live throughout the step. The graph itself counts the gradients of its parameters."""
        return self.state_bytes + sum(self.other_bytes.values())

    def by_cause(self) -> dict[Cause, int]:
        """Return ``held_bytes`` by cause, without zeros."""
        sizes = dict(self.other_bytes)
        sizes["optimizer_state"] = sizes.get("optimizer_state", 0) + self.state_bytes
        return {cause: size for cause, size in sizes.items() if size}
