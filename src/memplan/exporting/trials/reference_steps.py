"""Run the steps of an export in PyTorch in float64, and bound the errors that float32 may have.

The bounds come from running the same steps in float32, as they are and with weights changed by a few rounding errors.
The latter shows how much a step amplifies such a change, as a norm over two samples does, and covers activations that
are 0 but for rounding, where another order of additions flips the gradient of a ReLU. It is in float32, too: where a
gradient is 0 but for rounding, as that of a bias before a batch norm, Adam makes whole steps of it, and of one run a
loss may be near by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memplan import _torch
from memplan.errors import InputError
from memplan.exporting.frozen_int8 import Int8Pass, Int8Step
from memplan.exporting.int8_training import Int8Trained, Int8Updates, report
from memplan.exporting.kernels.kernel_calls import dropout_threshold
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.step_layout import StepLayout, name_of
from memplan.exporting.step_outputs import WithOutputs, device_step, flat_output
from memplan.planning.request import Request

ROLL_ELEMENTS = 7
"""Elements by which the inputs are rolled from step to step, so that no two steps are the same."""
ERROR_RATIO = 8.0
"""Errors of the C code may be this many times those of PyTorch in float32, since sums are added in another order."""
WEIGHT_NOISE = 2.0**-20
"""Relative change of weights: large enough that some activations change their sign."""
ROUNDING_ERROR = 2.0**-19
"""Error allowed besides, relative to a tensor's largest element, where PyTorch happens to be exact."""


@dataclass(frozen=True)
class _Run:
    """Results of steps of PyTorch."""

    losses: np.ndarray
    """Of each step."""
    weights: dict[str, np.ndarray]
    """By name, after the last step."""
    step_output: np.ndarray
    """What the model returned in the last step."""
    evaluated: np.ndarray
    """The loss in evaluation mode afterwards."""
    output: np.ndarray
    """What the model returns in evaluation mode afterwards."""
    sums: dict[str, float]
    """Of `Int8Updates`."""


def int8_losses(
    request: Request, layout: StepLayout, steps: int, frozen: Int8Step | None, before: Mapping[str, torch.Tensor]
) -> Int8Trained:
    """Run the steps with weights in eight bits and in float32, and return what the former does.

    ``before``: elements in float32 before they were rounded, by name.
    """
    in_int8 = _run(request, layout, steps, torch.float32, frozen)
    in_float32 = _run(request, layout, steps, torch.float32, frozen, before=before)
    return report(layout.memory, before, in_int8.weights, in_int8.sums, in_float32.losses, in_int8.losses)


def run_reference_steps(request: Request, layout: StepLayout, steps: int, frozen: Int8Step | None = None) -> Recorded:
    """Run training steps of copies of the model in PyTorch, as the C test repeats them. Returns inputs, float64
    results, and bounds of the error that float32 may have: they come from runs in float32 and with slightly changed
    weights. Of a frozen part in eight bits, PyTorch's ops read the results in place of their own.

    Raises:
        InputError: the steps diverge in PyTorch.
    """
    double = _run(request, layout, steps, torch.float64, frozen)
    others = [_run(request, layout, steps, torch.float32, frozen, seed) for seed in (0, 1, 2)]
    _check_finite((double, *others), layout)
    loss_errors = [np.abs(other.losses - double.losses) for other in others]
    loss_bounds = ERROR_RATIO * np.maximum.reduce(loss_errors) + ROUNDING_ERROR * np.maximum(np.abs(double.losses), 1.0)
    tensors = layout.memory.weights
    weights = np.concatenate([double.weights[tensor.path].reshape(-1) for tensor in tensors])
    weight_bounds = [
        np.full(tensor.size, bound_of(double.weights[tensor.path], [other.weights[tensor.path] for other in others]))
        for tensor in tensors
    ]
    graph = layout.step.device.graph
    positions = {name: int(graph.values[value].path) for value, name in layout.step.inputs.items()}
    inputs = {name: _array(request.call.tensors[position]) for name, position in positions.items()}
    return Recorded(
        inputs=inputs,
        roll_elements=ROLL_ELEMENTS,
        losses=double.losses.tolist(),
        loss_bounds=np.maximum.accumulate(loss_bounds).tolist(),  # an error does not shrink in later steps
        step_output=double.step_output,
        step_output_bound=bound_of(double.step_output, [other.step_output for other in others]),
        evaluation_output=double.output,
        evaluation_output_bound=bound_of(double.output, [other.output for other in others]),
        evaluation_loss=float(double.evaluated),
        evaluation_loss_bound=bound_of(double.evaluated, [other.evaluated for other in others]),
        weights=weights,
        weight_bounds=np.concatenate(weight_bounds),
    )


