"""Zeros and masks among the weights of pruned models, which take as many bytes as any other dense weight."""

from __future__ import annotations

import math

import torch
from torch import nn

from memplan.studies.comparisons.comparison import Zeros
from memplan.trace.trace import Trace

LEAST = 0.05
"""Share of zeros from which on a weight counts as pruned; the padding row of an embedding stays below it."""
ORIGINAL, MASK = "_orig", "_mask"
"""Suffixes by which `torch.nn.utils.prune` names a weight and its mask."""


def zeros_of(model: nn.Module) -> tuple[Zeros, ...]:
    """Return the weights of a model that contain zeros, or have a pruning mask.

    Weights without a mask that are all zero are left out: they were never trained, rather than pruned.
    """
    rows: list[Zeros] = []
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or parameter.is_meta or parameter.layout != torch.strided:
                continue
            base = name.removesuffix(ORIGINAL)
            mask = buffers.get(base + MASK) if base != name else None
            row = _count_zeros(path or type(model).__name__, base, module, parameter, mask)
            if row is not None:
                rows.append(row)
    return tuple(rows)


def _count_zeros(
    path: str, name: str, module: nn.Module, weight: torch.Tensor, mask: torch.Tensor | None
) -> Zeros | None:
    """Count the zeros of a weight, or of its mask; None if it does not count as pruned."""
    is_zero = (weight if mask is None else mask).detach() == 0
    count = int(is_zero.sum())
    if mask is None and not LEAST <= count / max(1, weight.numel()) < 1:
        return None
    # the weight of a transposed convolution is (in_channels, out_channels, ...)
    channel_dim = 1 if "ConvTranspose" in type(module).__name__ else 0
    channels = weight.shape[channel_dim]
    empty_channels = int(is_zero.transpose(0, channel_dim).reshape(channels, -1).all(1).sum())
    mask_bytes = 0 if mask is None else mask.numel() * mask.element_size()
    size = weight.numel() * weight.element_size()
    return Zeros(path, name, weight.numel(), count, size, mask_bytes, channels, empty_channels)


def masks_of(trace: Trace) -> tuple[Zeros, ...]:
    """Return the masked weights of a recorded step, found by name. A recording has no values to count zeros in."""
    by_name = {storage.name: storage for storage in trace.counted if storage.cause in ("weight", "buffer")}
    rows: list[Zeros] = []
    for name, weight in by_name.items():
        base = name.removesuffix(ORIGINAL)
        mask = by_name.get(base + MASK)
        if base == name or mask is None or len(weight.shape) < 2:
            continue
        layer, _, weight_part = base.rpartition(".")
        rows.append(
            Zeros(
                layer, weight_part, elements=math.prod(weight.shape), zeros=None, bytes=weight.bytes,
                mask_bytes=mask.bytes, channels=weight.shape[0], empty_channels=None,
            )
        )  # fmt: skip
    return tuple(rows)
