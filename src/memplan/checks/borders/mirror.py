"""Mirror-pad the input once by the border that a model loses: the interior of its output does not change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # torch's own name for it

from memplan.checks.fields.walk import Followed, Output, shown
from memplan.trace.records import View
from memplan.trace.trace import Trace

Crop = tuple[tuple[int, int], ...]
"""First position and number of positions to keep, for each spatial dimension."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """How to pad the image, and which part of the outputs stands on it then.

    Args:
        pads: pixels in front and behind for each spatial dimension.
        size: of the image in these dimensions: what has it is padded.
        crops: for each tensor that the model returns, in their order; None for one that has no positions.
        reflects: whether the image is large enough to be mirrored; else its border is repeated.
    """

    pads: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    crops: tuple[Crop | None, ...]
    reflects: bool


def mirrored(trace: Trace, output: Output, followed: Followed) -> Mirror | None:
    """Return how to pad for an output of a model; None where the outputs cannot stand on the input's pixels (a stride
    that is no whole number, a path that ends on the way).

    The padding is a whole number of the largest stride inside, so that every pixel falls on the same place of every
    stride as before.
    """
    spatial = output.spatial
    if followed.sources[spatial[0][1].source].op is not None or output in followed.ended.values():
        return None
    grids = [_largest_stride(followed, field.source) for _, field in spatial]
    beside = _returned_with(trace, output, followed)
    alike = [one for one in beside if one is not None and _sources(one) == _sources(output)]
    if any(field.stride(size) <= 0 for one in alike for size, field in one.spatial):
        return None
    pads: list[tuple[int, int]] = []
    for place, grid in enumerate(grids):
        sides = [field.lost(size) for size, field in (one.spatial[place] for one in alike)]
        front, back = (max(0, max(math.ceil(side[end] / grid) for side in sides)) * grid for end in (0, 1))
        pads.append((front, back))
    crops = tuple(_crop(one, pads) if one in alike else None for one in beside)
    reflects = all(max(pair) < field.extent for pair, (_, field) in zip(pads, spatial, strict=True))
    return Mirror(tuple(pads), tuple(field.extent for _, field in spatial), crops, reflects)


def _returned_with(trace: Trace, output: Output, followed: Followed) -> list[Output | None]:
    """Return the outputs that the model returned together with one, in order; None for what was not followed."""
    known: dict[View, Output] = {shown(one.view): one for one in followed.outputs if one.spatial}
    for returned in trace.returned:
        views = [shown(view) for view in returned.tensors]
        if returned.layer == output.layer and shown(output.view) in views:
            return [known.get(view) for view in views]
    return [output]


def _sources(output: Output) -> list[int]:
    return [field.source for _, field in output.spatial]


def _crop(output: Output, pads: list[tuple[int, int]]) -> Crop:
    """Return the positions that stand on the image itself."""
    found: list[tuple[int, int]] = []
    for (front, _), (size, field) in zip(pads, output.spatial, strict=True):
        stride = field.stride(size)
        found.append((max(0, math.floor((front - field.lost(size)[0]) / stride)), math.ceil(field.extent / stride)))
    return tuple(found)


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
    return max(1, math.ceil(max(strides, default=1)))


Kind = Literal["tensor", "tuple", "list", "dict", "other"]


class Mirrored(nn.Module):
    """A model whose images are mirror-padded, and whose outputs are cut to what stands on the images themselves.

    The weights are the model's own. Every floating-point argument that has the image's size is padded, whether given by
    position, by name, or in a list or dictionary; every tensor of the output is cropped, wherever it stands.

    Example:
        >>> model = Mirrored(model, mirror)
    """

    def __init__(self, model: nn.Module, mirror: Mirror) -> None:
        super().__init__()
        self.model, self.mirror = model, mirror
        self.kind: Kind = "tensor"
        """What the model returned last."""
        self.names: tuple[str, ...] = ()
        """Where its tensors stood, as Python writes it: positions of a tuple, names of a dictionary."""
        self.padded: tuple[str, ...] = ()
        """Which arguments were padded last: positions, or names."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model with padded images, and crop its outputs."""
        given = {**{str(number): value for number, value in enumerate(inputs)}, **named}
        self.padded = tuple(name for name, value in given.items() if any(map(self._is_image, _tensors(value))))
        inputs = tuple(_mapped(value, self._pad) for value in inputs)
        output = self.model(*inputs, **{name: _mapped(value, self._pad) for name, value in named.items()})
        self.kind, self.names = _kind(output)
        crops = iter(self.mirror.crops)
        return _mapped(output, lambda tensor: _cropped(tensor, next(crops, None)))

    def _is_image(self, tensor: torch.Tensor) -> bool:
        count = len(self.mirror.size)
        return tensor.is_floating_point() and tensor.dim() > count and tensor.shape[-count:] == self.mirror.size

    def _pad(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_image(tensor):
            return tensor
        amounts = [side for pair in reversed(self.mirror.pads) for side in pair]
        return F.pad(tensor, amounts, "reflect" if self.mirror.reflects else "replicate")


def _kind(output: Any) -> tuple[Kind, tuple[str, ...]]:
    """Return the kind of an output, and where its tensors stand in it: positions, or names."""
    kinds: dict[type, Kind] = {tuple: "tuple", list: "list", dict: "dict"}
    if isinstance(output, torch.Tensor) or type(output) not in kinds:
        return ("tensor" if isinstance(output, torch.Tensor) else "other"), ()
    items = output.items() if isinstance(output, dict) else enumerate(output)
    tensors = [name for name, value in items if isinstance(value, torch.Tensor)]
    plain = len(tensors) == len([*_tensors(output)]) and all(isinstance(name, (str, int)) for name in tensors)
    return (kinds[type(output)] if plain else "other"), tuple(map(repr, tensors))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(value, lambda tensor: found.append(tensor) or tensor)
    yield from found


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors changed, in lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: _mapped(item, change) for name, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_mapped(item, change) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: _mapped(item, change) for name, item in fields.items()})
    return value


def _cropped(tensor: torch.Tensor, crop: Crop | None) -> torch.Tensor:
    if crop is None or tensor.dim() < len(crop):
        return tensor
    for place, (first, count) in enumerate(crop, start=tensor.dim() - len(crop)):
        tensor = tensor.narrow(place, first, min(count, tensor.shape[place] - first))
    return tensor
