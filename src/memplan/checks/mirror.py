"""Mirror-pad the input once by the border that a model loses: the interior of its output stays as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # torch's own name for it

from memplan.checks.fields.walk import Followed, Output


@dataclass(frozen=True, slots=True)
class Mirror:
    """Pixels to pad in front and behind for each spatial dimension, and which outputs stand on the input then."""

    pads: tuple[tuple[int, int], ...]
    crop: tuple[tuple[int, int], ...]
    """First output and number of outputs to keep, for each dimension."""
    reflects: bool
    """Whether the input is large enough to be mirrored; else its border is repeated."""


def mirrored(output: Output, followed: Followed) -> Mirror | None:
    """How to pad; None where the outputs cannot stand on the input's pixels (a stride that is no whole number).

    The padding is a whole number of the largest stride inside, so that every pixel falls on the same place of every
    stride as before.
    """
    pads: list[tuple[int, int]] = []
    crop: list[tuple[int, int]] = []
    for size, field in output.spatial:
        stride = field.stride(size)
        grid = _largest_stride(followed, field.source)
        before, after = (max(0, math.ceil(side)) for side in field.lost(size))
        front, back = (math.ceil(side / grid) * grid for side in (before, after))
        if stride <= 0 or grid < 1:
            return None
        pads.append((front, back))
        crop.append((max(0, math.floor((front - field.lost(size)[0]) / stride)), math.ceil(field.extent / stride)))
    reflects = all(max(pair) < field.extent for pair, (_, field) in zip(pads, output.spatial, strict=True))
    return Mirror(tuple(pads), tuple(crop), reflects)


def _largest_stride(followed: Followed, source: int) -> int:
    strides = [
        span.stride
        for results in followed.results.values()
        for fields in results
        for dim in fields
        for factor in dim
        for field in factor.axis
        if field.source == source and field.windowed
        for span in field.spans
    ]
    return math.ceil(max(strides, default=1))


class Mirrored(nn.Module):
    """A model that gets its first input mirror-padded, and gives the outputs that stand on the input itself.

    The weights are the model's own. An output that is no tensor, or has fewer dimensions than were padded, is given
    back as it is.

    Example:
        >>> model = Mirrored(model, mirror)
    """

    def __init__(self, model: nn.Module, mirror: Mirror) -> None:
        super().__init__()
        self.model, self.mirror = model, mirror

    def forward(self, image: torch.Tensor, *inputs: Any, **kwargs: Any) -> Any:
        """As the model's, with a padded first input."""
        amounts = [side for pair in reversed(self.mirror.pads) for side in pair]
        mode = "reflect" if self.mirror.reflects else "replicate"
        output = self.model(F.pad(image, amounts, mode), *inputs, **kwargs)
        if not isinstance(output, torch.Tensor) or output.dim() < 2 + len(self.mirror.crop):
            return output
        for place, (first, count) in enumerate(self.mirror.crop, start=output.dim() - len(self.mirror.crop)):
            output = output.narrow(place, first, min(count, output.shape[place] - first))
        return output
