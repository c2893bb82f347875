"""What an export is made of: tensors in RAM and in flash, and the two passes that run on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memplan.exporting.arena.lifetimes import Lifetimes
from memplan.exporting.arena.offsets import Placement
from memplan.exporting.lowering.device_graph import DeviceGraph
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.planning.schedule.scheduler import Schedule


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is there from step to step."""

    path: str
    """Name in the model."""
    shape: tuple[int, ...]
    offset: int
    """First element of it among those of its kind."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Memory:
    """Tensors that are there from step to step, by where they lie."""

    trained: tuple[Held, ...]
    """In RAM: parameters that are updated."""
    statistics: tuple[Held, ...]
    """In RAM: buffers that change."""
    frozen: tuple[Held, ...]
    """In flash."""
    values: Mapping[str, np.ndarray]
    """Elements of each when the device starts, by name."""

    @property
    def weights(self) -> tuple[Held, ...]:
        """Tensors that a weights file holds, in its order."""
        return (*self.trained, *self.statistics)

    def floats(self, kind: str) -> int:
        """Return the elements of one kind: trained, statistics, frozen."""
        return sum(one.size for one in getattr(self, kind))


@dataclass(frozen=True)
class Pass:
    """One function of the export: its schedule, and where everything lies."""

    device: DeviceGraph
    schedule: Schedule
    lifetimes: Lifetimes
    placement: Placement
    inputs: Mapping[int, str]
    """Name of the C argument of each input, by value."""


@dataclass(frozen=True)
class StepLayout:
    """All that the C files are written from."""

    name: str
    memory: Memory
    rules: UpdateRules
    step: Pass
    infer: Pass
    output: tuple[int, ...]
    """Shape of what `infer` writes."""

    @property
    def arena(self) -> int:
        """Bytes of the arena: that of the larger pass."""
        return max(self.step.placement.bytes, self.infer.placement.bytes, 4)

    @property
    def state(self) -> int:
        """Bytes of RAM beside the arena: weights, what the optimizer holds, statistics, and a few numbers."""
        trained, statistics = self.memory.floats("trained"), self.memory.floats("statistics")
        numbers = 3 + sum(len(group.logarithms) for group in self.rules.groups)
        return 4 * (trained * (1 + self.rules.floats) + statistics + numbers)
