"""Train in weights of eight bits: which optimizers can, the updates in PyTorch, and what the rounding does.

A weight is ``scale * q`` with integers q from -127 to 127 and a scale for each output channel, which stays as it is.
With regard to q the loss has the gradient ``scale * g``, where g is that of the real weight. Such a gradient is too
small beside q: the ratio of their norms is ``scale ** 2`` times that of g and the real weight. So it is divided by
``scale ** 2``, which is quantization-aware scaling (Lin et al., On-Device Training Under 256KB Memory, NeurIPS 2022):
an update of q by ``rate * g / scale`` is the update of the real weight by ``rate * g``.

Updates are mostly smaller than a step of q, and rounding to the nearest would drop them. They are rounded up with the
probability of the fraction, so that their mean is exact (Gupta et al., Deep Learning with Limited Numerical Precision,
ICML 2015). No remainder has to be kept, which would take the memory that eight bits save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from memplan._display import Printed
from memplan._text import counted
from memplan.errors import InputError
from memplan.exporting.optimizer_rules import OPTIMIZER_KINDS, UpdateRules
from memplan.exporting.source.step_layout import Memory, tensors_of
from memplan.planning.request import Request

LARGEST_INT8 = 127
"""Largest magnitude of a weight; -128 is not used."""
DO = "Use optimizer='sgd:lr=0.01', or train in float32: leave out trained_weights='int8'"


@dataclass(frozen=True, slots=True)
class Int8Weight(Printed):
    """A weight that is trained in eight bits, over the recorded steps."""

    name: str
    elements: int
    rounding: float
    """Norm of what rounding to eight bits changed before the first step, relative to that of the weight."""
    step: float
    """Mean of how far an update moves an element, in steps of the integers: 1 is from an integer to the next."""
    at_bound: float
    """Share of elements that are -127 or 127 after the last step: they cannot grow."""

    def __str__(self) -> str:
        return f"{self.name}: rounded by {self.rounding:.2%}, updates of {self.step:.2g} steps"


@dataclass(frozen=True)
class Int8Trained(Printed):
    """The effect of training in weights of eight bits."""

    DERIVED: ClassVar[tuple[str, ...]] = ("elements", "worst")

    weights: tuple[Int8Weight, ...]
    steps: int
    """Number of recorded steps."""
    loss: float
    """Mean loss of the recorded steps with weights in float32."""
    int8_loss: float
    """The same in eight bits."""

    @property
    def elements(self) -> int:
        """Number of weights in eight bits."""
        return sum(weight.elements for weight in self.weights)

    @property
    def worst(self) -> float:
        """Largest relative change of a weight by rounding."""
        return max(weight.rounding for weight in self.weights)

    def __str__(self) -> str:
        return (
            f"{counted(self.elements, 'weight')} trained in eight bits, rounded by at most {self.worst:.2%}; the mean "
            f"loss of {counted(self.steps, 'step')} moves from {self.loss:.4g} to {self.int8_loss:.4g}"
        )


def check_rules(rules: UpdateRules) -> None:
    """Check that an optimizer can train weights of eight bits.

    Raises:
        InputError: it keeps numbers in float32 for each weight.
    """
    reason, kind = "", OPTIMIZER_KINDS.get(rules.kind, "") if isinstance(rules.kind, type) else ""
    if kind != "sgd":
        reason = f"{getattr(rules.kind, '__name__', rules.kind)} keeps moments in float32"
    elif rules.arrays:
        reason = "momentum is an array in float32"
    elif rules.gradients.accumulate > 1:
        reason = f"accumulate={rules.gradients.accumulate} adds gradients up in float32"
    elif rules.gradients.clip_norm is not None:
        reason = "clip_norm needs all gradients, in float32, before the first update"
    if reason:
        raise InputError(
            f"trained_weights='int8': {reason}, which takes four times the memory of the weights or more",
            expected="SGD without momentum, one update a call, gradients as they are or clipped by value", do=DO,
        )  # fmt: skip


def check_any(memory: Memory) -> None:
    """Check that a weight is trained in eight bits.

    Raises:
        InputError: none is.
    """
    if not memory.trained_int8:
        names = [tensor.path for tensor in memory.trained]
        others = f" and {counted(len(names) - 3, 'more')}" if len(names) > 3 else ""
        raise InputError(
            f"trained_weights='int8', and what is trained stays in float32: {', '.join(names[:3])}{others}",
            expected="a weight that convolutions, linear layers or embeddings alone read",
            do="Leave out trained_weights='int8', or train such a weight",
        )  # fmt: skip


def rounded_weights(request: Request, memory: Memory) -> dict[str, torch.Tensor]:
    """Replace the model's weights that are trained in eight bits by what the device begins with; return the float32
    elements that they had, by name."""
    tensors, before = tensors_of(request), dict[str, torch.Tensor]()
    with torch.no_grad():
        for weight in memory.trained_int8:
            before[weight.path] = tensors[weight.path].detach().clone()
            tensors[weight.path].copy_(torch.from_numpy(memory.quantized[weight.path].floats))
    return before


@dataclass(frozen=True)
class Int8Update:
    """The update of one weight in one step."""

    name: str
    integers: np.ndarray
    """Integers before the update, in int64."""
    decrease: np.ndarray
    """What the update subtracts from them, before rounding, in float64."""
    random_fractions: np.ndarray
    """Random numbers from 0 to 1, in float64: they decide whether a fraction is rounded up."""
    scales: np.ndarray
    """Of the integers, in float64; it broadcasts with the others."""

    def integers_after(self, error: float | np.ndarray = 0.0) -> np.ndarray:
        """Return the integers after the update if it subtracted `error` less. `error` is in steps of the integers."""
        updated = self.integers + np.floor(self.random_fractions - self.decrease + error).astype(np.int64)
        return np.clip(updated, -LARGEST_INT8, LARGEST_INT8)


def int8_updates(
    memory: Memory, rules: UpdateRules, named: Mapping[str, torch.Tensor], random: int, step: int
) -> Iterator[Int8Update]:
    """Yield the update of each weight in eight bits by its gradient.

    Args:
        memory: of the export.
        rules: of its optimizer.
        named: parameters with their gradients, which are clipped already.
        random: state of the device's random numbers.
        step: number of the step, from 1 on.
    """
    for weight in memory.trained_int8:
        options, parameter = rules.options[rules.group_of[weight.path]], named[weight.path]
        assert parameter.grad is not None, "it is trained"
        scales = memory.quantized[weight.path].scales.astype(np.float64).reshape(-1, *[1] * (len(weight.shape) - 1))
        real, gradient = (tensor.detach().double().numpy() for tensor in (parameter, parameter.grad))
        gradient = -gradient if options.get("maximize") else gradient
        change = float(options["lr"]) * (gradient + float(options["weight_decay"]) * real) / scales
        indices = np.arange(weight.offset, weight.offset + weight.size, dtype=np.uint32).reshape(weight.shape)
        before = np.rint(real / scales).astype(np.int64)
        yield Int8Update(weight.path, before, change, random_fractions(random, step, indices), scales)


def random_fractions(random: int, step: int, indices: np.ndarray) -> np.ndarray:
    """Return the device's random numbers from 0 to 1 in a step, for elements at these indices of the state's weights in
    eight bits.

    The hash is lowbias32 of C. Wellons (2018), in uint32; 24 bits of it are the fraction.
    """
    with np.errstate(over="ignore"):
        start = np.uint32((random + step * 0x9E3779B9) % 2**32)
        x = start + indices.astype(np.uint32) * np.uint32(0x85EBCA6B)
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
        x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
        x = x ^ x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float64) / 2**24


class Int8Updates:
    """Updates weights of eight bits of a model in PyTorch, as the device does, and measures the updates."""

    def __init__(self, memory: Memory, rules: UpdateRules) -> None:
        self.memory, self.rules = memory, rules
        self.mean_update_sums: dict[str, float] = {}
        """By weight: sum over the steps of the mean magnitude of its update, in steps of the integers."""

    def apply(self, named: Mapping[str, torch.Tensor], random: int, step: int) -> None:
        """Update the weights by their gradients, and remove these, so that the optimizer leaves the weights alone."""
        with torch.no_grad():
            for change in int8_updates(self.memory, self.rules, named, random, step):
                parameter = named[change.name]
                parameter.copy_(torch.from_numpy(change.scales * change.integers_after()))
                parameter.grad = None
                self.mean_update_sums[change.name] = self.mean_update_sums.get(change.name, 0.0) + float(
                    np.abs(change.decrease).mean()
                )

    def disturb(self, named: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        """Move one in a thousand of the integers by one, or a single one: as other roundings of updates would."""
        with torch.no_grad():
            for tensor in self.memory.trained_int8:
                weight = named[tensor.path].reshape(-1)  # a view
                scales = torch.from_numpy(self.memory.quantized[tensor.path].scales).to(weight.dtype)
                indices = torch.randint(tensor.size, (max(tensor.size // 1000, 1),), generator=generator)
                elements_per_scale = tensor.size // tensor.shape[0]
                weight[indices] -= scales[indices // elements_per_scale] * weight[indices].sign()


def report(
    memory: Memory, before: Mapping[str, torch.Tensor], after: Mapping[str, np.ndarray],
    mean_update_sums: Mapping[str, float], losses: Any, int8_losses: Any,
) -> Int8Trained:  # fmt: skip
    """Return what training in eight bits did over the recorded steps.

    Args:
        memory: of the export.
        before: elements in float32 before they were rounded, by name.
        after: elements after the last step.
        mean_update_sums: by name, as of `Int8Updates`.
        losses: of the steps in float32.
        int8_losses: of the steps in eight bits.
    """
    weights, steps = list[Int8Weight](), len(losses)
    for tensor in memory.trained_int8:
        rounded, real = memory.quantized[tensor.path], before[tensor.path].double().numpy()
        scales = rounded.scales.astype(np.float64).reshape(-1, *[1] * (len(tensor.shape) - 1))
        error = float(np.linalg.norm(rounded.floats - real) / np.linalg.norm(real))
        at_bound = float((np.abs(np.rint(after[tensor.path] / scales)) == LARGEST_INT8).mean())
        mean_update = mean_update_sums[tensor.path] / steps
        weights.append(Int8Weight(tensor.path, tensor.size, rounding=error, step=mean_update, at_bound=at_bound))
    return Int8Trained(tuple(weights), steps, float(np.mean(losses)), float(np.mean(int8_losses)))
