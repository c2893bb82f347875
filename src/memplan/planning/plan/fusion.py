"""The kernels of a fused step, and the bytes they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan._bytes import format_bytes
from memplan.planning.graph.joint_graph import Phase

Bound = Literal["bandwidth", "compute"]


@dataclass(frozen=True, slots=True)
class Group:
    """Part of the step that a kernel computes in a single launch."""

    kernel: str
    """Its name in the generated code; for torch's own kernels, the op."""
    fused: bool
    """Whether Inductor wrote it."""
    phase: Phase
    ops: tuple[str, ...]
    """Ops of the planned step that it computes, wholly or in part, in order."""
    layers: tuple[str, ...]
    where: str | None
    """``file:line`` of the first of them in the user's code."""
    bytes: int
    flops: int
    intensity: float
    """FLOPs per byte."""
    bound: Bound
    """The limiting resource on the device: memory bandwidth, or compute."""


@dataclass(frozen=True)
class Fusion:
    """Forward and backward pass of a step as fused kernels."""

    device: str
    """Device whose rates determine ``Group.bound``."""
    kernels_before: int
    kernels_after: int
    bytes_before: int
    """Read and written in a step."""
    bytes_after: int
    groups: tuple[Group, ...]
    """Kernels in the order in which they run."""

    @property
    def bound_bytes(self) -> int:
        """Bytes that the groups bound by bandwidth read and write."""
        return sum(group.bytes for group in self.groups if group.bound == "bandwidth")

    @property
    def summary(self) -> str:
        """A summary in a single line."""
        before, after = format_bytes(self.bytes_before), format_bytes(self.bytes_after)
        text = f"kernels {self.kernels_before} -> {self.kernels_after}, bytes moved {before} -> {after} a step"
        if not self.bytes_after:
            return text
        return f"{text}; {100 * self.bound_bytes / self.bytes_after:.0f} % of what is left is bound by bandwidth"
