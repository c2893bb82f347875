"""For each op that can run piece by piece along an axis: which part of its operands a part of its result needs.

An axis is a dimension of the batch or of space. A value lies *along* it if one of its dimensions is the axis, or holds
``unit`` elements for each element of the axis, ``outer`` times (after views that merged dimensions). A `Window` is a
half-open range of the axis. Windows of operands are clipped; what a kernel pads, the piece pads itself where it is at
the border.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import ELEMENTWISE, arguments_of, overload
from memplan.planning.tiles.program import BATCH_NORMS, Node, NotTileable

Window = tuple[int, int]
Need = tuple[int, Window]
"""A dimension of an operand, and the range of its elements that is needed."""


@dataclass(frozen=True)
class Along:
    """Where an axis lies in a tensor."""

    dim: int
    unit: int = 1
    """Elements of the dimension for each element of the axis."""
    outer: int = 1
    """How often the whole axis is repeated in the dimension. With more than once, every piece reads what it has."""


Axes = Mapping[int, Along]
"""Values that lie along the axis."""


@dataclass(frozen=True)
class Call:
    """A node with its operands and results, as rules see them."""

    node: Node
    shapes: Mapping[int, tuple[int, ...]]
    axes: Axes

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the op by name."""
        return arguments_of(self.node.target, self.node.args, self.node.kwargs)

    @cached_property
    def placed(self) -> Along:
        """Where the axis lies in the result. Raises NotTileable if the op mixes its elements."""
        rule = RULES.get(self.node.target)
        if rule is None:
            raise NotTileable(f"{self.node.name} has no rule to run piece by piece")
        if not rule.merges and any(self.axes[v].outer > 1 for v in self.node.reads if v in self.axes):
            raise NotTileable(f"{self.node.name} mixes the axis with the dimension before it")
        return rule.placed(self)

    def needs(self, window: Window) -> dict[int, Need]:
        """Return for each operand of which only a part is needed its dimension, and its range in elements."""
        return RULES[self.node.target].needs(self, window)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def along(self, name: str) -> Along | None:
        """Return where the axis lies in a tensor argument."""
        argument = self.arguments.get(name)
        return self.axes.get(argument.value) if isinstance(argument, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor argument."""
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
    """Whether an operand's dimension of the axis can be merged with the one before it (``Along.outer``)."""

    def placed(self, call: Call) -> Along:
        """Return where the axis lies in the result. Raises NotTileable if the op mixes its elements."""
        raise NotImplementedError

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        """Return for each operand of which only a part is needed its dimension, and its range in elements."""
        parts = dict[int, Need]()
        for name in self.operands:
            if isinstance(call[name], Ref):
                along = call.along(name) or call.placed
                parts[call[name].value] = along.dim, elements(along, window)
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
    """Return arguments with tensors in the place of Refs."""
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


class _Pointwise(Rule):
    """An elementwise op: operands are broadcast, aligned at the last dimension."""

    merges = True

    def placed(self, call: Call) -> Along:
        rank = len(call.result)
        found = {
            replace(call.axes[v], dim=rank - len(call.shapes[v]) + call.axes[v].dim)
            for v in call.node.reads
            if v in call.axes
        }
        if len(found) != 1:
            raise NotTileable(f"{call.node.name} combines different axes")
        along = found.pop()
        if any(call.shapes[v][call.axes[v].dim] != call.result[along.dim] for v in call.node.reads if v in call.axes):
            raise NotTileable(f"{call.node.name} repeats a single element of the axis")
        return along

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along, result = call.placed, call.result
        parts = dict[int, Need]()
        for value in call.node.reads:
            dim = along.dim - len(result) + len(call.shapes[value])
            if dim >= 0 and call.shapes[value][dim] == result[along.dim] > 1:
                parts[value] = dim, elements(along, window)
        return parts


class _Rows(Rule):
    """An op that treats each element of certain dimensions of its operands alone, such as a softmax of the last one."""

    merges = True

    def __init__(self, *operands: str, keeps: Callable[[Call, int], bool] = lambda call, dim: True) -> None:
        """``operands``: names of the tensors that have the result's dimension; ``keeps(call, dim)``: whether the op
        leaves elements along ``dim`` apart."""
        self.operands, self._keeps = operands or ("self",), keeps

    def placed(self, call: Call) -> Along:
        found = {along for name in self.operands if (along := call.along(name)) is not None}
        if len(found) != 1:
            raise NotTileable(f"{call.node.name} combines different axes")
        (along,) = found
        others = [v for v in call.node.reads if v in call.axes]
        allowed = [call[name].value for name in self.operands if isinstance(call[name], Ref)]
        if any(v not in allowed for v in others) or not self._keeps(call, along.dim):
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        return along


class _Reduction(Rule):
    """A reduction of other dimensions than that of the axis."""

    merges = True

    def placed(self, call: Call) -> Along:
        along, rank = call.along("self"), len(call.shape("self"))
        dims = call["dim"]
        dims = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}  # none: all
        if along is None or along.dim in dims:
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        before = 0 if call["keepdim"] else sum(dim < along.dim for dim in dims)
        return replace(along, dim=along.dim - before)


