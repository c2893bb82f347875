"""For each op that can run piece by piece along an axis: which part of its operands a part of its result needs.

An axis is a dimension of the batch or of space. A value lies *along* it if one of its dimensions is the axis, alone or
merged with others by a view (`AxisPlacement`). A `Window` is a half-open range of positions on the axis. Windows of
operands are clipped; what a kernel pads, the piece pads itself where it is at the border.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import ELEMENTWISE, arguments_of, overload
from memplan.planning.tiles.program import BATCH_NORMS, Node, NotTileable

Window = tuple[int, int]
"""First position of a range, and the position after its last."""


class Part(NamedTuple):
    """Part of an operand that is needed: a range of elements along a dimension."""

    dim: int
    elements: Window
    """In elements of the dimension, not in positions of the axis: see `element_range`."""


@dataclass(frozen=True)
class AxisPlacement:
    """Where an axis lies in a tensor: a dimension that is the axis, or that a view merged from it and its neighbours.

    A dimension merged from (heads, axis, channels) has ``heads`` repetitions and ``channels`` elements per position.
    """

    dim: int
    elements_per_position: int = 1
    """Consecutive elements of the dimension that belong to a position of the axis."""
    repetitions: int = 1
    """How often the dimension runs through the whole axis. A piece has its window of each repetition."""


@dataclass(frozen=True)
class Call:
    """A node with its operands and results, as rules see them."""

    node: Node
    shapes: Mapping[int, tuple[int, ...]]
    """By value: the shape of the whole."""
    placements: Mapping[int, AxisPlacement]
    """By value along the axis: where the axis lies in it."""

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the op by name."""
        return arguments_of(self.node.target, self.node.args, self.node.kwargs)

    @cached_property
    def result_placement(self) -> AxisPlacement:
        """Where the axis lies in the result. Raises NotTileable if the op mixes its elements."""
        rule = RULES.get(self.node.target)
        if rule is None:
            raise NotTileable(f"{self.node.name} has no rule to run piece by piece")
        placements = [self.placements[value] for value in self.node.reads if value in self.placements]
        if not rule.supports_merged_axis and any(placement.repetitions > 1 for placement in placements):
            raise NotTileable(f"{self.node.name} mixes the axis with the dimension before it")
        return rule.result_placement(self)

    def operand_parts(self, window: Window) -> dict[int, Part]:
        """Return the parts of operands that a window of the result needs, by value; operands without an entry as a
        whole."""
        return RULES[self.node.target].operand_parts(self, window)

    def __getitem__(self, name: str) -> Any:
        """Argument ``name`` of the op, None without one."""
        return self.arguments.get(name)

    def placement(self, name: str) -> AxisPlacement | None:
        """Return where the axis lies in the tensor argument ``name``; None if it does not."""
        argument = self.arguments.get(name)
        return self.placements.get(argument.value) if isinstance(argument, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor argument ``name``."""
        return self.shapes[self.arguments[name].value]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[self.node.outputs[0]]


class Rule:
    """How an op runs on a part of the axis. By default a window of the result needs the same window of the operands."""

    operands: tuple[str, ...] = ("self",)
    """Names of the arguments of which it needs a part; the others are needed as a whole."""
    supports_merged_axis = False
    """Whether an operand's dimension of the axis can be merged with the one before it (repetitions above 1)."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return where the axis lies in the result. Raises NotTileable if the op mixes its elements."""
        raise NotImplementedError

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the parts of operands that a window of the result needs, by value; operands without an entry as a
        whole."""
        parts = dict[int, Part]()
        for name in self.operands:
            if isinstance(call[name], Ref):
                placement = call.placement(name) or call.result_placement
                parts[call[name].value] = Part(placement.dim, element_range(placement, window))
        return parts

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the results of the op for a window.

        Args:
            call: the op on whole tensors.
            window: positions of the axis to compute.
            tensor_of: returns the part of an operand (by value) that `operand_parts` names.
            op: the op, or a function that takes its place.
        """
        args, kwargs = self.arguments(call, window)
        return op(*filled(args, tensor_of), **filled(kwargs, tensor_of))

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the op's call for a window."""
        return call.node.args, dict(call.node.kwargs)


def filled(arguments: Any, tensor_of: Callable[[int], Tensor]) -> Any:
    """Return an op's arguments with ``tensor_of(value)`` in place of each Ref, at any depth."""
    if isinstance(arguments, Ref):
        return tensor_of(arguments.value)
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(filled(part, tensor_of) for part in arguments)
    if isinstance(arguments, dict):
        return {name: filled(part, tensor_of) for name, part in arguments.items()}
    return arguments


def run_whole(node: Node, tensor_of: Callable[[int], Tensor]) -> Any:
    """Return the results of an op with whole operands."""
    return overload(node.target)(*filled(node.args, tensor_of), **filled(dict(node.kwargs), tensor_of))


def element_range(placement: AxisPlacement, window: Window) -> Window:
    """Return a window of the axis in elements of a value's dimension, within each repetition of the axis."""
    return window[0] * placement.elements_per_position, window[1] * placement.elements_per_position


def _shape_of_window(call: Call, window: Window) -> list[int]:
    """Return the shape of a call's result where only a window of the axis is computed."""
    placement, shape = call.result_placement, list(call.result_shape)
    begin, end = element_range(placement, window)
    shape[placement.dim] = placement.repetitions * (end - begin)  # the same window in each repetition of the axis
    return shape


class _Pointwise(Rule):
    """An elementwise op: operands are broadcast, aligned at the last dimension."""

    supports_merged_axis = True

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return where the axis lies in all operands, as dimensions of the result."""
        rank = len(call.result_shape)
        placements = {value: call.placements[value] for value in call.node.reads if value in call.placements}
        in_result = {
            replace(placement, dim=rank - len(call.shapes[value]) + placement.dim)
            for value, placement in placements.items()
        }
        if len(in_result) != 1:
            raise NotTileable(f"{call.node.name} combines different axes")
        (result,) = in_result
        size = call.result_shape[result.dim]
        if any(call.shapes[value][placement.dim] != size for value, placement in placements.items()):
            raise NotTileable(f"{call.node.name} repeats a single element of the axis")
        return result

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of all operands that are not broadcast along the axis."""
        placement, result_shape = call.result_placement, call.result_shape
        parts = dict[int, Part]()
        for value in call.node.reads:
            # shapes are aligned at the last dimension
            dim = placement.dim - len(result_shape) + len(call.shapes[value])
            is_broadcast = dim < 0 or call.shapes[value][dim] == 1 or result_shape[placement.dim] == 1
            if not is_broadcast:
                parts[value] = Part(dim, element_range(placement, window))
        return parts


class _Independent(Rule):
    """An op that computes the elements of some dimensions independently: a softmax along the last, for all others."""

    supports_merged_axis = True

    def __init__(
        self, *operands: str, is_independent_along: Callable[[Call, int], bool] = lambda call, dim: True
    ) -> None:
        """Args:
        operands: names of the arguments that have the dimensions of the result; ``self`` by default.
        is_independent_along: of a call and a dimension, whether the op computes its elements independently.
        """
        self.operands, self._is_independent_along = operands or ("self",), is_independent_along

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the operands, if the op computes its positions independently."""
        placements = {call.placement(name) for name in self.operands} - {None}
        if len(placements) != 1:
            raise NotTileable(f"{call.node.name} combines different axes")
        (placement,) = placements
        assert placement is not None
        on_axis = {value for value in call.node.reads if value in call.placements}
        allowed = {call[name].value for name in self.operands if isinstance(call[name], Ref)}
        if not on_axis <= allowed or not self._is_independent_along(call, placement.dim):
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        return placement


class _Reduction(Rule):
    """A reduction of other dimensions than that of the axis."""

    supports_merged_axis = True

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis among the dimensions that are left."""
        placement, rank = call.placement("self"), len(call.shape("self"))
        dims = [call["dim"]] if isinstance(call["dim"], int) else call["dim"]
        reduced = {dim % rank for dim in dims or range(rank)}  # without any, all are reduced
        if placement is None or placement.dim in reduced:
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        removed = 0 if call["keepdim"] else sum(dim < placement.dim for dim in reduced)
        return replace(placement, dim=placement.dim - removed)


class _TakesBatchSize(_Independent):
    """An op with an argument for the number of samples, such as ``N`` of a group norm: a piece passes its own."""

    def __init__(
        self, *operands: str, batch_size_argument: str, is_independent_along: Callable[[Call, int], bool]
    ) -> None:
        super().__init__(*operands, is_independent_along=is_independent_along)
        self._batch_size_argument = batch_size_argument

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the op's arguments with the number of samples of the window."""
        begin, end = element_range(call.result_placement, window)
        return tuple({**call.arguments, self._batch_size_argument: end - begin}.values()), {}


class _View(Rule):
    """A view that splits other dimensions, or merges the axis with its neighbours."""

    supports_merged_axis = True

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the dimension of the result that holds the axis: of several, that with the fewest repetitions.

        In memory order a tensor is (repetitions, axis, elements per position), whatever its dimensions. A view keeps
        these three numbers, and each dimension of the result takes its share of the first and the last.
        """
        placement, shape, result_shape = call.placement("self"), call.shape("self"), call.result_shape
        if placement is None:
            raise NotTileable(f"{call.node.name} combines different axes")
        axis_size = shape[placement.dim] // (placement.elements_per_position * placement.repetitions)
        all_repetitions = math.prod(shape[: placement.dim]) * placement.repetitions
        all_elements_per_position = math.prod(shape[placement.dim + 1 :]) * placement.elements_per_position
        possible = list[AxisPlacement]()
        for dim, size in enumerate(result_shape):
            before, behind = math.prod(result_shape[:dim]), math.prod(result_shape[dim + 1 :])
            if before and behind and all_repetitions % before == 0 and all_elements_per_position % behind == 0:
                repetitions, elements_per_position = all_repetitions // before, all_elements_per_position // behind
                if repetitions * axis_size * elements_per_position == size:
                    possible.append(AxisPlacement(dim, elements_per_position, repetitions))
        if possible:
            return min(possible, key=lambda placement: placement.repetitions)
        raise NotTileable(f"{call.node.name} splits or mixes the axis")

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the operand's part in the shape of the result's window."""
        return tensor_of(call["self"].value).reshape(_shape_of_window(call, window))


class _Slice(_Independent):
    """``slice``. Along the axis it shifts the window: the operand's part is then the result."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the operand. A slice along it must have step 1, and no merged axis."""
        placement = call.placement("self")
        if placement is None:
            raise NotTileable("slice combines different axes")
        is_merged = placement.elements_per_position > 1 or placement.repetitions > 1
        step = 1 if call["step"] is None else call["step"]
        if self._is_along_axis(call, placement) and (is_merged or step != 1):
            raise NotTileable("slice takes a part of the axis")
        return placement

    def _is_along_axis(self, call: Call, placement: AxisPlacement) -> bool:
        """Return whether the slice is along the axis."""
        dim = 0 if call["dim"] is None else call["dim"]  # the default in the op's schema
        return dim % len(call.result_shape) == placement.dim

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand: shifted by where the slice begins, if it is along the axis."""
        placement, value = call.result_placement, call["self"].value
        if not self._is_along_axis(call, placement):
            return super().operand_parts(call, window)
        size, start = call.shape("self")[placement.dim], call["start"] or 0
        first = min(max(start + size if start < 0 else start, 0), size)  # negative: from the end
        return {value: Part(placement.dim, (first + window[0], first + window[1]))}

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the operand's part itself for a slice along the axis, else the slice of it."""
        if self._is_along_axis(call, call.result_placement):
            return tensor_of(call["self"].value)
        return super().run(call, window, tensor_of, op)


class _Gather(_Independent):
    """``gather``: along another dimension than the axis, or from a whole vector by indices along the axis."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the indices, or in indices and operand."""
        placement = call.placement("index")
        reads_whole_vector = len(call.result_shape) == 1 and call.placement("self") is None
        if reads_whole_vector and placement is not None:
            return placement
        return super().result_placement(call)

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of indices and operand; all of a vector."""
        parts = super().operand_parts(call, window)
        if len(call.result_shape) == 1:  # any element of the vector can be read
            parts.pop(call["self"].value)
        return parts


class _Likelihood(Rule):
    """``nll_loss`` that is not reduced: of classes in dimension 1."""

    supports_merged_axis = True

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the result, which lacks the dimension of the classes."""
        placement, is_reduced = call.placement("self"), call["reduction"] != 0
        if placement is None or placement.dim == 1 or len(call.shape("self")) == 1 or is_reduced:
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        result = replace(placement, dim=placement.dim - (placement.dim > 1))  # without the dimension of classes
        if call.placement("target") not in (None, result) or call.placement("weight") is not None:
            raise NotTileable(f"{call.node.name} combines different axes")
        return result

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of log-probabilities and targets."""
        placement, in_result = call.placement("self"), call.result_placement
        assert placement is not None
        part = element_range(in_result, window)
        return {call["self"].value: Part(placement.dim, part), call["target"].value: Part(in_result.dim, part)}


class _MovedDims(Rule):
    """An op that moves, adds or removes dimensions."""

    supports_merged_axis = True

    def __init__(self, operand_dims: Callable[[Call, int], Sequence[int]]) -> None:
        """``operand_dims``: returns, from a call and the operand's rank, the operand's dimension for each dimension of
        the result; -1 for a new dimension."""
        self._operand_dims = operand_dims

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return where the operand's axis has moved."""
        placement = call.placement("self")
        operand_dims = list(self._operand_dims(call, len(call.shape("self"))))
        if placement is None or placement.dim not in operand_dims:
            raise NotTileable(f"{call.node.name} takes the axis away")
        return replace(placement, dim=operand_dims.index(placement.dim))


class _Expand(Rule):
    """``expand``: the axis keeps its place from the end."""

    supports_merged_axis = True

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis behind the new dimensions."""
        placement = call.placement("self")
        assert placement is not None
        dim = len(call.result_shape) - len(call.shape("self")) + placement.dim  # new dimensions come first
        if call.result_shape[dim] != call.shape("self")[placement.dim]:
            raise NotTileable("expand repeats a single element of the axis")
        return replace(placement, dim=dim)

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the operand's part, expanded to the shape of the result's window."""
        return tensor_of(call["self"].value).expand(_shape_of_window(call, window))


class _Cat(Rule):
    """``cat`` along another dimension."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis, which is the same in all operands."""
        placements = {call.placements.get(value) for value in call.node.reads}
        placement = placements.pop() if len(placements) == 1 else None
        joined_dim = 0 if call["dim"] is None else call["dim"]  # the default in the op's schema
        if placement is None or joined_dim % len(call.result_shape) == placement.dim:
            raise NotTileable("cat joins along the axis, or parts without it")
        return placement

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of all operands."""
        placement = call.result_placement
        return dict.fromkeys(call.node.reads, Part(placement.dim, element_range(placement, window)))


class _Pad(Rule):
    """``constant_pad_nd``."""

    _argument = "pad"
    """Name of the op's argument that lists the padding."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the operand."""
        placement = call.placement("self")
        if placement is None or (placement.elements_per_position > 1 and any(self._padding(call, placement.dim))):
            raise NotTileable(f"{call.node.name} pads merged dimensions")
        return placement

    def _padding(self, call: Call, dim: int) -> tuple[int, int]:
        """Return the padding before and after a dimension: the op lists pairs from the last dimension on."""
        pad, dims_behind = call[self._argument], len(call.shape("self")) - 1 - dim
        is_listed = 2 * dims_behind + 1 < len(pad)
        return (pad[2 * dims_behind], pad[2 * dims_behind + 1]) if is_listed else (0, 0)

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand without what is padded."""
        placement = call.result_placement
        low, high = element_range(placement, window)
        before, _ = self._padding(call, placement.dim)
        size = call.shape("self")[placement.dim]
        part, _ = _clipped(low - before, high - before, size)
        return {call["self"].value: Part(placement.dim, part)}

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the op's arguments with the padding that the window needs along the axis: only border pieces need
        any."""
        placement = call.result_placement
        low, high = element_range(placement, window)
        before, _ = self._padding(call, placement.dim)
        _, window_padding = _clipped(low - before, high - before, call.shape("self")[placement.dim])
        dims_behind, pad = len(call.shape("self")) - 1 - placement.dim, list(call[self._argument])
        if 2 * dims_behind + 1 < len(pad):
            pad[2 * dims_behind : 2 * dims_behind + 2] = window_padding
        value = [] if call["value"] is None else [call["value"]]
        return (call["self"], pad, *value), {}


class _BorderPad(_Pad):
    """``replication_pad`` and ``reflection_pad``: what is padded repeats elements near the border of the operand."""

    _argument = "padding"

    def __init__(self, *, reflects: bool) -> None:
        """``reflects``: whether the elements behind the border are repeated, else that at the border."""
        self._reflects = reflects

    def _read_range(self, call: Call, window: Window) -> tuple[Window, tuple[int, int]]:
        """Return the range of the operand that a window of the result reads, up to the border where it is padded, and
        the padding before and after that range."""
        placement = call.result_placement
        low, high = element_range(placement, window)
        before, _ = self._padding(call, placement.dim)
        size = call.shape("self")[placement.dim]
        (begin, end), _ = _clipped(low - before, high - before, size)
        missing_before, missing_after = max(0, before - low), max(0, high - before - size)
        repeated = 1 if not self._reflects else 1 + max(missing_before, missing_after)
        if missing_before:
            begin, end = 0, max(end, min(repeated, size))
        if missing_after:
            begin, end = min(begin, max(0, size - repeated)), size
        return (begin, end), (missing_before, missing_after)

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand, with the elements that are repeated."""
        part, _ = self._read_range(call, window)
        return {call["self"].value: Part(call.result_placement.dim, part)}

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Pad the piece's part, along the axis at the borders of the whole alone, and cut the window out of that."""
        dim, part = call.result_placement.dim, tensor_of(call["self"].value)
        (begin, _), (missing_before, missing_after) = self._read_range(call, window)
        dims_behind, pad = len(call.shape("self")) - 1 - dim, list(call[self._argument])
        if 2 * dims_behind + 1 < len(pad):
            pad[2 * dims_behind : 2 * dims_behind + 2] = missing_before, missing_after
        result = op(part, pad) if any(pad) else part
        low, high = element_range(call.result_placement, window)
        before, _ = self._padding(call, dim)
        return result.narrow(dim, low - before - (begin - missing_before), high - low)


def _clipped(low: int, high: int, size: int) -> tuple[Window, tuple[int, int]]:
    """Return a range clipped to [0, size), and how many positions are missing before and after it."""
    begin, end = min(max(low, 0), size), min(max(high, 0), size)
    return (begin, end), (max(0, min(high, 0) - low), max(0, high - max(low, size)))


def _option(values: Any, spatial_dim: int, *, default: int) -> int:
    """Return the entry of a kernel's option, such as ``stride``, for a dimension of space. A single number stands for
    all dimensions.

    ``default``: for an option that is missing or empty.
    """
    values = [values] if isinstance(values, int) else list(values or ())
    if not values:
        return default
    return values[0] if len(values) == 1 else values[spatial_dim]


class _Sliding(Rule):
    """A convolution or pool: each element of the result reads a window of the operand."""

    def __init__(self, operand: str, padding_value: float = 0.0) -> None:
        """``operand``: name of the argument that the kernel slides over."""
        self._operand, self._padding_value = operand, padding_value

    def _kernel(self, call: Call, spatial_dim: int) -> tuple[int, int, int, int]:
        """Return size, stride, padding and dilation of the kernel in a dimension of space."""
        size = _option(call["kernel_size"], spatial_dim, default=1)
        stride = _option(call["stride"], spatial_dim, default=size)  # pools: without one, windows do not overlap
        padding = _option(call["padding"], spatial_dim, default=0)
        return size, stride, padding, _option(call["dilation"], spatial_dim, default=1)

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the operand: a dimension of the batch, or of space."""
        placement = call.placement(self._operand)
        if placement is None or [v for v in call.node.reads if v in call.placements] != [call[self._operand].value]:
            raise NotTileable(f"{call.node.name} has the axis in other operands than its input")
        first_spatial = len(call.result_shape) - self._spatial_rank(call)
        is_channels = 0 < placement.dim < first_spatial
        if is_channels or (placement.dim >= first_spatial and placement.elements_per_position > 1):
            raise NotTileable(f"{call.node.name} mixes the axis with other dimensions")
        return placement

    def _spatial_rank(self, call: Call) -> int:
        """Return the number of dimensions of space."""
        return len(call["kernel_size"])

    def _spatial_dim_of_axis(self, call: Call) -> int | None:
        """Return which dimension of space the axis is, counted from 0; None for an axis of the batch."""
        placement = call.result_placement
        dim = placement.dim - len(call.result_shape) + self._spatial_rank(call)
        return None if dim < 0 else dim

    def _read_range(self, call: Call, spatial_dim: int, window: Window) -> Window:
        """Return the range of the operand that a window of the result reads along the axis. It begins below 0, or ends
        above the operand's size, where the window reads padding.

        ``spatial_dim``: dimension of space that is the axis.
        """
        kernel, stride, padding, dilation = self._kernel(call, spatial_dim)
        low = window[0] * stride - padding
        return low, (window[1] - 1) * stride - padding + dilation * (kernel - 1) + 1

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand that the kernel reads, without padding."""
        placement, spatial_dim = call.result_placement, self._spatial_dim_of_axis(call)
        value, size = call[self._operand].value, call.shape(self._operand)[placement.dim]
        if spatial_dim is None:
            return {value: Part(placement.dim, element_range(placement, window))}
        part, _ = _clipped(*self._read_range(call, spatial_dim, window), size)
        return {value: Part(placement.dim, part)}

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Run the kernel on the piece's part: along the axis it is padded here, and only at the borders of the
        whole."""
        spatial_dim = self._spatial_dim_of_axis(call)
        if spatial_dim is None:
            return super().run(call, window, tensor_of, op)
        placement, operand = call.result_placement, call[self._operand].value
        size = call.shape(self._operand)[placement.dim]
        _, border_padding = _clipped(*self._read_range(call, spatial_dim, window), size)
        part = tensor_of(operand)
        if any(border_padding):
            no_padding = [0, 0] * (part.dim() - 1 - placement.dim)  # F.pad lists pairs from the last dimension on
            part = F.pad(part, (*no_padding, *border_padding), value=self._padding_value)
        padding = [_option(call["padding"], dim, default=0) for dim in range(self._spatial_rank(call))]
        padding[spatial_dim] = 0
        arguments = {**call.arguments, "padding": padding}
        return op(**filled(arguments, lambda value: part if value == operand else tensor_of(value)))


class _AveragePool(_Sliding):
    """An average pool. Padding counts as zeros, or is not there."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the operand, unless averages at borders count fewer elements."""
        placement = super().result_placement(call)
        spatial_dim = placement.dim - len(call.result_shape) + self._spatial_rank(call)
        if spatial_dim < 0:  # an axis of the batch
            return placement
        padding = _option(call["padding"], spatial_dim, default=0)
        if call["ceil_mode"] or (padding and call["count_include_pad"] is False):
            raise NotTileable("avg_pool counts the elements within its borders")
        return placement


class _Convolution(_Sliding):
    """``convolution``, also transposed."""

    def _spatial_rank(self, call: Call) -> int:
        """Return the number of dimensions of space."""
        return len(call.result_shape) - 2

    def _kernel(self, call: Call, spatial_dim: int) -> tuple[int, int, int, int]:
        """Return size, stride, padding and dilation of the kernel in a dimension of space."""
        size = call.shape("weight")[2 + spatial_dim]
        stride = _option(call["stride"], spatial_dim, default=1)
        padding = _option(call["padding"], spatial_dim, default=0)
        return size, stride, padding, _option(call["dilation"], spatial_dim, default=1)

    def _read_range(self, call: Call, spatial_dim: int, window: Window) -> Window:
        """Return the range of the operand that a window reads; of a transposed convolution, clipped to the operand."""
        if not call["transposed"]:
            return super()._read_range(call, spatial_dim, window)
        # input i writes to results i * stride - padding + dilation * (0 to kernel - 1)
        kernel, stride, padding, dilation = self._kernel(call, spatial_dim)
        low = -(-(window[0] + padding - dilation * (kernel - 1)) // stride)  # rounded up
        high = (window[1] - 1 + padding) // stride + 1
        size = call.shape("input")[2 + spatial_dim]
        (begin, end), _ = _clipped(low, high, size)
        return (begin, end) if begin < end else (begin - 1, begin)  # rows between the kernels: bias alone

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Run the kernel on the piece's part. A transposed convolution makes more than the window, which is cut out."""
        spatial_dim = self._spatial_dim_of_axis(call)
        if spatial_dim is None or not call["transposed"]:
            return super().run(call, window, tensor_of, op)
        _, stride, padding, _ = self._kernel(call, spatial_dim)
        begin, _ = self._read_range(call, spatial_dim, window)
        paddings = [_option(call["padding"], dim, default=0) for dim in range(self._spatial_rank(call))]
        output_paddings = [_option(call["output_padding"], dim, default=0) for dim in range(self._spatial_rank(call))]
        paddings[spatial_dim] = output_paddings[spatial_dim] = 0
        # the bias is added at the end, to rows that no input reaches, too
        arguments = {**call.arguments, "padding": paddings, "output_padding": output_paddings, "bias": None}
        result = op(**filled(arguments, tensor_of))
        # row 0 of this result, which was not cut by padding, is row begin * stride - padding of the whole result
        dim, first, rows = 2 + spatial_dim, window[0] + padding - begin * stride, window[1] - window[0]
        missing_before, missing_behind = max(0, -first), max(0, first + rows - result.shape[dim])
        if missing_before or missing_behind:  # rows that no input reaches
            result = F.pad(result, (*[0, 0] * (result.dim() - 1 - dim), missing_before, missing_behind))
        result = result.narrow(dim, first + missing_before, rows)
        if call["bias"] is None:
            return result
        return result + tensor_of(call["bias"].value).reshape(-1, *[1] * self._spatial_rank(call))


class _Upsample(Rule):
    """An upsampling by a whole factor along the axis."""

    def __init__(self, *, neighbours: int) -> None:
        """``neighbours``: elements on either side that an interpolation reads."""
        self._neighbours = neighbours

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the operand: the batch, or space if the factor is a whole number."""
        placement = call.placement("self") or call.placement("input")
        if placement is None:
            raise NotTileable(f"{call.node.name} combines different axes")
        if placement.dim >= 2:
            size, result = self._operand_shape(call)[placement.dim], call.result_shape[placement.dim]
            if result % size or call["align_corners"] or not self._has_scales_of_sizes(call):
                raise NotTileable(f"{call.node.name} scales by a fraction, or aligns corners, along the axis")
        elif placement.dim == 1:
            raise NotTileable(f"{call.node.name} has channels as its axis")
        return placement

    def _has_scales_of_sizes(self, call: Call) -> bool:
        """Return whether the scale factors among the arguments, if any, are the ratios of the sizes."""
        spatial_rank = len(call.result_shape) - 2
        names = ("scales",) if spatial_rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - spatial_rank :]
        scales = call["scale_factors"] or [call[name] for name in names]  # overloads name them differently
        dims = zip(scales, self._operand_shape(call)[2:], call.result_shape[2:], strict=True)
        return all(scale is None or scale * size == result_size for scale, size, result_size in dims)

    def _operand(self, call: Call) -> int:
        """Return the value that is upsampled: overloads name it differently."""
        return (call["self"] or call["input"]).value

    def _operand_shape(self, call: Call) -> tuple[int, ...]:
        """Return the shape of what is upsampled."""
        return call.shapes[self._operand(call)]

    def _read_range(self, call: Call, placement: AxisPlacement, window: Window) -> Window:
        """Return the range of the operand that a window of the result reads, along an axis of space."""
        size = self._operand_shape(call)[placement.dim]
        scale = call.result_shape[placement.dim] // size
        low, high = window[0] // scale, -(-window[1] // scale)  # rounded outwards
        read, _ = _clipped(low - self._neighbours, high + self._neighbours, size)
        return read

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand, with the elements on either side that an interpolation reads."""
        placement = call.result_placement
        part = element_range(placement, window) if placement.dim < 2 else self._read_range(call, placement, window)
        return {self._operand(call): Part(placement.dim, part)}

    def run(self, call: Call, window: Window, tensor_of: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Upsample the piece's part, and cut the window out of the result.

        Without aligned corners and with a whole factor, each element reads the same neighbours in a part as in the
        whole, but at the part's borders. The part has a neighbour more than the window there, unless it is the border
        of the whole.
        """
        placement = call.result_placement
        if placement.dim < 2:  # samples are independent
            return super().run(call, window, tensor_of, op)
        part, spatial_sizes = tensor_of(self._operand(call)), list(call.result_shape[2:])
        scale = call.result_shape[placement.dim] // self._operand_shape(call)[placement.dim]
        spatial_sizes[placement.dim - 2] = part.shape[placement.dim] * scale
        nearest = {"upsample_nearest": "nearest", "_upsample_nearest_exact": "nearest-exact"}.get(call.node.name[:-2])
        mode = nearest or {1: "linear", 2: "bilinear", 3: "trilinear"}[len(spatial_sizes)]
        align_corners = None if nearest else False  # True is refused by `result_placement`
        result = F.interpolate(part, size=spatial_sizes, mode=mode, align_corners=align_corners)
        part_begin = self._read_range(call, placement, window)[0] * scale  # of the upsampled part in the whole result
        return result.narrow(placement.dim, window[0] - part_begin, window[1] - window[0])


_EVALUATED_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
"""A batch norm in evaluation, as captured steps have it; it has no argument ``training``."""


class _ChannelNorm(Rule):
    """A batch norm whose statistics are not over the axis: in evaluation, or where the axis is in the channels, as the
    samples of an instance norm are."""

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the input: the channels, or any other dimension in evaluation."""
        placement = call.placement("input")
        in_training = call["training"] is not False and call.node.target != _EVALUATED_BATCH_NORM
        if placement is None or (placement.dim != 1 and in_training):
            raise NotTileable(f"{call.node.name} normalizes over the axis")
        if in_training and call.node.target == "aten._native_batch_norm_legit.default":
            raise NotTileable("a batch norm updates statistics that are not over the axis")
        return placement

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of the input and, if the axis is the channels, of weight, bias and running
        statistics."""
        placement = call.result_placement
        part = element_range(placement, window)
        parts = {call["input"].value: Part(placement.dim, part)}
        if placement.dim == 1:  # the axis is in the channels
            for name in ("weight", "bias", "running_mean", "running_var"):
                if isinstance(call[name], Ref):
                    parts[call[name].value] = Part(0, part)
        return parts


class _Product(Rule):
    """``mm`` and ``bmm``, and ``addmm`` and ``baddbmm``, which add ``self``. The axis lies in the rows of the first
    factor, or in the batch of both."""

    supports_merged_axis = True

    def __init__(self, first: str, second: str) -> None:
        """``first``, ``second``: names of the arguments with the factors."""
        self._factors = first, second

    def result_placement(self, call: Call) -> AxisPlacement:
        """Return the placement of the axis in the first factor: its rows, or the batch of both factors."""
        first, second = map(call.placement, self._factors)
        rank = len(call.result_shape)
        if first is None or first.dim == rank - 1:
            raise NotTileable(f"{call.node.name} sums over the axis")
        in_batch = first.dim < rank - 2
        # a second factor off the axis is read as a whole or, if the axis is the batch, in a single range of it
        fits_off_axis = second is None and not (in_batch and first.repetitions > 1)
        fits_on_axis = in_batch and second == first
        if not (fits_off_axis or fits_on_axis):
            raise NotTileable(f"{call.node.name} has the axis in both factors")
        if "self" not in self._factors:  # it is added to the product, broadcast
            added, dim = call.placement("self"), first.dim - rank + len(call.shape("self"))
            if added is None and dim >= 0 and call.shape("self")[dim] != 1:
                raise NotTileable(f"{call.node.name} adds a row for each element of the axis")
            if added not in (None, replace(first, dim=dim)):
                raise NotTileable(f"{call.node.name} adds a tensor with another axis")
        return first

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of the operands along the axis; of the second factor only in a batch."""
        placements = {value: call.placements[value] for value in call.node.reads if value in call.placements}
        parts = {
            value: Part(placement.dim, element_range(placement, window)) for value, placement in placements.items()
        }
        first, second = (call[name].value for name in self._factors)
        is_in_batch = call.result_placement.dim < len(call.result_shape) - 2
        if is_in_batch:  # each product of the batch has a second factor of its own
            parts[second] = parts[first]
        return parts


# values of `is_independent_along`: whether an op computes the elements along ``dim`` of its result independently


def _is_no_softmax_dim(call: Call, dim: int) -> bool:
    """Return whether a softmax is along another dimension."""
    return call["dim"] % len(call.result_shape) != dim


def _is_read_index_by_index(call: Call, dim: int) -> bool:
    """Return whether a gather reads from index ``i`` of its operand along ``dim`` for index ``i`` of its result.

    That is so for all dimensions but its own. Of a dimension with fewer indices than the operand it reads a part, so
    that operand and result would differ in the size of the axis.
    """
    return call["dim"] % len(call.result_shape) != dim and call.shape("self")[dim] == call.shape("index")[dim]


def _is_before_normalized_dims(call: Call, dim: int) -> bool:
    """Return whether a layer norm does not normalize over dimension ``dim``."""
    return dim < len(call.shape("input")) - len(call["normalized_shape"])


def _is_batch(call: Call, dim: int) -> bool:
    """Return whether ``dim`` is the batch."""
    return dim == 0


def _is_batch_with_shared_mask(call: Call, dim: int) -> bool:
    """Return whether ``dim`` is the batch of an attention whose samples share their mask: a mask of each sample would
    be needed in part."""
    mask = call["attn_mask"]
    return dim == 0 and (mask is None or len(call.shapes[mask.value]) < 3 or call.shapes[mask.value][0] == 1)


def _ignores_index_counts(call: Call, dim: int) -> bool:
    """Return whether an embedding's derivative ignores how often an index occurs in the batch, whatever ``dim`` is."""
    return not call["scale_grad_by_freq"]


_COPIES = "clone.default _to_copy.default contiguous.default alias.default detach.default lift_fresh_copy.default"
_FILLED = "zeros_like.default ones_like.default full_like.default"
_UPSAMPLES = {f"{kind}{n}d": 0 for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)}
_UPSAMPLES |= {"upsample_linear1d": 1, "upsample_bilinear2d": 1, "upsample_trilinear3d": 1}
"""By upsampling op: neighbours of an element that it reads on either side."""

RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": _Pointwise() for name in ELEMENTWISE if not name.endswith("_backward.default")},
    **{f"aten.{name}": _Independent() for name in f"{_COPIES} {_FILLED}".split()},
    **{f"aten.{name}.default": _View() for name in ("view", "_unsafe_view", "reshape", "_reshape_alias")},
    **{f"aten.{name}{overload}": _Upsample(neighbours=neighbours) for name, neighbours in _UPSAMPLES.items()
       for overload in (".default", ".vec")},
    **{f"aten.{name}": _Reduction() for name in (
        "mean.dim", "sum.dim_IntList", "sum.default", "mean.default", "logsumexp.default", "amax.default",
        "amin.default"
    )},
    **{f"aten.{name}.default": _Independent(is_independent_along=_is_no_softmax_dim)
       for name in ("_softmax", "_log_softmax", "_safe_softmax")},
    **dict.fromkeys(("aten._prelu_kernel.default", "aten.rsub.Scalar"), _Pointwise()),
    "aten.select.int": _MovedDims(lambda call, rank: [d for d in range(rank) if d != call["dim"] % rank]),
    "aten.convolution.default": _Convolution("input"),
    "aten.max_pool2d_with_indices.default": _Sliding("self", padding_value=-math.inf),
    "aten.max_pool3d_with_indices.default": _Sliding("self", padding_value=-math.inf),
    "aten.avg_pool2d.default": _AveragePool("self"),
    "aten.avg_pool3d.default": _AveragePool("self"),
    "aten._adaptive_avg_pool2d.default": _Independent(is_independent_along=_is_batch),
    "aten._adaptive_avg_pool3d.default": _Independent(is_independent_along=_is_batch),
    "aten.native_layer_norm.default": _Independent("input", is_independent_along=_is_before_normalized_dims),
    "aten.native_group_norm.default": _TakesBatchSize("input", batch_size_argument="N", is_independent_along=_is_batch),
    "aten.constant_pad_nd.default": _Pad(),
    **{f"aten.{name}_pad{rank}d.default": _BorderPad(reflects=name == "reflection")
       for name in ("replication", "reflection") for rank in (1, 2, 3)},
    **dict.fromkeys((*BATCH_NORMS, _EVALUATED_BATCH_NORM), _ChannelNorm()),
    "aten.cat.default": _Cat(),
    "aten.slice.Tensor": _Slice(),
    "aten.gather.default": _Gather("self", "index", is_independent_along=_is_read_index_by_index),
    "aten.nll_loss_forward.default": _Likelihood(),
    "aten.nll_loss2d_forward.default": _Likelihood(),
    "aten.expand.default": _Expand(),
    "aten.permute.default": _MovedDims(lambda call, rank: [d % rank for d in call["dims"]]),
    "aten.transpose.int": _MovedDims(lambda call, rank: _swapped(rank, call["dim0"], call["dim1"])),
    "aten.t.default": _MovedDims(lambda call, rank: list(reversed(range(rank)))),
    "aten.unsqueeze.default": _MovedDims(lambda call, rank: _inserted(rank, call["dim"])),
    "aten.squeeze.dim": _MovedDims(lambda call, rank: _squeezed(call.shape("self"), call["dim"])),
    "aten.mm.default": _Product("self", "mat2"),
    "aten.addmm.default": _Product("mat1", "mat2"),
    "aten.bmm.default": _Product("self", "mat2"),
    "aten.baddbmm.default": _Product("batch1", "batch2"),
    "aten.embedding.default": _Independent("indices", is_independent_along=_ignores_index_counts),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _Independent(
        "query", "key", "value", is_independent_along=_is_batch_with_shared_mask
    ),
}  # fmt: skip
"""Rules by the target of an op. Norms over the axis are `memplan.planning.tiles.norms`, sums
`memplan.planning.tiles.sums`."""


def _swapped(rank: int, first: int, second: int) -> list[int]:
    """Return the operand's dimension for each dimension of a transpose."""
    order = list(range(rank))
    order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return order


def _inserted(rank: int, dim: int) -> list[int]:
    """Return the operand's dimension for each dimension of an unsqueeze: -1 stands for the new dimension."""
    order = list(range(rank))
    order.insert(dim % (rank + 1), -1)
    return order


def _squeezed(shape: Sequence[int], dim: int) -> list[int]:
    """Return the operand's dimension for each dimension of a squeeze, which keeps dimensions of several elements."""
    return [d for d in range(len(shape)) if d != dim % len(shape) or shape[d] != 1]
