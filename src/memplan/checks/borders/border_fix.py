"""Compute the padding that keeps the border, and set it on the modules of a copy; weights never change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from memplan.checks.mended.changed_step import Change, ChangeError, module_at

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


@dataclass(slots=True)
class Padding:
    """The paddings that were set."""

    changes: dict[str, list[int] | str] = field(default_factory=dict)
    """Layer -> padding of each dimension, or "same"."""


def same_padding(kernel: int, stride: int, dilation: int) -> int:
    """Return the padding on each side with which the output has the input's size divided by the stride.

    A kernel covers ``(kernel - 1) * dilation + 1`` pixels: half of what exceeds its stride is the padding on each side,
    rounded up.
    """
    return math.ceil(max(0, (kernel - 1) * dilation - (stride - 1)) / 2)


def padded(layers: Sequence[str], applied: Padding) -> Change:
    """Return a change that pads the convolutions and pools among these layers and enters the padding in ``applied``."""

    def change(modules: dict[str, nn.Module]) -> None:
        applied.changes.clear()
        for path in layers:
            module = module_at(modules, path)
            if isinstance(module, (*_CONVOLUTIONS, *_POOLS)):
                applied.changes[path] = _pad(module)
        if not applied.changes:
            raise ChangeError("no convolution and no pool among the layers")

    return change


def _pad(module: nn.Module) -> list[int] | str:
    """Set the padding that keeps the border on a convolution or pool and return it; "same" for even kernels, which need
    more on one side."""
    count = int(type(module).__name__[-2])  # ...1d, 2d, 3d
    kernel, stride, dilation = (
        _each(getattr(module, name, 1), count) for name in ("kernel_size", "stride", "dilation")
    )
    uneven = any((k - 1) * d % 2 and s == 1 for k, s, d in zip(kernel, stride, dilation, strict=True))
    if isinstance(module, _CONVOLUTIONS):
        if uneven and set(stride) == {1}:
            module.padding = "same"
            total = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
            sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
        else:
            padding = tuple(map(same_padding, kernel, stride, dilation))
            module.padding = padding
            sides = [side for amount in reversed(padding) for side in (amount, amount)]
        if module.padding_mode != "zeros":
            module._reversed_padding_repeated_twice = sides  # the layer derives it from its padding when created
        return module.padding if isinstance(module.padding, str) else list(module.padding)
    padding = tuple(min(same_padding(k, s, d), k // 2) for k, s, d in zip(kernel, stride, dilation, strict=True))
    setattr(module, "padding", padding)  # noqa: B010  # the classes of pools declare it with different types
    return list(padding)


def _each(value: object, count: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (int(value),) * count  # pyright: ignore[reportArgumentType]  # a whole number