def _check_finite(runs: Sequence[_Run], layout: StepLayout) -> None:
    """Raise InputError where losses, or the weights after the last step, are not finite in one of the runs."""
    accumulate = layout.rules.gradients.accumulate
    for run in runs:
        updates = (np.append(~np.isfinite(run.losses), True).argmax()) // accumulate
        loss = next((loss for loss in run.losses if not np.isfinite(loss)), None)
        if loss is None and all(np.isfinite(weights).all() for weights in run.weights.values()):
            continue
        if updates == 0:
            raise InputError(
                f"the loss is {loss} in PyTorch itself, before any update", expected="a finite loss",
                do="Look at the inputs and at the loss, as for a logarithm or a division",
            )  # fmt: skip
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(options["lr"] for options in layout.rules.options))
        what = "weights are not finite" if loss is None else f"the loss is {loss}"
        raise InputError(
            f"the step diverges in PyTorch itself: {what} after update {updates}, at learning rate {rates}, and the C "
            "code does the same", expected=f"{len(run.losses)} steps with a finite loss", do="Give a smaller lr",
        )  # fmt: skip


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return an input as the device reads it: bytes, float32 or int32."""
    array = tensor.detach().contiguous().numpy()
    return array if array.dtype in (np.uint8, np.int8) else array.astype("f4" if tensor.is_floating_point() else "i4")


def bound_of(double: np.ndarray, others: Sequence[np.ndarray], floor: float = 1.0) -> float:
    """Return the error bound of a tensor from its float64 elements and those of the other runs.

    ``floor``: the least magnitude of a largest element that a rounding error is relative to.
    """
    error = max(float(np.max(np.abs(other - double), initial=0.0)) for other in others)
    return ERROR_RATIO * error + ROUNDING_ERROR * max(float(np.max(np.abs(double), initial=0.0)), floor)


def replacing(
    run: Int8Pass | None, named: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> AbstractContextManager[None]:
    """Within this context a step of PyTorch reads what the device computes in eight bits; without such a pass, it is as
    it was."""
    return nullcontext() if run is None else run.int8_results_in_place(named, inputs, dtype)


def _run(
    request: Request, layout: StepLayout, steps: int, dtype: torch.dtype, frozen: Int8Step | None, seed: int = 0,
    before: Mapping[str, torch.Tensor] | None = None,
) -> _Run:  # fmt: skip
    """Run training steps of a copy of the model; a seed other than 0 changes the weights a little. With `before`, the
    weights of these names are trained in floats, from these elements on."""
    step = WithOutputs(copy.deepcopy(device_step(request))).to(dtype)
    model = step.model
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                noise = 2 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype) - 1
                weight.mul_(1 + WEIGHT_NOISE * noise)
    optimizer, gradients = layout.rules.optimizer(model), layout.rules.gradients
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    inputs = [tensor.detach().to(dtype) if tensor.is_floating_point() else tensor for tensor in request.call.tensors]
    named = {name_of(path): tensor for path, tensor in (*step.named_parameters(), *step.named_buffers())}
    updates = Int8Updates(layout.memory, layout.rules)
    if seed:
        updates.disturb(named, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for path, elements in (before or {}).items():
            named[path].copy_(elements)
    losses, random, rolled = list[float](), DeviceRandom(), inputs
    outputs: Any = []
    for k in range(steps):
        rolled = [tensor.reshape(-1).roll(-ROLL_ELEMENTS * k).reshape(tensor.shape) for tensor in inputs]
        args, kwargs = request.call.rebuild(rolled)
        int8_results = replacing(None if frozen is None else frozen.step, named, rolled, dtype)
        with _torch.DrawsReplaced(random.dropout_mask, dtype), int8_results:
            loss, outputs = step(*args, **kwargs)
        loss.backward()
        if (k + 1) % gradients.accumulate == 0:
            gradients.clip(trained)
            if before is None:
                updates.apply(named, random.state, k + 1)  # the optimizer updates the other weights
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = {tensor.path: named[tensor.path].detach().numpy().astype(np.float64) for tensor in layout.memory.weights}
    step_output = flat_output(outputs)
    model.eval()
    args, kwargs = request.call.rebuild(rolled)
    int8_results = replacing(None if frozen is None else frozen.infer, named, rolled, dtype)
    with torch.no_grad(), _torch.DrawsReplaced(random.dropout_mask, dtype), int8_results:
        if layout.has_evaluation_loss:
            loss, outputs = step(*args, **kwargs)
        else:
            loss, outputs = torch.zeros(()), step.step[0].model_output(*args, **kwargs)
    return _Run(
        np.array(losses), weights, step_output, loss.double().numpy(), flat_output(outputs), updates.mean_update_sums
    )


class DeviceRandom:
    """The device's random number generator: Marsaglia's 32-bit xorshift with the seed 1."""

    def __init__(self) -> None:
        self.state = 1
        """The last 32-bit number."""

    def dropout_mask(self, count: int, probability: float) -> torch.Tensor:
        """Return the mask of a dropout that keeps each of `count` elements with this probability."""
        drop_below = dropout_threshold(1 - probability)
        return torch.tensor([number >= drop_below for number in self._numbers(count)], dtype=torch.bool)

    def _numbers(self, count: int) -> Iterator[int]:
        """Yield the generator's next numbers, and keep its state for the next call."""
        x = self.state
        for _ in range(count):
            x ^= x << 13 & 0xFFFFFFFF
            x ^= x >> 17
            x ^= x << 5 & 0xFFFFFFFF
            yield x
        self.state = x
