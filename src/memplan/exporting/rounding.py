"""Frozen weights rounded to eight bits in a model: what the device computes with, and how far its outputs move."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.exporting.source.step_layout import Memory, tensors_of
from memplan.planning.request import Request


@dataclass(frozen=True, slots=True)
class Rounding(Printed):
    """What eight bits change."""

    weights: int
    """Number of weights in eight bits."""
    saved: int
    """Bytes of flash that these take less than in float32, their scales counted."""
    kept: tuple[str, ...]
    """Frozen parameters that stay in float32: vectors, and those that another op than a product reads."""
    forward_error: float
    """Norm of the outputs' change, in shares of the outputs' norm: in evaluation mode, for the inputs as given."""

    def __str__(self) -> str:
        return (
            f"{self.weights} frozen weights in eight bits, {format_bytes(self.saved)} less; the outputs move by "
            f"{self.forward_error:.2%} of their norm"
        )


def round_frozen(asked: Request, memory: Memory) -> Rounding:
    """Put what the device computes with into the model, and measure what that changes, in float64."""
    before = _output(asked)
    tensors = tensors_of(asked)
    with torch.no_grad():
        for path, one in memory.quantized.items():
            tensors[path].copy_(torch.from_numpy(one.floats))
    error = float((_output(asked) - before).norm() / before.norm().clamp_min(torch.finfo(before.dtype).tiny))
    weights, scales = memory.floats("int8"), memory.floats("scales")
    kept = tuple(one.path for one in memory.frozen if isinstance(tensors[one.path], nn.Parameter))
    return Rounding(weights, 4 * weights - (weights + 4 * scales), kept, error)


def _output(asked: Request) -> torch.Tensor:
    """Return what the model computes of the inputs."""
    model: nn.Module = copy.deepcopy(asked.model).double().eval()
    tensors = [one.double() if one.is_floating_point() else one for one in asked.call.tensors]
    args, kwargs = asked.call.rebuild(tensors)
    with torch.no_grad():
        return model(*args[: len(args) - getattr(asked.step, "targets", 0)], **kwargs)
