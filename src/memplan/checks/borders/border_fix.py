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


def needs_uneven_padding(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Return whether a kernel of stride 1 covers an even number of pixels in a dimension: then padding that keeps the
    input's size is larger on one side."""
    return any((k - 1) * d % 2 and s == 1 for k, s, d in zip(kernel, stride, dilation, strict=True))


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
    """Set the padding that keeps the border on a convolution or pool and return it, by dimension or as "same".
    Convolutions with kernels of even size have "same": they need more padding on one side."""
    count = int(type(module).__name__[-2])  # ...1d, 2d, 3d
    kernel, stride, dilation = (
        _per_dimension(getattr(module, name, 1), count) for name in ("kernel_size", "stride", "dilation")
    )
    padding = tuple(map(same_padding, kernel, stride, dilation))
    if not isinstance(module, _CONVOLUTIONS):
        padding = tuple(min(amount, size // 2) for amount, size in zip(padding, kernel, strict=True))  # torch's limit
        setattr(module, "padding", padding)  # noqa: B010  # the classes of pools declare it with different types
        return list(padding)
    same = needs_uneven_padding(kernel, stride, dilation) and set(stride) == {1}
    module.padding = "same" if same else padding
    if module.padding_mode != "zeros":
        # the layer computes it when it is created: before and after the last dimension, then the one before, ...
        totals = [(k - 1) * d if same else 2 * amount for k, d, amount in zip(kernel, dilation, padding, strict=True)]
        sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        module._reversed_padding_repeated_twice = sides
    return "same" if same else list(padding)


def _per_dimension(value: object, count: int) -> tuple[int, ...]:
    """Return an argument such as ``kernel_size``, a number or a number for each dimension, as ``count`` numbers."""
    return tuple(value) if isinstance(value, (tuple, list)) else (int(value),) * count  # pyright: ignore[reportArgumentType]  # a whole number
