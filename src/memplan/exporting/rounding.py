"""Round the frozen weights of a model to int8 as the device does, and measure the change of its outputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.exporting.source.step_layout import Memory, tensors_of
from memplan.exporting.step_outputs import device_step, flat_output
from memplan.planning.request import Request


@dataclass(frozen=True, slots=True)
class Rounding(Printed):
    """The effect of storing frozen weights as int8."""

    weights: int
    """Number of weights stored as int8."""
    saved: int
    """Bytes of flash saved against float32, with the scales counted."""
    kept: tuple[str, ...]
    """Frozen parameters that stay in float32: vectors, and those read by ops without int8 kernels."""
    forward_error: float
    """Norm of the outputs' change relative to that of the outputs, in evaluation mode on the step's inputs."""

    def __str__(self) -> str:
        return (
            f"{self.weights} frozen weights in eight bits, {format_bytes(self.saved)} less; the outputs move by "
            f"{self.forward_error:.2%} of their norm"
        )


def round_frozen(request: Request, memory: Memory) -> Rounding:
    """Replace weights of the model by their int8 roundings, and compare its outputs before and after in float64."""
    exact = _output(request)
    tensors = tensors_of(request)
    with torch.no_grad():
        for weight in memory.int8:
            tensors[weight.path].copy_(torch.from_numpy(memory.quantized[weight.path].floats))
    error = (_output(request) - exact).norm() / exact.norm().clamp_min(torch.finfo(exact.dtype).tiny)
    weights, scales = memory.elements("int8"), sum(weight.shape[0] for weight in memory.int8)
    float32_bytes, int8_bytes = 4 * weights, weights + 4 * scales
    in_float32 = tuple(tensor.path for tensor in memory.frozen if isinstance(tensors[tensor.path], nn.Parameter))
    return Rounding(weights, saved=float32_bytes - int8_bytes, kept=in_float32, forward_error=float(error))


def _output(request: Request) -> torch.Tensor:
    """Return the model's outputs on the step's inputs, in float64 and evaluation mode."""
    step = copy.deepcopy(device_step(request)).double()
    step.model.eval()
    tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in request.call.tensors]
    args, kwargs = request.call.rebuild(tensors)
    with torch.no_grad():
        return torch.from_numpy(flat_output(step.model_output(*args, **kwargs)))
