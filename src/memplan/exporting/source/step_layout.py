"""What an export is made of: tensors in RAM and in flash, and the two passes that run on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from memplan.errors import InputError
from memplan.exporting.arena.lifetimes import Lifetimes
from memplan.exporting.arena.offsets import Placement
from memplan.exporting.kernels.frozen_weights import Quantized
from memplan.exporting.lowering.device_graph import DeviceGraph
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.planning.request import Request
from memplan.planning.schedule.scheduler import Schedule


def tensors_of(asked: Request) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in the user's model; those of the loss in parentheses.

    Raises:
        InputError: a name of the model is one of the loss.
    """
    named = [*asked.step.named_parameters(), *asked.step.named_buffers()]
    found = {path if asked.step is asked.model else name_of(path): one for path, one in named}
    if len(found) < len(named):
        raise InputError(
            "A tensor of the model is named as one of the loss", expected="names of their own", do="Rename"
        )
    return found


def name_of(path: str) -> str:
    """Return the name of a tensor of model and loss together: of the loss, in parentheses."""
    return path.removeprefix("model.") if path.startswith("model.") else path.replace("loss.", "(loss).", 1)


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
    """In flash, in float32."""
    values: Mapping[str, np.ndarray]
    """Elements of each when the device starts, by name."""
    int8: tuple[Held, ...] = ()
    """In flash, in eight bits."""
    scales: tuple[Held, ...] = ()
    """Of these, under the same names: in flash, in float32."""
    quantized: Mapping[str, Quantized] = field(default_factory=dict)
    """What the weights in eight bits are, by name."""

    @property
    def weights(self) -> tuple[Held, ...]:
        """Tensors that a weights file holds, in its order."""
        return (*self.trained, *self.statistics)

    def floats(self, kind: str) -> int:
        """Return the elements of one kind: trained, statistics, frozen, scales, int8."""
        return sum(one.size for one in getattr(self, kind))

    @property
    def flash(self) -> int:
        """Bytes of all that the device starts with, and of what never changes."""
        floats = ("trained", "statistics", "frozen", "scales")
        return 4 * sum(map(self.floats, floats)) + self.floats("int8")


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
    weights_file: bool = False
    """Weights lie in a file of their own that the caller reads, not in NAME_weights.h."""

    @property
    def arena(self) -> int:
        """Bytes of the arena: that of the larger pass."""
        return max(self.step.placement.bytes, self.infer.placement.bytes, 4)

    @property
    def state(self) -> int:
        """Bytes of RAM beside the arena: weights, what the optimizer holds, statistics, and a few numbers; with a
        weights file, the four bytes that point to it."""
        trained, statistics = self.memory.floats("trained"), self.memory.floats("statistics")
        numbers = 3 + sum(len(group.logarithms) for group in self.rules.groups)
        return 4 * (trained * (1 + self.rules.floats) + statistics + numbers + self.weights_file)

    @property
    def constants(self) -> int:
        """Bytes of tensors that the model's code makes: they lie in the program."""
        return 4 * sum(array.size for of in (self.step, self.infer) for array in of.device.constants.values())
