"""Random stacks of layers, and a probe that finds by gradients alone what their outputs see."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F  # torch's own name for it
from hypothesis import strategies as st
from torch import Tensor, nn

Sides = list[tuple[Fraction, Fraction]]

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_AVERAGE = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}

Layer = tuple[Any, ...]
"""A kind and its numbers."""


class Crop(nn.Module):
    """The last dimensions without some positions in front and behind; negative ones pad."""

    def __init__(self, front: int, behind: int, dims: int) -> None:
        super().__init__()
        self.amounts = (-front, -behind) * dims
        self.slices = front >= 0 and behind >= 0
        self.front, self.behind, self.dims = front, behind, dims

    def forward(self, x: Tensor) -> Tensor:
        if not self.slices:
            return F.pad(x, self.amounts)
        for dim in range(-self.dims, 0):
            x = x.narrow(dim, self.front, x.shape[dim] - self.front - self.behind)
        return x


class Branches(nn.Module):
    """Two ways that meet: the larger result is cropped to the smaller one's size, then added or concatenated."""

    def __init__(self, ways: Sequence[nn.Module], meet: str, place: float, dims: int) -> None:
        super().__init__()
        self.ways, self.meet, self.place, self.dims = nn.ModuleList(ways), meet, place, dims

    def forward(self, x: Tensor) -> Tensor:
        found = [way(x) for way in self.ways]
        for dim in range(-self.dims, 0):
            size = min(y.shape[dim] for y in found)
            found = [y.narrow(dim, int(self.place * (y.shape[dim] - size)), size) for y in found]
        return torch.stack(found).sum(0) if self.meet == "sum" else torch.cat(found, 1)


class Mix(nn.Module):
    """A convolution of kernel 1 that takes whatever channels there are to two."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, 2, *[-1] * self.dims)


def module_of(layers: Sequence[Layer], dims: int, *, probe: bool) -> nn.Module:
    """The stack; for the probe with average pools, whose gradient is nowhere 0, and all weights 1."""

    def one(layer: Layer) -> nn.Module:
        kind, *rest = layer
        if kind == "conv":
            kernel, stride, dilation, padding = rest
            return _CONV[dims](2, 2, kernel, stride, padding, dilation)
        if kind == "up":
            kernel, stride, padding, dilation = rest
            return _UP[dims](2, 2, kernel, stride, padding, dilation=dilation)
        if kind == "pool":
            kernel, stride, padding = rest
            return (_AVERAGE if probe else _MAX)[dims](kernel, stride, padding)
        if kind == "resize":
            return nn.Upsample(scale_factor=rest[0], mode=_LINEAR[dims] if rest[1] else "nearest")
        if kind == "crop":
            return Crop(rest[0], rest[1], dims)
        ways, meet, place = rest
        made = [module_of(way, dims, probe=probe) for way in ways]
        return nn.Sequential(Branches(made, meet, place, dims), Mix(dims))

    model = nn.Sequential(*map(one, layers))
    if probe:
        model = model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1 if parameter.dim() > 1 else 0)
    return model


def stacks(dims: int, most: int) -> st.SearchStrategy[list[Layer]]:
    """Stacks of up to so many layers that upsample at most once."""
    even = st.integers(1, 4)
    conv = st.builds(lambda k, s, d, p: ("conv", k, s, d, min(p, (k - 1) * d)), even, st.sampled_from([1, 1, 2, 3]),
                     st.sampled_from([1, 1, 2]), st.integers(0, 2))  # fmt: skip
    pool = st.builds(
        lambda k, s, p: ("pool", k, s, min(p, k // 2)), st.integers(2, 3), st.integers(1, 3), st.integers(0, 1)
    )
    crop = st.tuples(st.just("crop"), st.integers(-1, 2), st.integers(-1, 2))
    same = st.builds(lambda k, d, p: ("conv", k, 1, d, min(p, (k - 1) * d)), even, st.integers(1, 2), st.integers(0, 2))
    ways = st.lists(st.lists(same, max_size=2), min_size=2, max_size=3)
    branch = st.tuples(st.just("branches"), ways, st.sampled_from(["sum", "cat"]), st.sampled_from([0.0, 0.5, 1.0]))
    up = st.builds(lambda s, more, p: ("up", s + more, s, min(p, s + more - 1), 1), st.integers(1, 3),
                   st.integers(0, 2), st.integers(0, 1))  # fmt: skip
    resize = st.tuples(st.just("resize"), st.integers(2, 3), st.booleans())
    down = st.lists(st.one_of(conv, conv, pool, crop, branch), min_size=1, max_size=most)
    return st.builds(
        lambda before, bigger, after: [*before, *bigger, *after],
        down, st.lists(st.one_of(up, resize), max_size=1), st.lists(st.one_of(same, branch), max_size=1),
    )  # fmt: skip


def reach(layers: Sequence[Layer]) -> tuple[int, int, int]:
    """Bounds of the total stride down, of the upsampling, and of the field's size with all that can lie beyond it."""
    stride, up, width = 1, 1, 1
    for kind, *rest in layers:
        if kind == "conv":
            width += (rest[0] + 1) * rest[2] * stride
            stride *= rest[1]
        elif kind == "pool":
            width += (rest[0] + 1) * stride
            stride *= rest[1]
        elif kind == "crop":
            width += 4 * stride
        elif kind == "up":
            width += (rest[0] + 1) * stride
            up *= rest[1]
        elif kind == "resize":
            width += 4 * stride
            up *= rest[0]
        else:
            width += sum(reach(way)[2] for way in rest[0]) * stride
    return stride, up, width


def probed(model: nn.Module, size: int, dims: int, period: int) -> tuple[Sides, int]:
    """What is lost before and after in each dimension, by gradients of outputs in the interior; and the outputs' size.

    Over one period of outputs, the mean of the centres of what they see, and how far it moves with the next period,
    are extrapolated to the first and the last output.
    """
    x = torch.ones(1, 2, *[size] * dims, dtype=torch.double, requires_grad=True)
    y = model(x)
    sizes = y.shape[2:]
    found: Sides = []
    for dim in range(dims):
        middle = sizes[dim] // 2 // period * period
        centres = {o: _centre(x, y, dim, o, sizes) for o in range(middle - period, middle + period)}
        first = [centres[o] for o in range(middle - period, middle)]
        second = [centres[o] for o in range(middle, middle + period)]
        stride = (_mean(second) - _mean(first)) / period
        at_zero = _mean(first) - stride * (Fraction(2 * (middle - period) + period - 1, 2))
        margin = (stride - 1) / 2
        last = at_zero + stride * (sizes[dim] - 1)
        found.append((max(Fraction(0), at_zero - margin), max(Fraction(0), size - 1 - last - margin)))
    return found, sizes[0]


def _centre(x: Tensor, y: Tensor, dim: int, place: int, sizes: Sequence[int]) -> Fraction:
    index = [place if other == dim else size // 2 for other, size in enumerate(sizes)]
    (gradient,) = torch.autograd.grad(y[(0, 0, *index)], x, retain_graph=True)
    seen = gradient[0].abs().sum(0)
    line = seen.sum([other for other in range(seen.dim()) if other != dim]) if seen.dim() > 1 else seen
    places = line.nonzero().flatten().tolist()
    return Fraction(places[0] + places[-1], 2)


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def interior_size(layers: Sequence[Layer], extra: int) -> int:
    """An input large enough that two periods of outputs in its middle see no border."""
    stride, up, width = reach(layers)
    return 2 * width + 4 * stride * up + extra
