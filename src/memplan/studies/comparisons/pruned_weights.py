"""Weights that were pruned to zero and are as large as before: dense tensors hold zeros like any other number."""

from __future__ import annotations

import math

import torch
from torch import nn

from memplan.studies.comparisons.comparison import Zeros
from memplan.trace.trace import Trace

LEAST = 0.05
"""The share of zeros from which on a weight counts as pruned: a padding row of an embedding is no pruning."""
ORIGINAL, MASK = "_orig", "_mask"
"""What `torch.nn.utils.prune` calls a weight and its mask."""


def zeros_of(model: nn.Module) -> tuple[Zeros, ...]:
    """Return the weights of a model that are zero in part, with their masks where they have one.

    A weight that is zero throughout was never trained, rather than pruned, and is left out.
    """
    found: list[Zeros] = []
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or parameter.is_meta or parameter.layout != torch.strided:
                continue
            base = name.removesuffix(ORIGINAL)
            mask = buffers.get(base + MASK) if base != name else None
            row = _zeros(path or type(model).__name__, base, module, parameter, mask)
            if row is not None:
                found.append(row)
    return tuple(found)


def _zeros(path: str, name: str, module: nn.Module, weight: torch.Tensor, mask: torch.Tensor | None) -> Zeros | None:
    empty = (weight if mask is None else mask).detach() == 0
    count = int(empty.sum())
    if mask is None and not LEAST <= count / max(1, weight.numel()) < 1:
        return None
    # a transposed convolution has its inputs' channels first
    across = 1 if "ConvTranspose" in type(module).__name__ else 0
    channels = weight.shape[across]
    whole = empty.transpose(0, across).reshape(channels, -1).all(1)
    held = 0 if mask is None else mask.numel() * mask.element_size()
    size = weight.numel() * weight.element_size()
    return Zeros(path, name, weight.numel(), count, size, held, channels, int(whole.sum()))


def masks_of(trace: Trace) -> tuple[Zeros, ...]:
    """Return the masked weights of a recorded step, by their names. How many zeros they hold, no recording has."""
    by_name = {storage.name: storage for storage in trace.counted if storage.cause in ("weight", "buffer")}
    found: list[Zeros] = []
    for name, weight in by_name.items():
        base = name.removesuffix(ORIGINAL)
        mask = by_name.get(base + MASK)
        if base == name or mask is None or len(weight.shape) < 2:
            continue
        layer, _, own = base.rpartition(".")
        found.append(Zeros(layer, own, math.prod(weight.shape), None, weight.bytes, mask.bytes, weight.shape[0], None))
    return tuple(found)
