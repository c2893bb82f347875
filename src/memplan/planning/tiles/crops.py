"""Run a network on parts of its input, with the border that each part of the result reads, to the same results.

A part of the result needs a window of the input, which is found by going back through the ops. The network runs on a
crop that holds this window and begins where all strides begin. Values near the crop's own border are wrong, as the
kernels pad there, but none of them is read: that is checked for each shape of a crop, by going back through its ops,
too, and comparing the windows of all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memplan import _torch
from memplan.planning.tiles.program import Node, NotTileable, Program, Recorder
from memplan.planning.tiles.rules import Window
from memplan.planning.tiles.tiled import Axis, Tiled


@dataclass(frozen=True)
class Crop:
    """A crop of the input for a part of the result: windows along each dimension of space."""

    result_windows: tuple[Window, ...]
    """The part of the whole result."""
    input_windows: tuple[Window, ...]
    """The crop, in the whole input."""
    part_in_crop_result: tuple[Window, ...]
    """The part, in the result of the crop."""


class Crops:
    """The crops of a network for an input.

    Args:
        model: a module of one tensor to one tensor, in evaluation mode.
        shape: of the input: samples, channels and space.
        dtype: of the input.

    Raises:
        NotTileable: parts of the result need all of the input, or an op has no rule.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Trace the network on the whole input, and find its total stride along each dimension of space."""
        self._model, self.dtype = model, dtype
        self.input_shape = shape
        self._programs: dict[tuple[int, ...], list[Tiled]] = {}
        """By shape of an input, whole or cropped: the network's program, tiled along each dimension of space."""
        self._whole_programs = self._tiled(shape)
        """Those of the whole input."""
        program = self._whole_programs[0].program
        of_result = program.likes[program.outputs[0]]
        self.result_shape, self.result_dtype = of_result.shape, of_result.dtype
        """Shape and dtype of the network's result for the whole input."""
        self._dim_order = sorted(range(len(shape)), key=lambda dim: (-of_result.stride[dim], dim))
        """Dimensions of the result in the order of memory, such as channels last."""
        self._downsampling = [self._downsampling_along(tiled) for tiled in self._whole_programs]
        """For each dimension of space, by value: how many times smaller the value is along it than the input."""
        self.strides = tuple(
            math.lcm(*(factor.numerator for factor in factors.values() if factor >= 1))
            for factors in self._downsampling
        )
        """Total stride of the network along each dimension of space: crops begin at its multiples."""
        self._checked: set[tuple[Any, ...]] = set()
        """Kinds of crops whose windows were compared with those on the whole input."""
        self._windows = dict[tuple[int, Window], tuple[Window, Window]]()
        """Results of `windows_along`: all parts in a row or a column of a grid have the same."""

    def _tiled(self, shape: tuple[int, ...]) -> list[Tiled]:
        """Return the network's program on an input of this shape, tiled along each dimension of space in turn.

        Raises:
            NotTileable: parts of the result need all of the input.
        """
        if shape not in self._programs:
            with _torch.fake_mode():
                input = torch.empty(shape, dtype=self.dtype)
            program = _program(self._model, input)
            along_each_dim = [Tiled(program, Axis(dim), pieces=1) for dim in range(2, len(shape))]
            for tiled in along_each_dim:
                if tiled.norms:
                    raise NotTileable("a norm needs the statistics of the whole input")
                if tiled.partial_sums or tiled.precomputed_sums:
                    raise NotTileable("a sum over dimensions of space needs the whole input")
                if any(placement.repetitions > 1 for placement in tiled.placements.values()):
                    raise NotTileable("the axis is mixed with the dimension before it")
                if tiled.placements[program.outputs[0]].dim != tiled.axis.dim:
                    raise NotTileable("the result has its dimensions in another order")
            self._programs[shape] = along_each_dim
        return self._programs[shape]

    def _downsampling_along(self, tiled: Tiled) -> dict[int, Fraction]:
        """Return by how much each value is smaller than the input: 4 after two strides of 2, 1/2 after an upsampling.

        Sizes are rounded in a network, so the nearest whole number or its inverse is taken.
        """
        (input,) = (value for value in tiled.program.inputs if value in tiled.placements)
        factors = dict[int, Fraction]()
        for value in tiled.placements:
            ratio = tiled.size(input) / tiled.size(value)
            factors[value] = Fraction(round(ratio)) if ratio >= 1 else Fraction(1, round(1 / ratio))
        return factors

    def windows_along(self, spatial_dim: int, result: Window) -> tuple[Window, Window]:
        """Return (crop of the input that a part of the result reads, the part in the result of this crop), as windows
        along a dimension of space.

        Args:
            spatial_dim: the dimension, from 0.
            result: window of the part.
        """
        if (spatial_dim, result) in self._windows:
            return self._windows[spatial_dim, result]
        tiled, stride = self._whole_programs[spatial_dim], self.strides[spatial_dim]
        (input,) = (value for value in tiled.program.inputs if value in tiled.placements)
        (output,) = tiled.program.outputs
        low, high = tiled.windows({output: result})[input]
        # a crop begins and ends at multiples of the stride
        low, high = low // stride * stride, min(tiled.size(input), -(-high // stride) * stride)
        offset = int(low / self._downsampling[spatial_dim][output])  # of the crop's result in the whole result
        self._windows[spatial_dim, result] = (low, high), (result[0] - offset, result[1] - offset)
        return self._windows[spatial_dim, result]

    def crop(self, result: tuple[Window, ...]) -> Crop:
        """Return the crop for a part of the result. ``result``: its window along each dimension of space.

        Raises:
            NotTileable: the network on the crop does not compute what it computes on the whole.
        """
        windows = [self.windows_along(spatial_dim, window) for spatial_dim, window in enumerate(result)]
        in_input, in_crop_result = zip(*windows, strict=True)
        crop = Crop(result, in_input, in_crop_result)
        at_borders = tuple(
            (low == 0, high == size) for (low, high), size in zip(in_input, self.input_shape[2:], strict=True)
        )
        kind = self.shape(crop), in_crop_result, at_borders  # crops of a kind read alike: they are checked once
        if kind not in self._checked:
            self._check(crop)
            self._checked.add(kind)
        return crop

    def windows_of_parts(self, spatial_dim: int, count: int) -> list[Window]:
        """Return the windows of about ``count`` equal parts of the result along a dimension of space, from 0.

        Parts begin at multiples of the network's total stride, as crops of the input do: so the crops of inner parts
        have one shape, are not longer than needed, and are checked once.
        """
        size, stride = self.result_shape[2 + spatial_dim], self.strides[spatial_dim]
        length = -(-size // (count * stride)) * stride  # a multiple of the stride, rounded up
        return [(low, min(size, low + length)) for low in range(0, size, length)]

    def grid(self, counts: tuple[int, ...]) -> list[Crop]:
        """Return crops that together make the result, of about ``counts`` parts along each dimension of space.

        Raises:
            NotTileable: see `crop`.
        """
        windows = [self.windows_of_parts(spatial_dim, count) for spatial_dim, count in enumerate(counts)]
        return [self.crop(part) for part in product(*windows)]

    def shape(self, crop: Crop) -> tuple[int, ...]:
        """Return the shape of a crop of the input."""
        return (*self.input_shape[:2], *(high - low for low, high in crop.input_windows))

    def _check(self, crop: Crop) -> None:
        """Compare the windows of all values in the network on the crop with those on the whole input.

        Raises:
            NotTileable: they differ, or the network runs other ops.
        """
        of_crop = self._tiled(self.shape(crop))
        if list(map(_op, of_crop[0].program.nodes)) != list(map(_op, self._whole_programs[0].program.nodes)):
            raise NotTileable("the network runs other ops, or with other numbers, on a part of its input")
        for spatial_dim, (on_crop, on_whole) in enumerate(zip(of_crop, self._whole_programs, strict=True)):
            (output,), (crop_begin, _) = on_whole.program.outputs, crop.input_windows[spatial_dim]
            windows_in_whole = on_whole.windows({output: crop.result_windows[spatial_dim]})
            windows_in_crop = on_crop.windows({output: crop.part_in_crop_result[spatial_dim]})
            if windows_in_crop.keys() != windows_in_whole.keys():
                raise NotTileable("the network runs other ops on a part of its input")
            for value, (begin, end) in windows_in_whole.items():
                offset = crop_begin / self._downsampling[spatial_dim][value]  # of the crop, in elements of the value
                if windows_in_crop[value] != (begin - offset, end - offset):
                    raise NotTileable("positions of a part do not follow from those of the whole")

    def run(self, input: Tensor, parts: list[Crop], model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of a model, computed part by part.

        Args:
            input: of the shape of these crops.
            parts: crops that together make the result.
            model: computes a crop.
        """
        result = torch.empty_permuted(self.result_shape, self._dim_order, dtype=self.result_dtype, device=input.device)
        for crop in parts:
            _window(result, crop.result_windows).copy_(self.part(input, crop, model))
        return result

    def part(self, input: Tensor, crop: Crop, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a part of the result, computed from its crop of the input."""
        return _window(model(_window(input, crop.input_windows).contiguous()), crop.part_in_crop_result)

    def is_for(self, input: Tensor) -> bool:
        """Return whether an input has the shape, dtype and device that these crops are for."""
        return tuple(input.shape) == self.input_shape and input.dtype == self.dtype and input.device.type == "cpu"


def _op(node: Node) -> tuple[str, list[float]]:
    """Return what two runs of an op must share: its target, and its arguments that are floating-point numbers. Integers
    can be sizes, which differ."""
    leaves = _torch.tree_leaves((node.args, dict(node.kwargs)))
    return node.target, [leaf for leaf in leaves if isinstance(leaf, float)]


def _window(tensor: Tensor, windows: tuple[Window, ...]) -> Tensor:
    """Return the view of a tensor that has these windows of its last dimensions."""
    return tensor[(..., *(slice(low, high) for low, high in windows))]


class _Recording(TorchFunctionMode):
    """Records the ops of a network on an input without data; what is computed from weights alone counts as a weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.static: Mapping[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        """By id(): weights, and tensors computed from these alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call; calls on weights alone run as they are, and their results count as weights, too."""
        tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and all(id(tensor) in self.static for tensor in tensors):
            result = func(*args, **(kwargs or {}))
            results = {id(leaf): leaf for leaf in _torch.tree_leaves(result) if isinstance(leaf, Tensor)}
            self.static = {**self.static, **results}
            return result
        if not tensors and isinstance(func(*args, **(kwargs or {})), Tensor):  # as `torch.arange`
            raise NotTileable(f"{func.__name__} makes a tensor, which may be another one for a part of the input")
        return self.recorder.call(func, args, kwargs or {}, lambda tensor: id(tensor) in self.static)


def _program(model: nn.Module, input: Tensor) -> Program:
    """Return the ops of a model on an input without data. Raises NotTileable if it reads values or returns several
    tensors."""
    try:
        with torch.no_grad(), _Recording(model) as recording:
            result = model(input)
    except RuntimeError as error:  # it reads values, or cannot run on a part of this size
        raise NotTileable(f"on an input without values it raises {str(error).splitlines()[0]}") from None
    if not isinstance(result, Tensor):
        raise NotTileable("the model returns more than one tensor")
    return recording.recorder.program([result])