class _Sized(_Rows):
    """An op of which an argument is the shape of its result, or a number of samples: it is that of the piece."""

    def __init__(self, *operands: str, samples: str = "", keeps: Callable[[Call, int], bool]) -> None:
        super().__init__(*operands, keeps=keeps)
        self._samples = samples

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        low, high = elements(call.placed, window)
        changed = {**call.arguments, self._samples: high - low}
        return tuple(changed.values()), {}


class _View(Rule):
    """A view that splits dimensions beside the axis, or merges it with these."""

    merges = True

    def placed(self, call: Call) -> Along:
        along, shape, result = call.along("self"), call.shape("self"), call.result
        if along is None:
            raise NotTileable(f"{call.node.name} combines different axes")
        size = shape[along.dim] // (along.unit * along.outer)
        before, behind = math.prod(shape[: along.dim]) * along.outer, math.prod(shape[along.dim + 1 :]) * along.unit
        found = list[Along]()
        for dim in range(len(result)):
            left, right = math.prod(result[:dim]), math.prod(result[dim + 1 :])
            if left and right and before % left == 0 == behind % right:
                placed = Along(dim, behind // right, before // left)
                if placed.outer * size * placed.unit == result[dim]:
                    found.append(placed)
        if found:
            return min(found, key=lambda placed: placed.outer)
        raise NotTileable(f"{call.node.name} splits or mixes the axis")

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        along, shape = call.placed, list(call.result)
        low, high = elements(along, window)
        shape[along.dim] = (high - low) * along.outer
        return tensors(call["self"].value).reshape(shape)


class _Slice(_Rows):
    """``slice``: along the axis, one element after another, it moves the window."""

    def placed(self, call: Call) -> Along:
        along = call.along("self")
        if along is None:
            raise NotTileable("slice combines different axes")
        if self._moves(call, along) and (along.unit > 1 or along.outer > 1 or (call["step"] or 1) != 1):
            raise NotTileable("slice takes a part of the axis")
        return along

    def _moves(self, call: Call, along: Along) -> bool:
        return (call["dim"] or 0) % len(call.result) == along.dim

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along, value = call.placed, call["self"].value
        if not self._moves(call, along):
            return super().needs(call, window)
        size, start = call.shape("self")[along.dim], call["start"] or 0
        first = min(max(start + size if start < 0 else start, 0), size)
        return {value: (along.dim, (first + window[0], first + window[1]))}

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        if self._moves(call, call.placed):
            return tensors(call["self"].value)
        return super().run(call, window, tensors, op)


class _Gather(_Rows):
    """``gather``: along another dimension, or with indices along the axis into a vector that is there as a whole."""

    def placed(self, call: Call) -> Along:
        along = call.along("index")
        if len(call.result) == 1 and call.along("self") is None and along is not None:
            return along
        return super().placed(call)

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        parts = super().needs(call, window)
        if len(call.result) == 1:
            parts.pop(call["self"].value)
        return parts


class _Likelihood(Rule):
    """``nll_loss`` that is not reduced: of classes in dimension 1."""

    merges = True

    def placed(self, call: Call) -> Along:
        along = call.along("self")
        if along is None or along.dim == 1 or len(call.shape("self")) == 1 or call["reduction"] != 0:
            raise NotTileable(f"{call.node.name} mixes elements of the axis")
        placed = replace(along, dim=along.dim - (along.dim > 1))
        if call.along("target") not in (None, placed) or call.along("weight") is not None:
            raise NotTileable(f"{call.node.name} combines different axes")
        return placed

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along, part = call.along("self"), elements(call.placed, window)
        assert along is not None
        return {call["self"].value: (along.dim, part), call["target"].value: (call.placed.dim, part)}


class _Moved(Rule):
    """An op that moves dimensions."""

    merges = True

    def __init__(self, order: Callable[[Call, int], Sequence[int]]) -> None:
        """``order(call, rank)``: for each dimension of the result, the one of the operand; -1 for a new one."""
        self._order = order

    def placed(self, call: Call) -> Along:
        along = call.along("self")
        order = list(self._order(call, len(call.shape("self"))))
        if along is None or along.dim not in order:
            raise NotTileable(f"{call.node.name} takes the axis away")
        return replace(along, dim=order.index(along.dim))


class _Expand(Rule):
    """``expand``: the axis keeps its place from the end."""

    merges = True

    def placed(self, call: Call) -> Along:
        along = call.along("self")
        assert along is not None
        dim = len(call.result) - len(call.shape("self")) + along.dim
        if call.result[dim] != call.shape("self")[along.dim]:
            raise NotTileable("expand repeats a single element of the axis")
        return replace(along, dim=dim)

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        along, shape = call.placed, list(call.result)
        low, high = elements(along, window)
        shape[along.dim] = (high - low) * along.outer
        return tensors(call["self"].value).expand(shape)


class _Cat(Rule):
    """``cat`` along another dimension."""

    def placed(self, call: Call) -> Along:
        found = {call.axes.get(v) for v in call.node.reads}
        (along,) = found if len(found) == 1 else (None,)
        if along is None or (call["dim"] or 0) % len(call.result) == along.dim:
            raise NotTileable("cat joins along the axis, or parts without it")
        return along

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along = call.placed
        return dict.fromkeys(call.node.reads, (along.dim, elements(along, window)))


class _Pad(Rule):
    """``constant_pad_nd``."""

    def placed(self, call: Call) -> Along:
        along = call.along("self")
        if along is None or (along.unit > 1 and any(self._ends(call, along.dim))):
            raise NotTileable("constant_pad_nd pads merged dimensions")
        return along

    @staticmethod
    def _ends(call: Call, dim: int) -> tuple[int, int]:
        """Return the padding before and after a dimension."""
        pad, behind = call["pad"], len(call.shape("self")) - 1 - dim
        return (pad[2 * behind], pad[2 * behind + 1]) if 2 * behind + 1 < len(pad) else (0, 0)

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along = call.placed
        low, high = elements(along, window)
        before, _ = self._ends(call, along.dim)
        size = call.shape("self")[along.dim]
        return {call["self"].value: (along.dim, _clipped(low - before, high - before, size)[0])}

    def arguments(self, call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        along = call.placed
        low, high = elements(along, window)
        before, _ = self._ends(call, along.dim)
        _, ends = _clipped(low - before, high - before, call.shape("self")[along.dim])
        behind, pad = len(call.shape("self")) - 1 - along.dim, list(call["pad"])
        if 2 * behind + 1 < len(pad):
            pad[2 * behind : 2 * behind + 2] = ends
        return (call["self"], pad, *([] if call["value"] is None else [call["value"]])), {}


def _clipped(low: int, high: int, size: int) -> tuple[Window, tuple[int, int]]:
    """Return a range within a size, and what is missing before and after it."""
    begin, end = min(max(low, 0), size), min(max(high, 0), size)
    return (begin, end), (max(0, min(high, 0) - low), max(0, high - max(low, size)))


def _at(values: Any, dim: int, default: int) -> int:
    """Return an entry of a list of an op's arguments, in which a single number stands for all dimensions."""
    values = [values] if isinstance(values, int) else list(values or ())
    return default if not values else values[0] if len(values) == 1 else values[dim]


class _Sliding(Rule):
    """A convolution or pool: each element of the result reads a window of the operand."""

    def __init__(self, operand: str, fill: float = 0.0) -> None:
        """``fill``: value of padding."""
        self._operand, self._fill = operand, fill

    def _kernel(self, call: Call, spatial: int) -> tuple[int, int, int, int]:
        """Return size, stride, padding and dilation of the kernel in a dimension of space."""
        kernel = _at(call["kernel_size"], spatial, 1)
        return kernel, _at(call["stride"], spatial, kernel), _at(call["padding"], spatial, 0), _at(
            call["dilation"], spatial, 1
        )  # fmt: skip

    def placed(self, call: Call) -> Along:
        along = call.along(self._operand)
        if along is None or [v for v in call.node.reads if v in call.axes] != [call[self._operand].value]:
            raise NotTileable(f"{call.node.name} has the axis in other operands than its input")
        dims = len(call.result) - self._space(call)
        if (along.dim >= dims and along.unit > 1) or 0 < along.dim < dims:
            raise NotTileable(f"{call.node.name} mixes the axis with other dimensions")
        return along

    def _space(self, call: Call) -> int:
        """Return the number of dimensions of space."""
        return len(call["kernel_size"])

    def _spatial(self, call: Call) -> int | None:
        """Return the dimension of space that is the axis; None for an axis of the batch."""
        along = call.placed
        dim = along.dim - len(call.result) + self._space(call)
        return None if dim < 0 else dim

    def _reach(self, call: Call, spatial: int, window: Window) -> Window:
        """Return the range of the operand that a window reads, beyond its borders."""
        kernel, stride, padding, dilation = self._kernel(call, spatial)
        low = window[0] * stride - padding
        return low, (window[1] - 1) * stride - padding + dilation * (kernel - 1) + 1

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along, spatial = call.placed, self._spatial(call)
        value, size = call[self._operand].value, call.shape(self._operand)[along.dim]
        if spatial is None:
            return {value: (along.dim, elements(along, window))}
        return {value: (along.dim, _clipped(*self._reach(call, spatial, window), size)[0])}

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        spatial = self._spatial(call)
        if spatial is None:
            return super().run(call, window, tensors, op)
        along, operand = call.placed, call[self._operand].value
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

    def placed(self, call: Call) -> Along:
        along = super().placed(call)
        spatial = along.dim - len(call.result) + self._space(call)
        counted = call["count_include_pad"] is not False and not call["ceil_mode"]
        if spatial >= 0 and not counted and (_at(call["padding"], spatial, 0) or call["ceil_mode"]):
            raise NotTileable("avg_pool counts the elements within its borders")
        return along


class _Convolution(_Sliding):
    """``convolution``, also transposed."""

    def _space(self, call: Call) -> int:
        return len(call.result) - 2

    def _kernel(self, call: Call, spatial: int) -> tuple[int, int, int, int]:
        kernel = call.shape("weight")[2 + spatial]
        return kernel, *(_at(call[n], spatial, d) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1)))  # pyright: ignore[reportReturnType]

    def _reach(self, call: Call, spatial: int, window: Window) -> Window:
        if not call["transposed"]:
            return super()._reach(call, spatial, window)
        kernel, stride, padding, dilation = self._kernel(call, spatial)
        low = -(-(window[0] + padding - dilation * (kernel - 1)) // stride)
        high = (window[1] - 1 + padding) // stride + 1
        size = call.shape("input")[2 + spatial]
        (begin, end), _ = _clipped(low, high, size)
        return (begin, end) if begin < end else (begin - 1, begin)  # rows between the kernels: bias alone

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        spatial = self._spatial(call)
        if spatial is None or not call["transposed"]:
            return super().run(call, window, tensors, op)
        _, stride, padding, _ = self._kernel(call, spatial)
        begin, _ = self._reach(call, spatial, window)
        paddings = [_at(call["padding"], dim, 0) for dim in range(self._space(call))]
        outputs = [_at(call["output_padding"], dim, 0) for dim in range(self._space(call))]
        paddings[spatial] = outputs[spatial] = 0
        arguments = {**call.arguments, "padding": paddings, "output_padding": outputs, "bias": None}
        result = op(**{name: filled(a, tensors) for name, a in arguments.items()})
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

    def placed(self, call: Call) -> Along:
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
        """Return whether the factors that positions are computed with, where given, are those of the sizes."""
        space = len(call.result) - 2
        names = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[3 - space :]
        given = call["scale_factors"] or [call[name] for name in names]
        sizes = zip(self._operand_shape(call)[2:], call.result[2:], strict=True)
        return all(scale is None or scale * size == result for scale, (size, result) in zip(given, sizes, strict=True))

    def _operand(self, call: Call) -> int:
        return (call["self"] or call["input"]).value

    def _operand_shape(self, call: Call) -> tuple[int, ...]:
        return call.shapes[self._operand(call)]

    def _part(self, call: Call, along: Along, window: Window) -> Window:
        """Return the range of the operand for a window of an axis of space."""
        size = self._operand_shape(call)[along.dim]
        scale = call.result[along.dim] // size
        return _clipped(window[0] // scale - self._reach, -(-window[1] // scale) + self._reach, size)[0]

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along = call.placed
        part = elements(along, window) if along.dim < 2 else self._part(call, along, window)
        return {self._operand(call): (along.dim, part)}

    def run(self, call: Call, window: Window, tensors: Callable[[int], Tensor], op: Callable[..., Any]) -> Any:
        along = call.placed
        if along.dim < 2:
            return super().run(call, window, tensors, op)
        part, space, sizes = tensors(self._operand(call)), len(call.result) - 2, list(call.result[2:])
        scale = call.result[along.dim] // self._operand_shape(call)[along.dim]
        sizes[along.dim - 2] = part.shape[along.dim] * scale
        name = {"upsample_nearest": "nearest", "_upsample_nearest_exact": "nearest-exact"}.get(call.node.name[:-2])
        mode = name or {1: "linear", 2: "bilinear", 3: "trilinear"}[space]
        align = {} if name else {"align_corners": bool(call["align_corners"])}
        result = F.interpolate(part, size=sizes, mode=mode, **align)
        begin = self._part(call, along, window)[0] * scale
        return result.narrow(along.dim, window[0] - begin, window[1] - window[0])


class _ChannelNorm(Rule):
    """A batch norm whose statistics are not over the axis: in evaluation, or where the axis is in the channels, as the
    samples of an instance norm are."""

    def placed(self, call: Call) -> Along:
        along = call.along("input")
        if along is None or (along.dim != 1 and call["training"] is not False):
            raise NotTileable(f"{call.node.name} normalizes over the axis")
        return along

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        along = call.placed
        part = elements(along, window)
        parts = {call["input"].value: (along.dim, part)}
        for name in ("weight", "bias", "running_mean", "running_var"):
            if along.dim == 1 and isinstance(call[name], Ref):
                parts[call[name].value] = 0, part
        return parts


class _Product(Rule):
    """``mm``, ``bmm``, and those that add a tensor: the axis lies in the rows of the first factor, or in the batch of
    both."""

    merges = True

    def __init__(self, first: str, second: str) -> None:
        self._factors = first, second

    def placed(self, call: Call) -> Along:
        first, second = map(call.along, self._factors)
        rank = len(call.result)
        if first is None or first.dim == rank - 1:
            raise NotTileable(f"{call.node.name} sums over the axis")
        batch = first.dim < rank - 2
        whole = second is None and not (batch and first.outer > 1)
        if not whole and not (batch and second == first):
            raise NotTileable(f"{call.node.name} has the axis in both factors")
        if "self" not in self._factors:
            added, dim = call.along("self"), first.dim - rank + len(call.shape("self"))
            if added is None and dim >= 0 and call.shape("self")[dim] != 1:
                raise NotTileable(f"{call.node.name} adds a row for each element of the axis")
            if added not in (None, replace(first, dim=dim)):
                raise NotTileable(f"{call.node.name} adds a tensor with another axis")
        return first

    def needs(self, call: Call, window: Window) -> dict[int, Need]:
        parts = {v: (call.axes[v].dim, elements(call.axes[v], window)) for v in call.node.reads if v in call.axes}
        first, second = (call[name].value for name in self._factors)
        if call.placed.dim < len(call.result) - 2:  # each product of the batch has a second factor of its own
            parts[second] = parts[first]
        return parts


def _not_in(*names: str) -> Callable[[Call, int], bool]:
    """Return whether an op that works along the dimensions of an argument leaves others apart."""

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
    """Return whether a gather reads for each element of the axis those of the same element."""
    return (call["dim"] or 0) % len(call.result) != dim and call.shape("self")[dim] == call.shape("index")[dim]


def _before_normalized(call: Call, dim: int) -> bool:
    return dim < len(call.shape("input")) - len(call["normalized_shape"])


def _first_dim(call: Call, dim: int) -> bool:
    return dim == 0


def _any_mask(call: Call, dim: int) -> bool:
    """Return whether an attention is apart along the batch: its mask is the same for all samples."""
    mask = call["attn_mask"]
    return dim == 0 and (mask is None or len(call.shapes[mask.value]) < 3 or call.shapes[mask.value][0] == 1)


def _counts_nothing(call: Call, dim: int) -> bool:
    """Return whether the derivative of an embedding does not depend on how often an index occurs in the batch."""
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
    order = list(range(rank))
    order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return order


def _inserted(rank: int, dim: int) -> list[int]:
    order = list(range(rank))
    order.insert(dim % (rank + 1), -1)
    return order


def _squeezed(shape: Sequence[int], dim: int) -> list[int]:
    return [d for d in range(len(shape)) if d != dim % len(shape) or shape[d] != 1]
