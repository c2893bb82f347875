"""Mirror-pad the input by the border that a model loses, which leaves the interior of its output unchanged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # torch's own name for it

from memplan.checks.fields.walk import Followed, Output, canonical
from memplan.trace.records import View
from memplan.trace.trace import Trace

Crop = tuple[tuple[int, int], ...]
"""First position and number of positions to keep, for each spatial dimension."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """How to pad the image, and which part of the outputs covers the image itself then.

    Args:
        pads: pixels before and after, for each spatial dimension.
        size: of the image in these dimensions. Every input of this size is padded.
        crops: for each tensor that the model returns, in order; None for tensors without spatial dimensions.
        reflects: whether the image is large enough to be mirrored; else its border is repeated.
    """

    pads: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    crops: tuple[Crop | None, ...]
    reflects: bool


def mirrored(trace: Trace, output: Output, followed: Followed) -> Mirror | None:
    """Return how to mirror-pad a model's input so that an output (and others of the same call) covers it whole.

    The padding is a multiple of the largest stride inside, so that every pixel keeps its place in the grid of each
    stride. None if outputs have no place on the input's pixels: after a flip, or where positions cannot be traced.
    """
    spatial = output.spatial
    if followed.sources[spatial[0][1].source].op is not None or output in followed.last_traced.values():
        return None
    returned = _outputs_of_same_call(trace, output, followed)
    of_image = [other for other in returned if other is not None and _sources(other) == _sources(output)]
    if any(field.stride(size) <= 0 for other in of_image for size, field in other.spatial):
        return None  # flipped
    pads: list[tuple[int, int]] = []
    for dim, source in enumerate(_sources(output)):
        multiple = _largest_stride(followed, source)
        lost = [field.lost(size) for size, field in (other.spatial[dim] for other in of_image)]
        before, after = (max(0, *sides) for sides in zip(*lost, strict=True))
        pads.append((math.ceil(before / multiple) * multiple, math.ceil(after / multiple) * multiple))
    crops = tuple(_crop(other, pads) if other in of_image else None for other in returned)
    size = tuple(field.extent for _, field in spatial)
    reflects = all(max(pair) < extent for pair, extent in zip(pads, size, strict=True))  # as torch's "reflect" requires
    return Mirror(tuple(pads), size, crops, reflects)


def _outputs_of_same_call(trace: Trace, output: Output, followed: Followed) -> list[Output | None]:
    """Return all outputs of the model call of this one, in order; None for those without spatial dimensions."""
    spatial_outputs: dict[View, Output] = {canonical(other.view): other for other in followed.outputs if other.spatial}
    for returned in trace.returned:
        views = [canonical(view) for view in returned.tensors]
        if returned.layer == output.layer and canonical(output.view) in views:
            return [spatial_outputs.get(view) for view in views]
    return [output]


def _sources(output: Output) -> list[int]:
    """Return the numbers of the input's dimensions that the output's spatial dimensions see."""
    return [field.source for _, field in output.spatial]


def _crop(output: Output, pads: list[tuple[int, int]]) -> Crop:
    """Return the positions of an output that cover the image itself, without the padding. ``pads`` are the pixels
    before and after each spatial dimension."""
    crop: list[tuple[int, int]] = []
    for (pad_before, _), (size, field) in zip(pads, output.spatial, strict=True):
        stride, (lost_before, _) = field.stride(size), field.lost(size)
        first = max(0, math.floor((pad_before - lost_before) / stride))
        crop.append((first, math.ceil(field.extent / stride)))
    return tuple(crop)


def _largest_stride(followed: Followed, source: int) -> int:
    """Return the largest stride of any tensor of the step over this dimension of the input, rounded up to whole
    pixels."""
    strides = [
        span.stride
        for results in followed.results.values()
        for fields in results
        for dim in fields
        for factor in dim
        for field in factor.axis
        if field.source == source and field.is_spatial
        for span in field.spans
    ]
    return max(1, math.ceil(max(strides, default=1)))


Kind = Literal["tensor", "tuple", "list", "dict", "other"]


class Mirrored(nn.Module):
    """A model that mirror-pads its images and crops its outputs to the images themselves.

    The weights are the model's own. Every floating-point argument of the image's size is padded, whether positional, by
    name, or in a list or dictionary; every tensor of the output is cropped.

    Example:
        >>> model = Mirrored(model, mirror)
    """

    def __init__(self, model: nn.Module, mirror: Mirror) -> None:
        """``mirror``: how far to pad the images of ``model``, and how to crop its outputs."""
        super().__init__()
        self.model, self.mirror = model, mirror
        self.kind: Kind = "tensor"
        """Type of the last output."""
        self.names: tuple[str, ...] = ()
        """Keys of the tensors in the last output, as Python source: positions of a tuple, names of a dictionary."""
        self.padded: tuple[str, ...] = ()
        """Arguments that were padded in the last call: positions, or names."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model with padded images, and crop its outputs."""
        arguments = {**{str(position): value for position, value in enumerate(inputs)}, **named}
        self.padded = tuple(name for name, value in arguments.items() if any(map(self._is_image, _tensors(value))))
        inputs = tuple(_map_tensors(value, self._pad) for value in inputs)
        output = self.model(*inputs, **{name: _map_tensors(value, self._pad) for name, value in named.items()})
        self.kind, self.names = _kind_and_keys(output)
        crops = iter(self.mirror.crops)
        return _map_tensors(output, lambda tensor: _cropped(tensor, next(crops, None)))

    def _is_image(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is floating-point with the image's size in its last dimensions."""
        count = len(self.mirror.size)
        return tensor.is_floating_point() and tensor.dim() > count and tensor.shape[-count:] == self.mirror.size

    def _pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an image with its padding; other tensors unchanged."""
        if not self._is_image(tensor):
            return tensor
        amounts = [side for pair in reversed(self.mirror.pads) for side in pair]
        return F.pad(tensor, amounts, "reflect" if self.mirror.reflects else "replicate")


def _kind_and_keys(output: Any) -> tuple[Kind, tuple[str, ...]]:
    """Return the type of an output and the keys of its tensors as Python source (``'0'``, ``"'logits'"``). The type is
    "other" if tensors are nested deeper, or in a container of another class."""
    if isinstance(output, torch.Tensor):
        return "tensor", ()
    kinds: dict[type, Kind] = {tuple: "tuple", list: "list", dict: "dict"}
    kind = kinds.get(type(output))
    if kind is None:
        return "other", ()
    items = output.items() if isinstance(output, dict) else enumerate(output)
    keys = [key for key, value in items if isinstance(value, torch.Tensor)]
    flat = len(keys) == len(_tensors(output)) and all(isinstance(key, (str, int)) for key in keys)
    return kind if flat else "other", tuple(map(repr, keys))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses."""
    tensors: list[torch.Tensor] = []
    _map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # append returns None: the copy is as before
    return tensors


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a value with ``change`` applied to its tensors, within containers and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: _map_tensors(item, change) for name, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_map_tensors(item, change) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: _map_tensors(item, change) for name, item in fields.items()})
    return value


def _cropped(tensor: torch.Tensor, crop: Crop | None) -> torch.Tensor:
    """Return a tensor cropped in its last dimensions; unchanged without a crop."""
    if crop is None or tensor.dim() < len(crop):
        return tensor
    for dim, (first, count) in enumerate(crop, start=tensor.dim() - len(crop)):
        tensor = tensor.narrow(dim, first, min(count, tensor.shape[dim] - first))
    return tensor
