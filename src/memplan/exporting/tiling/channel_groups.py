"""Compute large values in groups of channels, so that no buffer holds a whole value.

The results stay exact: batch norms, activations and depthwise convolutions read no other channel. A convolution that
reads a split value adds the contribution of each group to the sum of those before it; one that writes a split value
computes the channels of each group alone. Parameters are split alike, and each part is updated as soon as its gradient
is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering.device_graph import INSERT, DeviceGraph, rounded_to_words
from memplan.exporting.tiling.channel_components import (
    Component,
    Sides,
    components,
    connected_values,
    groups_position,
    is_depthwise,
    sides_of,
)
from memplan.exporting.tiling.channel_order import Run, runs_by_component
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, map_refs, refs
from memplan.planning.graph.op_schema import is_contiguous


@dataclass(frozen=True)
class Tiling:
    """The components to split, and the size of their groups."""

    components: tuple[Component, ...]
    limit: int
    """Most bytes of a group's part of the largest value; a group has one channel at least."""

    def bounds(self, component: int) -> list[tuple[int, int]]:
        """Return the half-open range of channels of each group of a component."""
        split = self.components[component]
        count = min(split.channels, -(-split.largest_bytes // max(self.limit, 1)))  # rounded up
        boundaries = [split.channels * k // count for k in range(count + 1)]
        return list(itertools.pairwise(boundaries))


def tiling(graph: JointGraph, limit: int) -> Tiling:
    """Select components with values of more bytes than the limit, largest first, that can all be split together."""
    chosen = list[Component]()
    convolutions = [(op, sides) for op in graph.ops if (sides := sides_of(op)) is not None]
    for component in components(graph):
        if component.largest_bytes > limit and _can_split(graph, [*chosen, component], convolutions):
            chosen.append(component)
    return Tiling(tuple(chosen), limit)


def _can_split(graph: JointGraph, chosen: Sequence[Component], convolutions: Sequence[tuple[GraphOp, Sides]]) -> bool:
    """Return whether components can be split together.

    No convolution may have split values on both sides. A convolution's weight is split along one dimension, and only
    such convolutions may use it or its gradient.
    """
    split = {value for component in chosen for value in component.values}
    if any((parameter in split) != (gradient in split) for parameter, gradient in graph.gradients):
        return False
    along_dim_0: dict[int, bool] = {}
    """By weight that is split: whether along its dimension 0; else along dimension 1."""
    parameter_of = {gradient: parameter for parameter, gradient in graph.gradients}
    allowed_uses = set[tuple[int, int]]()  # (op, weight or its gradient)
    for op, sides in convolutions:
        dim_0, dim_1 = sides.of_dim_0 in split, sides.of_dim_1 in split
        if dim_0 and dim_1:
            return False
        if not (dim_0 or dim_1):
            continue
        weight = parameter_of.get(sides.weight, -1) if op.target == conv.WEIGHT_GRADIENT else sides.weight
        if weight < 0 or graph.values[weight].kind != "parameter" or along_dim_0.setdefault(weight, dim_0) != dim_0:
            return False
        allowed_uses |= {(op.index, weight), (op.index, sides.weight)}
    weights = {*along_dim_0, *(gradient for gradient, weight in parameter_of.items() if weight in along_dim_0)}
    uses = {(op.index, v) for op in graph.ops for v in (*refs((op.args, op.kwargs)), *op.outputs) if v in weights}
    return uses <= allowed_uses and not split & weights


class Groups(Rebuild):
    """Rebuilds a graph with its components split into groups."""

    def __init__(self, device: DeviceGraph, plan: Tiling) -> None:
        graph = device.graph
        values = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
        super().__init__(replace(graph, values=values, forms=()))
        self.plan, self.offsets = plan, dict(device.storage_offsets)
        self.component = {value: k for k, component in enumerate(plan.components) for value in component.values}
        """By value that is split: the position of its component in the plan."""
        self.axis = {value: axis for component in plan.components for value, axis in component.values.items()}
        """By value that is split: the dimension of its channels."""
        self.bounds = [plan.bounds(k) for k in range(len(plan.components))]
        """By component: (first channel, end) of each group."""
        self.parts: dict[tuple[int, int], int] = {}
        """By value and group: the group's part of the value."""
        self.partial_sum: dict[int, int] = {}
        """By value that stays whole: its newest version, with what the groups so far contributed to it."""
        self.component_of_op: dict[int, int] = {}
        """By op: its component."""
        for op in self.graph.ops:
            self._assign_component(op)

    def _assign_component(self, op: GraphOp) -> None:
        """Set the component of an op, and the dimension along which a convolution's weight is split."""
        sides = sides_of(op)
        if sides is None:
            connected = connected_values(self.graph, op) or ()
            if connected and connected[0] in self.component:
                self.component_of_op[op.index] = self.component[connected[0]]
            return
        for side, axis in ((sides.of_dim_0, 0), (sides.of_dim_1, 1)):
            if side in self.component:
                self.component_of_op[op.index] = self.component[side]
                self.axis[sides.weight] = axis
                self.component[sides.weight] = self.component[side]

    def runs(self) -> tuple[Run, ...] | None:
        """Return the order of the ops; None if components would have to wait for each other."""
        return runs_by_component(self.graph, self.component_of_op, self.component)

    # -- parts

    def part(self, value: int, group: int, op: GraphOp) -> int:
        """Return the value that is a group's part of `value`; of a value that is whole in memory, it is a new view, for
        which a slice is added before `op`."""
        if (value, group) not in self.parts:
            first, end = self.bounds[self.component[value]][group]
            whole, axis = self.values[value], self.axis[value]
            shape = (*whole.shape[:axis], end - first, *whole.shape[axis + 1 :])
            if whole.kind in ("parameter", "buffer"):  # each part is a parameter or buffer itself
                size = whole.bytes * (end - first) // whole.shape[axis]
                part = self.value(whole.name, whole, shape=shape, stride=whole.stride, bytes=size)
                self.values[part] = replace(self.values[part], kind=whole.kind, path=whole.path)
                self.offsets[part] = first * whole.stride[axis]
            else:
                part = self.value(whole.name, whole, shape=shape, stride=whole.stride, base=whole.base, bytes=0)
                self.offsets[part] = self.offsets.get(value, 0) + first * whole.stride[axis]
                args = (Ref(value), axis, first, end)
                self.add(_call(op, "aten.slice.Tensor", args, (part,), makes=(), seconds=0.0))
            self.parts[value, group] = part
        return self.parts[value, group]

    def new_part(self, value: int, group: int, op: GraphOp) -> int:
        """Add a group's part of a value that an op computes. The gradient of a weight has the weight's strides."""
        first, end = self.bounds[self.component[value]][group]
        whole, axis = self.values[value], self.axis[value]
        shape = (*whole.shape[:axis], end - first, *whole.shape[axis + 1 :])
        stride = whole.stride if op.target == conv.WEIGHT_GRADIENT else conv.contiguous_strides(shape)
        size = rounded_to_words(whole.bytes * (end - first) // whole.shape[axis])
        part = self.value(whole.name, whole, shape=shape, stride=stride, bytes=size, op=None)
        self.parts[value, group] = part
        return part

    # -- ops

    def run(self, run: Run) -> None:
        """Add the ops of a run, for one group of channels after the other."""
        if run.component is None:
            for op in run.ops:
                self.add(op)
            return
        groups = len(self.bounds[run.component])
        outputs = {value for op in run.ops for value in op.outputs if value is not None}
        for group in range(groups):
            for op in run.ops:
                self._add_for_group(op, group, is_last=group == groups - 1)
        for value in outputs & self.plan.components[run.component].whole:
            for group in range(groups):  # later readers get views of the whole value
                del self.parts[value, group]

    def _add_for_group(self, op: GraphOp, group: int, *, is_last: bool) -> None:
        """Add an op for one group of channels, on the group's parts of split values. If a convolution's result stays
        whole, add the group's contribution to it; if other ops read a split result as a whole, copy the part into
        it."""

        def part_of(value: int) -> Ref:
            return Ref(self.part(value, group, op)) if value in self.component else Ref(value)

        args, kwargs = map_refs(op.args, part_of), map_refs(op.kwargs, part_of)
        result = op.outputs[0]
        if sides_of(op) is not None and result is not None and result not in self.component:
            self._accumulate(op, args, result, is_last=is_last)
            return
        component = self.component_of_op[op.index]
        if is_depthwise(self.graph, op):  # with as many groups as it has channels
            first, end = self.bounds[component][group]
            args = (*args[: groups_position(op)], end - first, *args[groups_position(op) + 1 :])
        outputs = tuple(None if value is None else self.new_part(value, group, op) for value in op.outputs)
        makes = tuple(v for v, value in zip(outputs, op.outputs, strict=True) if value in op.makes and v is not None)
        overwrites = tuple(self._overwritable(op, args, outputs[0]))
        self.add(op, args=args, kwargs=kwargs, outputs=outputs, makes=makes, overwrites=overwrites)
        for value in op.outputs:
            if value is not None and value in self.plan.components[component].whole:
                self._insert(op, value, group, is_last=is_last)

    def _overwritable(self, op: GraphOp, args: tuple[Any, ...], output: int | None) -> Iterator[int]:
        """Yield the argument parts whose memory the output part can reuse."""
        for whole, part in zip(op.args, args, strict=True):
            if isinstance(whole, Ref) and self.values[whole.value].base in op.overwrites and output is not None:
                operand = self.values[part.value]
                # a view has no memory of its own to reuse
                if operand.base == operand.id and operand.bytes == self.values[output].bytes:
                    yield operand.id

    def _accumulate(self, op: GraphOp, args: tuple[Any, ...], whole: int, *, is_last: bool) -> None:
        """Add a convolution for one group of its operand's channels, which adds their part of the sum to `whole`.

        Only the first group's convolution, with nothing before it, adds the bias.
        """
        previous, output = self._next_version(whole, is_last=is_last)
        if previous is not None:
            inputs, _bias, geometry = args[:2], args[2], args[3:]
            args = (*inputs, None, *geometry, Ref(previous))  # see convolution_splitting.ADDEND
        overwrites = () if previous is None else (previous,)
        self.add(op, args=args, outputs=(output,), makes=(output,), overwrites=overwrites)

    def _insert(self, op: GraphOp, whole: int, group: int, *, is_last: bool) -> None:
        """Add the copy of a group's part into the value that other ops read as a whole."""
        previous, output = self._next_version(whole, is_last=is_last)
        first_channel, _ = self.bounds[self.component[whole]][group]
        args = (None if previous is None else Ref(previous), Ref(self.parts[whole, group]), first_channel)
        overwrites = () if previous is None else (previous,)
        self.add(_call(op, INSERT, args, (output,), makes=(output,), overwrites=overwrites))

    def _next_version(self, whole: int, *, is_last: bool) -> tuple[int | None, int]:
        """Return (version of a whole value with the groups so far, None before the first; new version with the next
        group). The version with the last group is the value itself."""
        previous, value = self.partial_sum.get(whole), self.values[whole]
        version = whole
        if not is_last:
            layout = {"shape": value.shape, "stride": value.stride, "bytes": value.bytes}
            version = self.value(value.name, value, **layout, op=None)
        self.partial_sum[whole] = version
        return previous, version

    # -- the graph

    def grouped(self, device: DeviceGraph) -> DeviceGraph:
        """Return the graph after all runs were added."""
        split = {value for value, _ in self.parts if self.values[value].kind in ("parameter", "buffer")}
        for value in split:  # their parts have the bytes
            self.values[value] = replace(self.values[value], bytes=0)
        gradients = tuple(
            pair for parameter, gradient in self.graph.gradients for pair in self._gradients(parameter, gradient)
        )
        graph = replace(self.finished(), gradients=gradients)
        strided = frozenset(parameter for parameter, _ in gradients if not is_contiguous(graph.values[parameter]))
        return replace(device, graph=graph, storage_offsets=self.offsets, strided_parameter_parts=strided)

    def _gradients(self, parameter: int, gradient: int) -> list[tuple[int, int]]:
        """Return [(parameter, gradient)], or such pairs of the parts of each group if the parameter is split."""
        if (parameter, 0) not in self.parts:
            return [(parameter, gradient)]
        groups = range(len(self.bounds[self.component[parameter]]))
        return [(self.parts[parameter, group], self.parts[gradient, group]) for group in groups]


def _call(op: GraphOp, target: str, args: tuple[Any, ...], outputs: tuple[int, ...], **changes: Any) -> GraphOp:
    """Return a new op with phase, layer and source line of `op`."""
    fields: dict[str, Any] = {
        "index": -1, "target": target, "args": args, "kwargs": {}, "outputs": outputs, "returns_tuple": False,
        "overwrites": (), "random": False, "must_run_once": False, "gradient_of": None,
    }  # fmt: skip
    return replace(op, **{**fields, **changes})


def in_groups(device: DeviceGraph, limit: int) -> DeviceGraph | None:
    """Split values of more bytes than a limit into groups of channels within it.

    Returns None if nothing can be split.
    """
    plan = tiling(device.graph, limit)
    while plan.components:
        groups = Groups(device, plan)
        runs = groups.runs()
        if runs is not None:
            for run in runs:
                groups.run(run)
            return groups.grouped(device)
        plan = replace(plan, components=plan.components[:-1])  # without that of the smallest values
    return None
