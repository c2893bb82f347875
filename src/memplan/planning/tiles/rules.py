"""For each op that can run piece by piece along an axis: which part of its operands a part of its result needs.

An axis is a dimension of the batch or of space. A value lies *along* it if one of its dimensions is the axis, or holds
``unit`` elements for each element of the axis, ``repeats`` times (after views that merged dimensions). A `Window` is a
half-open range of the axis. Windows of operands are clipped; what a kernel pads, the piece pads itself where it is at
the border.
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
    window: Window


@dataclass(frozen=True)
class Along:
    """Where an axis lies in a tensor."""

    dim: int
    unit: int = 1
    """Elements of the dimension for each element of the axis."""
    repeats: int = 1
    """How often the whole axis is repeated in the dimension. With more than once, every piece reads what it has."""


Axes = Mapping[int, Along]
"""Values that lie along the axis."""


@dataclass(frozen=True)
class Call:
    """A node with its operands and results, as rules see them."""

    node: Node
    shapes: Mapping[int, tuple[int, ...]]
    """By value: the shape of the whole."""
    axes: Axes

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the op by name."""
        return arguments_of(self.node.target, self.node.args, self.node.kwargs)

    @cached_property
    def result_axis(self) -> Along:
        """Where the axis lies in the result. Raises NotTileable if the op mixes its elements."""
        rule = RULES.get(self.node.target)
        if rule is None:
            raise NotTileable(f"{self.node.name} has no rule to run piece by piece")
        axes = [self.axes[value] for value in self.node.reads if value in self.axes]
        if not rule.merges and any(along.repeats > 1 for along in axes):
            raise NotTileable(f"{self.node.name} mixes the axis with the dimension before it")
        return rule.result_axis(self)

    def operand_parts(self, window: Window) -> dict[int, Part]:
        """Return the parts of operands that a window of the result needs, by value; operands without an entry as a
        whole."""
        return RULES[self.node.target].operand_parts(self, window)

    def __getitem__(self, name: str) -> Any:
        """Argument ``name`` of the op, None without one."""
        return self.arguments.get(name)

    def along(self, name: str) -> Along | None:
        """Return where the axis lies in the tensor argument ``name``; None if it does not."""
        argument = self.arguments.get(name)
        return self.axes.get(argument.value) if isinstance(argument, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor argument ``name``."""
        return self.shapes[self.arguments[name].value]

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[self.node.outputs[0]]


class Rule:
    """How an op runs on a part of the axis. By default an op that reads of its operands the part that it makes."""

    operands: tuple[str, ...] = ("self",)
    """Names of the tensors of which it reads a part, by default."""
    merges = False
    """Whether an operand's dimension of the axis can be merged with the one before it (``Along.repeats``)."""

    def result_axis(self, call: Call) -> Along:
        """Return where the axis lies in the result. Raises NotTileable if the op mixes its elements."""
        raise NotImplementedError

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the parts of operands that a window of the result needs, by value; operands without an entry as a
        whole."""
        parts = dict[int, Part]()
        for name in self.operands:
            if isinstance(call[name], Ref):
                along = call.along(name) or call.result_axis
                parts[call[name].value] = Part(along.dim, elements(along, window))
        return parts

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the results of the op for a window.

        Args:
            call, window: what to compute.
            tensors: returns the part of an operand that it needs.
            op: the op, or a function that takes its place.
        """
        args, kwargs = self.arguments(call, window)
        return op(*filled(args, tensors), **filled(kwargs, tensors))

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the op's call for a window."""
        return call.node.args, dict(call.node.kwargs)


def filled(arguments: Any, tensors: Callable[[int], Tensor]) -> Any:
    """Return an op's arguments with tensors in the place of Refs, at any depth."""
    if isinstance(arguments, Ref):
        return tensors(arguments.value)
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(filled(part, tensors) for part in arguments)
    if isinstance(arguments, dict):
        return {name: filled(part, tensors) for name, part in arguments.items()}
    return arguments


def run_whole(node: Node, tensors: Callable[[int], Tensor]) -> Any:
    """Return the results of an op with whole operands."""
    return overload(node.target)(*filled(node.args, tensors), **filled(dict(node.kwargs), tensors))


def elements(along: Along, window: Window) -> Window:
    """Return a window of the axis in elements of a value's dimension."""
    return window[0] * along.unit, window[1] * along.unit


def _shape_of(call: Call, window: Window) -> list[int]:
    """Return the shape of a window of a call's result."""
    along, shape = call.result_axis, list(call.result)
    low, high = elements(along, window)
    shape[along.dim] = (high - low) * along.repeats
    return shape


class _Pointwise(Rule):
    """An elementwise op: operands are broadcast, aligned at the last dimension."""

    merges = True

    def result_axis(self, call: Call) -> Along:
        """Return the operands' axis: the same in all, as shapes are aligned at the last dimension."""
        rank, axes = len(call.result), {value: call.axes[value] for value in call.node.reads if value in call.axes}
        aligned = {replace(along, dim=rank - len(call.shapes[v]) + along.dim) for v, along in axes.items()}
        if len(aligned) != 1:
            raise NotTileable(f"{call.node.name} combines different axes")
        (result,) = aligned
        if any(call.shapes[v][along.dim] != call.result[result.dim] for v, along in axes.items()):
            raise NotTileable(f"{call.node.name} repeats a single element of the axis")
        return result

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of all operands that are not broadcast along the axis."""
        along, result = call.result_axis, call.result
        parts = dict[int, Part]()
        for value in call.node.reads:
            dim = along.dim - len(result) + len(call.shapes[value])  # shapes are aligned at the last dimension
            if dim >= 0 and call.shapes[value][dim] == result[along.dim] > 1:  # else the operand is broadcast
                parts[value] = Part(dim, elements(along, window))
        return parts


class _Rows(Rule):
    """An op that treats each element of certain dimensions of its operands alone, such as a softmax of the last one."""

    merges = True

    def __init__(self, *operands: str, keeps: Callable[[Call, int], bool] = lambda call, dim: True) -> None:
        """``operands``: names of the tensors that have the result's dimension; ``keeps(call, dim)``: whether the op
        leaves elements along ``dim`` apart."""
        self.operands, self._keeps = operands or ("self",), keeps

    def result_axis(self, call: Call) -> Along:
        """Return the operands' axis, if the op treats its elements one by one."""
        axes = {call.along(name) for name in self.operands} - {None}
        if len(axes) != 1:
            raise NotTileable(f"{call.node.name} combines different axes")
        (along,) = axes
        assert along is not None
        on_axis = {value for value in call.node.reads if value in call.axes}
        allowed = {call[name].value for name in self.operands if isinstance(call[name], Ref)}
        if not on_axis <= allowed or not self._keeps(call, along.dim):
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        return along


class _Reduction(Rule):
    """A reduction of other dimensions than that of the axis."""

    merges = True

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis among the dimensions that are left."""
        along, rank = call.along("self"), len(call.shape("self"))
        dims = [call["dim"]] if isinstance(call["dim"], int) else call["dim"]
        reduced = {dim % rank for dim in dims or range(rank)}  # without any, all are reduced
        if along is None or along.dim in reduced:
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        removed = 0 if call["keepdim"] else sum(dim < along.dim for dim in reduced)
        return replace(along, dim=along.dim - removed)


class _Sized(_Rows):
    """An op of which an argument is the shape of its result, or a number of samples: it is that of the piece."""

    def __init__(self, *operands: str, samples: str = "", keeps: Callable[[Call, int], bool]) -> None:
        """``samples``: name of the argument with the number of samples. Others: see `_Rows`."""
        super().__init__(*operands, keeps=keeps)
        self._samples = samples

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the op's arguments with the piece's number of samples."""
        low, high = elements(call.result_axis, window)
        return tuple({**call.arguments, self._samples: high - low}.values()), {}


class _View(Rule):
    """A view that splits dimensions beside the axis, or merges it with these."""

    merges = True

    def result_axis(self, call: Call) -> Along:
        """Return the dimension of the result that holds the axis: of several, that with the fewest repetitions."""
        along, shape, result = call.along("self"), call.shape("self"), call.result
        if along is None:
            raise NotTileable(f"{call.node.name} combines different axes")
        size = shape[along.dim] // (along.unit * along.repeats)
        # how many elements lie before and behind an element of the axis in the operand's memory order
        before, behind = math.prod(shape[: along.dim]) * along.repeats, math.prod(shape[along.dim + 1 :]) * along.unit
        axes = list[Along]()
        for dim in range(len(result)):
            left, right = math.prod(result[:dim]), math.prod(result[dim + 1 :])
            if left and right and before % left == 0 and behind % right == 0:
                axis = Along(dim, behind // right, before // left)
                if axis.repeats * size * axis.unit == result[dim]:
                    axes.append(axis)
        if axes:
            return min(axes, key=lambda axis: axis.repeats)
        raise NotTileable(f"{call.node.name} splits or mixes the axis")

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the operand's part in the shape of the result's window."""
        return tensors(call["self"].value).reshape(_shape_of(call, window))


class _Slice(_Rows):
    """``slice``: along the axis, one element after another, it moves the window."""

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis: a slice along it must take elements one after another."""
        along = call.along("self")
        if along is None:
            raise NotTileable("slice combines different axes")
        if self._moves(call, along) and (along.unit > 1 or along.repeats > 1 or (call["step"] or 1) != 1):
            raise NotTileable("slice takes a part of the axis")
        return along

    def _moves(self, call: Call, along: Along) -> bool:
        """Return whether the slice is along the axis."""
        return (call["dim"] or 0) % len(call.result) == along.dim

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand: shifted by where the slice begins, if it is along the axis."""
        along, value = call.result_axis, call["self"].value
        if not self._moves(call, along):
            return super().operand_parts(call, window)
        size, start = call.shape("self")[along.dim], call["start"] or 0
        first = min(max(start + size if start < 0 else start, 0), size)  # negative: from the end
        return {value: Part(along.dim, (first + window[0], first + window[1]))}

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the operand's part itself for a slice along the axis, else the slice of it."""
        if self._moves(call, call.result_axis):
            return tensors(call["self"].value)
        return super().run(call, window, tensors, op)


class _Gather(_Rows):
    """``gather``: along another dimension, or with indices along the axis into a vector that is there as a whole."""

    def result_axis(self, call: Call) -> Along:
        """Return the axis of the indices, or of indices and operand."""
        along = call.along("index")
        if len(call.result) == 1 and call.along("self") is None and along is not None:  # into a whole vector
            return along
        return super().result_axis(call)

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of indices and operand; all of a vector."""
        parts = super().operand_parts(call, window)
        if len(call.result) == 1:  # any element of the vector can be read
            parts.pop(call["self"].value)
        return parts


class _Likelihood(Rule):
    """``nll_loss`` that is not reduced: of classes in dimension 1."""

    merges = True

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis among the result's dimensions, which lack that of the classes."""
        along = call.along("self")
        if along is None or along.dim == 1 or len(call.shape("self")) == 1 or call["reduction"] != 0:
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        result = replace(along, dim=along.dim - (along.dim > 1))  # without the dimension of classes
        if call.along("target") not in (None, result) or call.along("weight") is not None:
            raise NotTileable(f"{call.node.name} combines different axes")
        return result

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of log-probabilities and targets."""
        along, part = call.along("self"), elements(call.result_axis, window)
        assert along is not None
        return {call["self"].value: Part(along.dim, part), call["target"].value: Part(call.result_axis.dim, part)}


class _Moved(Rule):
    """An op that moves dimensions."""

    merges = True

    def __init__(self, order: Callable[[Call, int], Sequence[int]]) -> None:
        """``order(call, rank)``: for each dimension of the result, the one of the operand; -1 for a new one."""
        self._order = order

    def result_axis(self, call: Call) -> Along:
        """Return where the operand's axis has moved."""
        along = call.along("self")
        order = list(self._order(call, len(call.shape("self"))))
        if along is None or along.dim not in order:
            raise NotTileable(f"{call.node.name} takes the axis away")
        return replace(along, dim=order.index(along.dim))


class _Expand(Rule):
    """``expand``: the axis keeps its place from the end."""

    merges = True

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis, behind new dimensions."""
        along = call.along("self")
        assert along is not None
        dim = len(call.result) - len(call.shape("self")) + along.dim  # new dimensions come first
        if call.result[dim] != call.shape("self")[along.dim]:
            raise NotTileable("expand repeats a single element of the axis")
        return replace(along, dim=dim)

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Return the operand's part, expanded to the shape of the result's window."""
        return tensors(call["self"].value).expand(_shape_of(call, window))


class _Cat(Rule):
    """``cat`` along another dimension."""

    def result_axis(self, call: Call) -> Along:
        """Return the axis, which is the same in all operands and not joined along."""
        axes = {call.axes.get(value) for value in call.node.reads}
        along = axes.pop() if len(axes) == 1 else None  # the same in all operands
        if along is None or (call["dim"] or 0) % len(call.result) == along.dim:
            raise NotTileable("cat joins along the axis, or parts without it")
        return along

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of all operands."""
        along = call.result_axis
        return dict.fromkeys(call.node.reads, Part(along.dim, elements(along, window)))


class _Pad(Rule):
    """``constant_pad_nd``."""

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis."""
        along = call.along("self")
        if along is None or (along.unit > 1 and any(self._ends(call, along.dim))):
            raise NotTileable("constant_pad_nd pads merged dimensions")
        return along

    @staticmethod
    def _ends(call: Call, dim: int) -> tuple[int, int]:
        """Return the padding before and after a dimension: ``pad`` lists pairs from the last dimension on."""
        pad, behind = call["pad"], len(call.shape("self")) - 1 - dim
        return (pad[2 * behind], pad[2 * behind + 1]) if 2 * behind + 1 < len(pad) else (0, 0)

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand without what is padded."""
        along = call.result_axis
        low, high = elements(along, window)
        before, _ = self._ends(call, along.dim)
        size = call.shape("self")[along.dim]
        part, _ = _clipped(low - before, high - before, size)
        return {call["self"].value: Part(along.dim, part)}

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the op's arguments with the padding that the window needs along the axis: only border pieces need
        any."""
        along = call.result_axis
        low, high = elements(along, window)
        before, _ = self._ends(call, along.dim)
        _, ends = _clipped(low - before, high - before, call.shape("self")[along.dim])
        behind, pad = len(call.shape("self")) - 1 - along.dim, list(call["pad"])
        if 2 * behind + 1 < len(pad):
            pad[2 * behind : 2 * behind + 2] = ends
        value = [] if call["value"] is None else [call["value"]]
        return (call["self"], pad, *value), {}


def _clipped(low: int, high: int, size: int) -> tuple[Window, tuple[int, int]]:
    """Return a range clipped to [0, size), and how many positions are missing before and after it."""
    begin, end = min(max(low, 0), size), min(max(high, 0), size)
    return (begin, end), (max(0, min(high, 0) - low), max(0, high - max(low, size)))


def _at(values: Any, dim: int, default: int) -> int:
    """Return the entry of a list argument for dimension ``dim``; a single number stands for all dimensions.

    ``default``: for an argument that is missing or empty.
    """
    values = [values] if isinstance(values, int) else list(values or ())
    return default if not values else values[0] if len(values) == 1 else values[dim]


class _Sliding(Rule):
    """A convolution or pool: each element of the result reads a window of the operand."""

    def __init__(self, operand: str, fill: float = 0.0) -> None:
        """``operand``: name of the tensor that it slides over; ``fill``: value of padding."""
        self._operand, self._fill = operand, fill

    def _kernel(self, call: Call, spatial: int) -> tuple[int, int, int, int]:
        """Return size, stride, padding and dilation of the kernel in a dimension of space."""
        size = _at(call["kernel_size"], spatial, 1)
        stride, padding = _at(call["stride"], spatial, size), _at(call["padding"], spatial, 0)
        return size, stride, padding, _at(call["dilation"], spatial, 1)

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis: of the batch, or of space."""
        along = call.along(self._operand)
        if along is None or [v for v in call.node.reads if v in call.axes] != [call[self._operand].value]:
            raise NotTileable(f"{call.node.name} has the axis in other operands than its input")
        first_spatial = len(call.result) - self._space(call)
        if (along.dim >= first_spatial and along.unit > 1) or 0 < along.dim < first_spatial:
            raise NotTileable(f"{call.node.name} mixes the axis with other dimensions")
        return along

    def _space(self, call: Call) -> int:
        """Return the number of dimensions of space."""
        return len(call["kernel_size"])

    def _spatial(self, call: Call) -> int | None:
        """Return the number of the axis among the dimensions of space; None for an axis of the batch."""
        along = call.result_axis
        dim = along.dim - len(call.result) + self._space(call)
        return None if dim < 0 else dim

    def _reach(self, call: Call, spatial: int, window: Window) -> Window:
        """Return the range of the operand that a window of the result reads, padding included.

        ``spatial``: number of the axis among the dimensions of space.
        """
        kernel, stride, padding, dilation = self._kernel(call, spatial)
        low = window[0] * stride - padding
        return low, (window[1] - 1) * stride - padding + dilation * (kernel - 1) + 1

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand that the kernel reads, without padding."""
        along, spatial = call.result_axis, self._spatial(call)
        value, size = call[self._operand].value, call.shape(self._operand)[along.dim]
        if spatial is None:
            return {value: Part(along.dim, elements(along, window))}
        part, _ = _clipped(*self._reach(call, spatial, window), size)
        return {value: Part(along.dim, part)}

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Run the kernel on the piece's part: along the axis it is padded here, and only at the borders of the
        whole."""
        spatial = self._spatial(call)
        if spatial is None:
            return super().run(call, window, tensors, op)
        along, operand = call.result_axis, call[self._operand].value
        _, ends = _clipped(*self._reach(call, spatial, window), call.shape(self._operand)[along.dim])
        part = tensors(operand)
        if any(ends):
            part = F.pad(part, (*[0, 0] * (part.dim() - 1 - along.dim), *ends), value=self._fill)
        padding = [_at(call["padding"], dim, 0) for dim in range(self._space(call))]
        padding[spatial] = 0
        arguments = {**call.arguments, "padding": padding}
        return op(**filled(arguments, lambda v: part if v == operand else tensors(v)))


class _AveragePool(_Sliding):
    """An average pool. Padding counts as zeros, or is not there."""

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis, unless averages at borders count fewer elements."""
        along = super().result_axis(call)
        spatial = along.dim - len(call.result) + self._space(call)
        if spatial < 0:  # an axis of the batch
            return along
        padding = _at(call["padding"], spatial, 0)
        if call["ceil_mode"] or (padding and call["count_include_pad"] is False):
            raise NotTileable("avg_pool counts the elements within its borders")
        return along


class _Convolution(_Sliding):
    """``convolution``, also transposed."""

    def _space(self, call: Call) -> int:
        """Return the number of dimensions of space."""
        return len(call.result) - 2

    def _kernel(self, call: Call, spatial: int) -> tuple[int, int, int, int]:
        """Return size, stride, padding and dilation of the kernel in a dimension of space."""
        stride, padding = _at(call["stride"], spatial, 1), _at(call["padding"], spatial, 0)
        return call.shape("weight")[2 + spatial], stride, padding, _at(call["dilation"], spatial, 1)

    def _reach(self, call: Call, spatial: int, window: Window) -> Window:
        """Return the range of the operand that a window reads; of a transposed convolution, clipped to the operand."""
        if not call["transposed"]:
            return super()._reach(call, spatial, window)
        # input i writes to results i * stride - padding + dilation * (0 to kernel - 1)
        kernel, stride, padding, dilation = self._kernel(call, spatial)
        low = -(-(window[0] + padding - dilation * (kernel - 1)) // stride)  # rounded up
        high = (window[1] - 1 + padding) // stride + 1
        size = call.shape("input")[2 + spatial]
        (begin, end), _ = _clipped(low, high, size)
        return (begin, end) if begin < end else (begin - 1, begin)  # rows between the kernels: bias alone

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Run the kernel on the piece's part. A transposed convolution makes more than the window, which is cut out."""
        spatial = self._spatial(call)
        if spatial is None or not call["transposed"]:
            return super().run(call, window, tensors, op)
        _, stride, padding, _ = self._kernel(call, spatial)
        begin, _ = self._reach(call, spatial, window)
        paddings = [_at(call["padding"], dim, 0) for dim in range(self._space(call))]
        outputs = [_at(call["output_padding"], dim, 0) for dim in range(self._space(call))]
        paddings[spatial] = outputs[spatial] = 0
        arguments = {**call.arguments, "padding": paddings, "output_padding": outputs, "bias": None}
        result = op(**filled(arguments, tensors))
        # the kernel's result begins at begin * stride in rows before padding is cut off; no input reaches the others
        dim, first, rows = 2 + spatial, window[0] + padding - begin * stride, window[1] - window[0]
        before, behind = max(0, -first), max(0, first + rows - result.shape[dim])
        if before or behind:
            result = F.pad(result, (*[0, 0] * (result.dim() - 1 - dim), before, behind))
        result = result.narrow(dim, first + before, rows)
        if call["bias"] is None:
            return result
        return result + tensors(call["bias"].value).reshape(-1, *[1] * self._space(call))


class _Upsample(Rule):
    """An upsampling by a whole factor along the axis."""

    def __init__(self, *, reach: int) -> None:
        """``reach``: elements on either side that an interpolation reads."""
        self._reach = reach

    def result_axis(self, call: Call) -> Along:
        """Return the operand's axis: of the batch, or of space if the factor is a whole number."""
        along = call.along("self") or call.along("input")
        if along is None:
            raise NotTileable(f"{call.node.name} combines different axes")
        if along.dim >= 2:
            size, result = self._operand_shape(call)[along.dim], call.result[along.dim]
            if result % size or call["align_corners"] or not self._has_scales_of_sizes(call):
                raise NotTileable(f"{call.node.name} scales by a fraction, or aligns corners, along the axis")
        elif along.dim == 1:
            raise NotTileable(f"{call.node.name} has channels as its axis")
        return along

    def _has_scales_of_sizes(self, call: Call) -> bool:
        """Return whether the scale factors among the arguments, if any, are the ratios of the sizes."""
        space = len(call.result) - 2
        names = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[3 - space :]
        scales = call["scale_factors"] or [call[name] for name in names]
        dims = zip(scales, self._operand_shape(call)[2:], call.result[2:], strict=True)
        return all(scale is None or scale * size == result for scale, size, result in dims)

    def _operand(self, call: Call) -> int:
        """Return the value that is upsampled: overloads name it differently."""
        return (call["self"] or call["input"]).value

    def _operand_shape(self, call: Call) -> tuple[int, ...]:
        """Return the shape of what is upsampled."""
        return call.shapes[self._operand(call)]

    def _part(self, call: Call, along: Along, window: Window) -> Window:
        """Return the range of the operand that a window of the result reads, along an axis of space."""
        size = self._operand_shape(call)[along.dim]
        scale = call.result[along.dim] // size
        return _clipped(window[0] // scale - self._reach, -(-window[1] // scale) + self._reach, size)[0]

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the window of the operand, with the elements on either side that an interpolation reads."""
        along = call.result_axis
        part = elements(along, window) if along.dim < 2 else self._part(call, along, window)
        return {self._operand(call): Part(along.dim, part)}

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        """Upsample the piece's part, and cut the window out of the result."""
        along = call.result_axis
        if along.dim < 2:
            return super().run(call, window, tensors, op)
        part, space, sizes = tensors(self._operand(call)), len(call.result) - 2, list(call.result[2:])
        scale = call.result[along.dim] // self._operand_shape(call)[along.dim]
        sizes[along.dim - 2] = part.shape[along.dim] * scale
        name = {"upsample_nearest": "nearest", "_upsample_nearest_exact": "nearest-exact"}.get(call.node.name[:-2])
        mode = name or {1: "linear", 2: "bilinear", 3: "trilinear"}[space]
        align = {} if name else {"align_corners": bool(call["align_corners"])}
        result = F.interpolate(part, size=sizes, mode=mode, **align)
        begin = self._part(call, along, window)[0] * scale  # of the upsampled part in the whole result
        return result.narrow(along.dim, window[0] - begin, window[1] - window[0])


class _ChannelNorm(Rule):
    """A batch norm whose statistics are not over the axis: in evaluation, or where the axis is in the channels, as the
    samples of an instance norm are."""

    def result_axis(self, call: Call) -> Along:
        """Return the input's axis: the channels, or any other dimension in evaluation."""
        along = call.along("input")
        if along is None or (along.dim != 1 and call["training"] is not False):
            raise NotTileable(f"{call.node.name} normalizes over the axis")
        return along

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of the input and, if the axis is the channels, of weight, bias and running
        statistics."""
        along = call.result_axis
        part = elements(along, window)
        parts = {call["input"].value: Part(along.dim, part)}
        if along.dim == 1:  # the axis is in the channels
            for name in ("weight", "bias", "running_mean", "running_var"):
                if isinstance(call[name], Ref):
                    parts[call[name].value] = Part(0, part)
        return parts


class _Product(Rule):
    """``mm``, ``bmm``, and those that add a tensor: the axis lies in the rows of the first factor, or in the batch of
    both."""

    merges = True

    def __init__(self, first: str, second: str) -> None:
        """Names of the two factors."""
        self._factors = first, second

    def result_axis(self, call: Call) -> Along:
        """Return the axis of the first factor: its rows, or the batch of both factors."""
        first, second = map(call.along, self._factors)
        rank = len(call.result)
        if first is None or first.dim == rank - 1:
            raise NotTileable(f"{call.node.name} sums over the axis")
        in_batch = first.dim < rank - 2
        # the second factor is whole, or has the same axis in its batch
        second_fits = not (in_batch and first.repeats > 1) if second is None else in_batch and second == first
        if not second_fits:
            raise NotTileable(f"{call.node.name} has the axis in both factors")
        if "self" not in self._factors:  # a tensor that is added
            added, dim = call.along("self"), first.dim - rank + len(call.shape("self"))
            if added is None and dim >= 0 and call.shape("self")[dim] != 1:
                raise NotTileable(f"{call.node.name} adds a row for each element of the axis")
            if added not in (None, replace(first, dim=dim)):
                raise NotTileable(f"{call.node.name} adds a tensor with another axis")
        return first

    def operand_parts(self, call: Call, window: Window) -> dict[int, Part]:
        """Return the same window of the operands along the axis; of the second factor only in a batch."""
        axes = {value: call.axes[value] for value in call.node.reads if value in call.axes}
        parts = {value: Part(along.dim, elements(along, window)) for value, along in axes.items()}
        first, second = (call[name].value for name in self._factors)
        if call.result_axis.dim < len(call.result) - 2:  # each product of the batch has a second factor of its own
            parts[second] = parts[first]
        return parts


def _not_in(*names: str) -> Callable[[Call, int], bool]:
    """Return a function ``keeps(call, dim)``: whether an op leaves elements along ``dim`` apart.

    ``names``: arguments of the op with the dimensions that it works along; None stands for all.
    """

    def keeps(call: Call, dim: int) -> bool:
        rank = len(call.result)
        for name in names:
            dims = call[name]
            dims = [dims] if isinstance(dims, int) else dims
            if dims is None or dim in [d % rank for d in dims]:
                return False
        return True

    return keeps


def _gathers_beside(call: Call, dim: int) -> bool:
    """Return whether a gather reads, for each element along ``dim``, from the same element of its operand."""
    return (call["dim"] or 0) % len(call.result) != dim and call.shape("self")[dim] == call.shape("index")[dim]


def _before_normalized(call: Call, dim: int) -> bool:
    """Return whether a layer norm does not normalize over dimension ``dim``."""
    return dim < len(call.shape("input")) - len(call["normalized_shape"])


def _first_dim(call: Call, dim: int) -> bool:
    """Return whether ``dim`` is the batch, whose samples the op treats one by one."""
    return dim == 0


def _any_mask(call: Call, dim: int) -> bool:
    """Return whether an attention treats elements along ``dim`` one by one: samples, if they share their mask."""
    mask = call["attn_mask"]
    return dim == 0 and (mask is None or len(call.shapes[mask.value]) < 3 or call.shapes[mask.value][0] == 1)


def _counts_nothing(call: Call, dim: int) -> bool:
    """Return whether an embedding's derivative ignores how often an index occurs in the batch, whatever ``dim`` is."""
    return not call["scale_grad_by_freq"]


_COPIES = "clone.default _to_copy.default contiguous.default alias.default detach.default lift_fresh_copy.default"
_UPSAMPLES = {f"{kind}{n}d": 0 for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)}
_UPSAMPLES |= {"upsample_linear1d": 1, "upsample_bilinear2d": 1, "upsample_trilinear3d": 1}

RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": _Pointwise() for name in ELEMENTWISE if not name.endswith("_backward.default")},
    **{f"aten.{name}": _Rows() for name in _COPIES.split()},
    **{f"aten.{name}.default": _View() for name in ("view", "_unsafe_view", "reshape", "_reshape_alias")},
    **{f"aten.{name}{overload}": _Upsample(reach=reach) for name, reach in _UPSAMPLES.items()
       for overload in (".default", ".vec")},
    **{f"aten.{name}": _Reduction() for name in (
        "mean.dim", "sum.dim_IntList", "sum.default", "mean.default", "logsumexp.default", "amax.default",
        "amin.default"
    )},
    **{f"aten.{name}.default": _Rows(keeps=_not_in("dim")) for name in ("_softmax", "_log_softmax", "_safe_softmax")},
    "aten._prelu_kernel.default": _Pointwise(),
    "aten.select.int": _Moved(lambda call, rank: [d for d in range(rank) if d != call["dim"] % rank]),
    "aten.convolution.default": _Convolution("input"),
    "aten.max_pool2d_with_indices.default": _Sliding("self", -math.inf),
    "aten.max_pool3d_with_indices.default": _Sliding("self", -math.inf),
    "aten.avg_pool2d.default": _AveragePool("self"),
    "aten.avg_pool3d.default": _AveragePool("self"),
    "aten._adaptive_avg_pool2d.default": _Rows(keeps=_first_dim),
    "aten._adaptive_avg_pool3d.default": _Rows(keeps=_first_dim),
    "aten.native_layer_norm.default": _Rows("input", keeps=_before_normalized),
    "aten.native_group_norm.default": _Sized("input", samples="N", keeps=_first_dim),
    "aten.constant_pad_nd.default": _Pad(),
    **dict.fromkeys(BATCH_NORMS, _ChannelNorm()),
    "aten.cat.default": _Cat(),
    "aten.slice.Tensor": _Slice(),
    "aten.gather.default": _Gather("self", "index", keeps=_gathers_beside),
    "aten.nll_loss_forward.default": _Likelihood(),
    "aten.nll_loss2d_forward.default": _Likelihood(),
    "aten.expand.default": _Expand(),
    "aten.permute.default": _Moved(lambda call, rank: [d % rank for d in call["dims"]]),
    "aten.transpose.int": _Moved(lambda call, rank: _swapped(rank, call["dim0"], call["dim1"])),
    "aten.t.default": _Moved(lambda call, rank: list(reversed(range(rank)))),
    "aten.unsqueeze.default": _Moved(lambda call, rank: _inserted(rank, call["dim"])),
    "aten.squeeze.dim": _Moved(lambda call, rank: _squeezed(call.shape("self"), call["dim"])),
    "aten.mm.default": _Product("self", "mat2"),
    "aten.addmm.default": _Product("mat1", "mat2"),
    "aten.bmm.default": _Product("self", "mat2"),
    "aten.baddbmm.default": _Product("batch1", "batch2"),
    "aten.embedding.default": _Rows("indices", keeps=_counts_nothing),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _Rows("query", "key", "value", keeps=_any_mask),
}  # fmt: skip
"""Rules by the target of an op. Norms over the axis are `memplan.planning.tiles.norms`, sums
`memplan.planning.tiles.sums`."""


def _swapped(rank: int, first: int, second: int) -> list[int]:
    """Return the order of dimensions after a transpose."""
    order = list(range(rank))
    order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return order


def _inserted(rank: int, dim: int) -> list[int]:
    """Return the order of dimensions after an unsqueeze: -1 stands for the new dimension."""
    order = list(range(rank))
    order.insert(dim % (rank + 1), -1)
    return order


def _squeezed(shape: Sequence[int], dim: int) -> list[int]:
    """Return the order of dimensions after a squeeze, which keeps dimensions of more than one element."""
    return [d for d in range(len(shape)) if d != dim % len(shape) or shape[d] != 1]
