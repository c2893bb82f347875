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
    """What a part of the result reads, along each dimension of space."""

    result: tuple[Window, ...]
    """The part of the result."""
    input: tuple[Window, ...]
    """The part of the input."""
    inner: tuple[Window, ...]
    """Where the part lies in the result of the crop."""


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
        """By shape of an input: the network's program, tiled along each dimension of space."""
        self._whole = self._tiled(shape)
        """The program of the whole input, tiled along each dimension of space."""
        program = self._whole[0].program
        self.result_shape = program.likes[program.outputs[0]].shape
        """Shape of the network's result for the whole input."""
        self.result_dtype = program.likes[program.outputs[0]].dtype
        self._scales = [self._scales_along(tiled) for tiled in self._whole]
        """Along each dimension of space: how many elements of the input an element of each value stands for."""
        strides = ([scale.numerator for scale in scales.values() if scale >= 1] for scales in self._scales)
        self.strides = tuple(math.lcm(*each) for each in strides)
        """Total stride of the network along each dimension of space: crops begin at its multiples."""
        self._checked: set[tuple[Any, ...]] = set()
        """Kinds of crops whose windows were compared with those on the whole input."""

    def _tiled(self, shape: tuple[int, ...]) -> list[Tiled]:
        """Return the network's program on an input of this shape, tiled along each dimension of space in turn.

        Raises:
            NotTileable: parts of the result need all of the input.
        """
        if shape not in self._programs:
            with _torch.fake_mode():
                input = torch.empty(shape, dtype=self.dtype)
            program = _program(self._model, input)
            along_dims = [Tiled(program, Axis(dim), pieces=1) for dim in range(2, len(shape))]
            for tiled in along_dims:
                if tiled.norms:
                    raise NotTileable("a norm needs the statistics of the whole input")
                if tiled.partial or tiled.totals:
                    raise NotTileable("a sum over dimensions of space needs the whole input")
                if any(along.repeats > 1 for along in tiled.along.values()):
                    raise NotTileable("the axis is mixed with the dimension before it")
                if tiled.along[program.outputs[0]].dim != tiled.axis.dim:
                    raise NotTileable("the result has its dimensions in another order")
            self._programs[shape] = along_dims
        return self._programs[shape]

    def _scales_along(self, tiled: Tiled) -> dict[int, Fraction]:
        """Return for each value how many elements of the input one of its elements stands for: 4 after two strides of
        2."""
        (input,) = (value for value in tiled.program.inputs if value in tiled.along)
        scales = dict[int, Fraction]()
        for value in tiled.along:
            ratio = tiled.size(input) / tiled.size(value)
            scales[value] = Fraction(round(ratio)) if ratio >= 1 else Fraction(1, round(1 / ratio))
        return scales

    def along(self, at: int, result: Window) -> tuple[Window, Window]:
        """Return the part of the input that a part of the result reads, and where the part lies in the result of its
        crop.

        Args:
            at: number of the dimension of space.
            result: the part of the result along it.
        """
        tiled, scales, stride = self._whole[at], self._scales[at], self.strides[at]
        (input,) = (value for value in tiled.program.inputs if value in tiled.along)
        (output,) = tiled.program.outputs
        low, high = tiled.windows({output: result})[input]
        # a crop begins and ends at multiples of the stride
        low, high = low // stride * stride, min(tiled.size(input), -(-high // stride) * stride)
        shift = int(low / scales[output])
        return (low, high), (result[0] - shift, result[1] - shift)

    def crop(self, result: tuple[Window, ...]) -> Crop:
        """Return the crop for a part of the result.

        Raises:
            NotTileable: the network on the crop does not compute what it computes on the whole.
        """
        inputs, inners = zip(*(self.along(at, window) for at, window in enumerate(result)), strict=True)
        crop = Crop(result, inputs, inners)
        borders = [(low == 0, high == size) for (low, high), size in zip(inputs, self.input_shape[2:], strict=True)]
        kind = self.shape(crop), inners, tuple(borders)  # crops of a kind are checked once
        if kind not in self._checked:
            self._check(crop)
            self._checked.add(kind)
        return crop

    def cuts(self, at: int, count: int) -> list[Window]:
        """Return the windows of about ``count`` equal parts of the result along dimension ``at`` of space."""
        size, stride = self.result_shape[2 + at], self.strides[at]
        length = -(-size // (count * stride)) * stride  # a multiple of the stride, rounded up
        return [(low, min(size, low + length)) for low in range(0, size, length)]

    def grid(self, counts: tuple[int, ...]) -> list[Crop]:
        """Return crops that together make the result, of about ``counts`` parts along each dimension of space.

        Raises:
            NotTileable: see `crop`.
        """
        return [self.crop(part) for part in product(*(self.cuts(at, count) for at, count in enumerate(counts)))]

    def shape(self, crop: Crop) -> tuple[int, ...]:
        """Return the shape of a crop of the input."""
        return (*self.input_shape[:2], *(high - low for low, high in crop.input))

    def _check(self, crop: Crop) -> None:
        """Compare the windows of all values in the network on the crop with those on the whole input.

        Raises:
            NotTileable: they differ, or the network runs other ops.
        """
        local = self._tiled(self.shape(crop))
        if list(map(_op, local[0].program.nodes)) != list(map(_op, self._whole[0].program.nodes)):
            raise NotTileable("the network runs other ops, or with other numbers, on a part of its input")
        for at, (part, whole) in enumerate(zip(local, self._whole, strict=True)):
            (output,), (low, _) = whole.program.outputs, crop.input[at]
            windows = whole.windows({output: crop.result[at]})
            inner = part.windows({output: crop.inner[at]})
            if inner.keys() != windows.keys():
                raise NotTileable("the network runs other ops on a part of its input")
            for value, (begin, end) in windows.items():
                shift = low / self._scales[at][value]  # where the crop begins, in elements of the value
                if inner[value] != (begin - shift, end - shift):
                    raise NotTileable("positions of a part do not follow from those of the whole")

    def run(self, input: Tensor, parts: list[Crop], model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of a model, computed part by part.

        Args:
            input: of the shape of these crops.
            parts: crops that together make the result.
            model: computes a crop.
        """
        result = input.new_empty(self.result_shape, dtype=self.result_dtype)
        for crop in parts:
            _window(result, crop.result).copy_(self.part(input, crop, model))
        return result

    def part(self, input: Tensor, crop: Crop, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a part of the result, computed from its crop of the input."""
        return _window(model(_window(input, crop.input).contiguous()), crop.inner)

    def is_for(self, input: Tensor) -> bool:
        """Return whether an input has the shape, dtype and device that these crops are for."""
        return tuple(input.shape) == self.input_shape and input.dtype == self.dtype and input.device.type == "cpu"


def _op(node: Node) -> tuple[str, list[float]]:
    """Return what two runs of an op must share: its target, and its arguments that are floating-point numbers, not
    sizes."""
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
        if not tensors and isinstance(func(*args, **(kwargs or {})), Tensor):
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
