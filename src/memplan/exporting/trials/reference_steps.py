"""What PyTorch computes for the recorded steps, in float64, and the errors that are fair.

Fair is what float32 does to the same steps, and what a change of the weights by a few roundings does. The latter sees
how far a step amplifies such a change (a norm over two samples), and that of an activation which is 0 but for rounding
another order of additions makes a ReLU's gradient all or nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memplan import _torch
from memplan.exporting.kernels.kernel_calls import threshold
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.step_layout import StepLayout
from memplan.planning.capture.loss_module import WithLoss, default_loss
from memplan.planning.request import Request

ROLL = 7
"""By so many elements the data is rolled from step to step, so that no two steps are the same."""
FAIR = 8.0
"""An error may be so many times that of PyTorch in float32: sums are added in another order."""
FEW_ROUNDINGS = 2.0**-20
"""Share of a weight by which it is changed: large enough that among all activations some change their sign."""
ROUNDING = 2.0**-19
"""And so many times the largest element of a tensor, where PyTorch is exact by chance."""


@dataclass(frozen=True)
class _Run:
    losses: np.ndarray
    weights: dict[str, np.ndarray]
    output: np.ndarray


def reference(asked: Request, layout: StepLayout, steps: int) -> Recorded:
    """Run so many steps of copies of the model: in float64, in float32, and changed a little."""
    double = _run(asked, layout, steps, torch.float64)
    others = [
        _run(asked, layout, steps, torch.float32),
        *(_run(asked, layout, steps, torch.float64, k) for k in (1, 2)),
    ]
    losses = [np.abs(other.losses - double.losses) for other in others]
    loss_bounds = FAIR * np.maximum.reduce(losses) + ROUNDING * np.maximum(np.abs(double.losses), 1.0)
    held = layout.memory.weights
    weights = np.concatenate([double.weights[one.path].reshape(-1) for one in held])
    bounds = [
        np.full(one.size, _bound(double.weights[one.path], [o.weights[one.path] for o in others])) for one in held
    ]
    graph = layout.step.device.graph
    numbers = {name: int(graph.values[value].path) for value, name in layout.step.inputs.items()}
    inputs = {name: _array(asked.call.tensors[number]) for name, number in numbers.items()}
    return Recorded(
        inputs, ROLL, double.losses.tolist(), np.maximum.accumulate(loss_bounds).tolist(), double.output,
        _bound(double.output, [other.output for other in others]), weights, np.concatenate(bounds),
    )  # fmt: skip


def _array(tensor: torch.Tensor) -> np.ndarray:
    found = tensor.detach().contiguous().numpy()
    return found.astype(np.float32 if tensor.is_floating_point() else np.int32)


def _bound(double: np.ndarray, others: Sequence[np.ndarray]) -> float:
    """Return the fair error of a tensor: the largest of the others', several times, and a few roundings."""
    error = max(float(np.max(np.abs(other - double), initial=0.0)) for other in others)
    return FAIR * error + ROUNDING * max(float(np.max(np.abs(double), initial=0.0)), 1.0)


def _run(asked: Request, layout: StepLayout, steps: int, dtype: torch.dtype, changed: int = 0) -> _Run:
    step, optimizer_of = copy.deepcopy(asked.step), asked.settings.optimizer
    assert optimizer_of is not None, "an export has one"
    step.to(dtype)
    model = step.model if isinstance(step, WithLoss) else step
    if changed:
        drawn = torch.Generator().manual_seed(changed)
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(1 + FEW_ROUNDINGS * (2 * torch.rand(one.shape, generator=drawn, dtype=one.dtype) - 1))
    optimizer = optimizer_of([one for one in model.parameters() if one.requires_grad])
    given = [one.detach().to(dtype) if one.is_floating_point() else one for one in asked.call.tensors]
    losses, draws, rolled = list[float](), _Draws(), given
    for at in range(steps):
        rolled = [one.reshape(-1).roll(-ROLL * at).reshape(one.shape) for one in given]
        args, kwargs = asked.call.rebuild(rolled)
        optimizer.zero_grad()
        with _torch.DrawsReplaced(draws.keep):
            loss = _scalar(step(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    prefix = "" if asked.step is asked.model else "model."
    weights = {
        one.path: named[f"{prefix}{one.path}"].detach().numpy().astype(np.float64) for one in layout.memory.weights
    }
    model.eval()
    args, kwargs = asked.call.rebuild(rolled)
    targets = getattr(asked.step, "targets", 0)
    with torch.no_grad():
        output = model(*args[: len(args) - targets], **kwargs)
    return _Run(np.array(losses), weights, output.numpy().astype(np.float64).reshape(-1))


def _scalar(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) and output.dim() == 0 else default_loss(output)


class _Draws:
    """The device's random numbers: Marsaglia's xorshift of 32 bits, from the seed 1."""

    def __init__(self) -> None:
        self.state = 1

    def keep(self, count: int, probability: float) -> torch.Tensor:
        """Draw which elements of a dropout stay; ``probability``: that one does."""
        below = threshold(1 - probability)
        return torch.tensor([draw >= below for draw in self._numbers(count)], dtype=torch.bool)

    def _numbers(self, count: int) -> Iterator[int]:
        x = self.state
        for _ in range(count):
            x ^= x << 13 & 0xFFFFFFFF
            x ^= x >> 17
            x ^= x << 5 & 0xFFFFFFFF
            yield x
        self.state = x
