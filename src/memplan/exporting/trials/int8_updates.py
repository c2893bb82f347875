"""Check every update of weights in eight bits, step by step from the device's own weights.

Updates are rounded by chance, so a free run departs from PyTorch's as soon as one number falls on the other side: a
difference of float32's last bit moves a weight by a whole step, and all that follows. So each step of PyTorch begins
with the weights that the device had. Then each new integer is known exactly, but for those whose random number is as
near to the fraction of the update as float32's error.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch

from memplan import _torch
from memplan._display import Printed
from memplan.errors import VerificationError
from memplan.exporting.frozen_int8 import Int8Step
from memplan.exporting.int8_training import Int8Update, int8_updates
from memplan.exporting.source.step_layout import StepLayout, name_of
from memplan.exporting.step_outputs import WithOutputs, device_step
from memplan.exporting.trials.reference_steps import (
    ERROR_RATIO,
    ROLL_ELEMENTS,
    ROUNDING_ERROR,
    WEIGHT_NOISE,
    DeviceRandom,
    bound_of,
    replacing,
)
from memplan.planning.request import Request

DRAW_ERROR = 2.0**-22
"""Error of the device's sum of a random number and an update, which float32 rounds, relative to 1 and the update."""
MOST_UNDECIDED = 0.02
"""Largest share of updates for which float32's error allows several integers."""


@dataclass(frozen=True)
class UpdatesChecked(Printed):
    """The result of the check."""

    updates: int
    undecided: int
    """Updates whose rounding float32's error decides."""

    def __str__(self) -> str:
        return (
            f"all {self.updates:,} updates in eight bits are the reference's, integer by integer "
            f"(for {self.undecided:,} of them float32's error allows another)"
        )


@dataclass(frozen=True)
class _Step:
    """One step of PyTorch from given weights."""

    loss: float
    weights: dict[str, np.ndarray]
    """Weights in floats and statistics after the step."""
    changes: dict[str, Int8Update]
    """By name of a weight in eight bits."""


def check_updates(
    request: Request, layout: StepLayout, frozen: Int8Step | None, states: np.ndarray, losses: np.ndarray
) -> UpdatesChecked:
    """Compare each step of the device with one of PyTorch from the same weights.

    Args:
        request: of the export; its model has the weights that the device begins with.
        layout: of the export.
        frozen: the frozen part in eight bits.
        states: (steps, floats), what `get_weights` wrote after each step.
        losses: (steps,), as the device computed them.

    Raises:
        VerificationError: an update or a loss is not that of PyTorch.
    """
    steppers = [
        _Stepper(request, layout, frozen, dtype, seed)
        for dtype, seed in ((torch.float64, 0), (torch.float32, 0), (torch.float32, 1))
    ]
    weights_before, undecided, updates = None, 0, 0
    for k, (state, loss) in enumerate(zip(states, losses, strict=True)):
        double, *others = (stepper.step(k, weights_before) for stepper in steppers)
        bound = ERROR_RATIO * max(abs(other.loss - double.loss) for other in others) + ROUNDING_ERROR * max(
            abs(double.loss), 1.0
        )
        if not abs(loss - double.loss) <= bound:
            raise _differs(f"the loss of step {k} is {loss:.9g}", f"{double.loss:.9g} within {bound:.2g}")
        device_weights = _split(layout, state)
        for name, expected in double.weights.items():
            bound = bound_of(expected, [other.weights[name] for other in others])
            if not np.abs(device_weights[name] - expected).max(initial=0.0) <= bound:
                raise _differs(f"{name} after step {k}", f"PyTorch's within {bound:.2g}")
        for name, change in double.changes.items():
            error = _error(change, [other.changes[name] for other in others])
            lowest, highest = change.integers_after(-error), change.integers_after(error)
            integers = np.rint(device_weights[name] / change.scales).astype(np.int64)
            wrong = int(((integers < lowest) | (integers > highest)).sum())
            if wrong:
                raise _differs(
                    f"{wrong} of {integers.size} integers of {name} after step {k}", "those of the reference"
                )
            updates, undecided = updates + integers.size, undecided + int((lowest < highest).sum())
        weights_before = device_weights
    if undecided > MOST_UNDECIDED * updates:
        raise _differs(
            f"{undecided} of {updates} updates are within float32's error of two integers or more",
            f"at most {MOST_UNDECIDED:.0%}, as otherwise the comparison shows little",
        )
    return UpdatesChecked(updates, undecided)


def _error(change: Int8Update, others: list[Int8Update]) -> np.ndarray:
    """Return the error in steps that float32 may make of each change: for all elements of a tensor the largest of the
    real updates' errors, as elsewhere."""
    real = change.decrease * change.scales
    error = bound_of(real, [other.decrease * change.scales for other in others], floor=0.0)
    return error / change.scales + DRAW_ERROR * (1 + np.abs(change.decrease))


def _differs(found: str, expected: str) -> VerificationError:
    return VerificationError(found, expected=expected, do="Report it: the files are left for a look")


def _split(layout: StepLayout, state: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of what `get_weights` wrote, by name."""
    tensors = layout.memory.weights
    ends = np.cumsum([tensor.size for tensor in tensors])
    parts = np.split(state.astype(np.float64), ends[:-1])
    return {tensor.path: part.reshape(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)}


class _Stepper:
    """Runs single steps of a copy of the model; a seed other than 0 changes the weights a little."""

    def __init__(
        self, request: Request, layout: StepLayout, frozen: Int8Step | None, dtype: torch.dtype, seed: int
    ) -> None:
        self.request, self.layout, self.frozen, self.dtype, self.seed = request, layout, frozen, dtype, seed
        self.module = WithOutputs(copy.deepcopy(device_step(request))).to(dtype)
        """The copy, in ``dtype``."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        self.named = {name_of(path): tensor for path, tensor in named}
        """Its parameters and buffers, by name in the user's model."""
        self.optimizer = layout.rules.optimizer(self.module.model)
        self.random = DeviceRandom()
        """Draws the masks that the device draws."""
        self.inputs = [t.detach().to(dtype) if t.is_floating_point() else t for t in request.call.tensors]
        """Tensors of the call, floats in ``dtype``."""

    def step(self, k: int, weights: dict[str, np.ndarray] | None) -> _Step:
        """Run step `k` from these weights; None: those of the model."""
        with torch.no_grad():
            for name, elements in (weights or {}).items():
                self.named[name].copy_(torch.from_numpy(elements))
            exact = {tensor.path: self.named[tensor.path].clone() for tensor in self.layout.memory.trained_int8}
            if self.seed:
                generator = torch.Generator().manual_seed(self.seed + k)
                for weight in self.module.model.parameters():
                    noise = 2 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype) - 1
                    weight.mul_(1 + WEIGHT_NOISE * noise)
        rolled = [tensor.reshape(-1).roll(-ROLL_ELEMENTS * k).reshape(tensor.shape) for tensor in self.inputs]
        args, kwargs = self.request.call.rebuild(rolled)
        int8_results = replacing(None if self.frozen is None else self.frozen.step, self.named, rolled, self.dtype)
        self.optimizer.zero_grad()
        with _torch.DrawsReplaced(self.random.dropout_mask, self.dtype), int8_results:
            loss, _ = self.module(*args, **kwargs)
        loss.backward()
        rules, memory = self.layout.rules, self.layout.memory
        rules.gradients.clip([parameter for group in self.optimizer.param_groups for parameter in group["params"]])
        with torch.no_grad():
            for name, elements in exact.items():  # the noise is to change gradients, not integers
                self.named[name].copy_(elements)
        by_name = {change.name: change for change in int8_updates(memory, rules, self.named, self.random.state, k + 1)}
        for name in by_name:
            self.named[name].grad = None  # the optimizer updates the other weights
        self.optimizer.step()
        others = (*memory.trained, *memory.statistics)
        after = {tensor.path: self.named[tensor.path].detach().double().numpy().copy() for tensor in others}
        return _Step(loss.item(), after, by_name)
