"""Compute large values a few channels at a time, so that no buffer holds the whole of them.

Exact: a norm's statistics, activations and depthwise convolutions need no other channel. A convolution that reads them
adds what each group contributes to the sum of those before; one that makes them computes the channels of a group alone.
Parameters come apart alike, so that each part is updated as soon as its own gradient is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.exporting.lowering import convolution_splitting as conv
from memplan.exporting.lowering.device_graph import INSERT, DeviceGraph, words
from memplan.exporting.tiling.channel_components import (
    Component,
    Sides,
    components,
    groups_at,
    is_depthwise,
    joined_by,
    sides_of,
)
from memplan.exporting.tiling.channel_order import Run, ordered
from memplan.planning.graph.editor import Rebuild
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value, map_refs, refs
from memplan.planning.graph.op_schema import is_contiguous


@dataclass(frozen=True)
class Tiling:
    """What is split, and into how many channels."""

    components: tuple[Component, ...]
    limit: int
    """Bytes that a group's part of the largest value may take, where that is more than one channel."""

    def bounds(self, component: int) -> list[tuple[int, int]]:
        """Return the first channel of each group, and the one behind its last."""
        of = self.components[component]
        count = min(of.channels, -(-of.largest // max(self.limit, 1)))
        ends = [of.channels * k // count for k in range(count + 1)]
        return list(itertools.pairwise(ends))


def tiling(graph: JointGraph, limit: int) -> Tiling:
    """Choose the components with a value of more bytes than the limit, of which no convolution joins two."""
    chosen = list[Component]()
    convolutions = [(op, sides) for op in graph.ops if (sides := sides_of(op)) is not None]
    for one in components(graph):
        if one.largest > limit and _can_join(graph, [*chosen, one], convolutions):
            chosen.append(one)
    return Tiling(tuple(chosen), limit)


def _can_join(graph: JointGraph, chosen: Sequence[Component], convolutions: Sequence[tuple[GraphOp, Sides]]) -> bool:
    """Return whether these can be split at once: no convolution has groups at both sides, and none of the weights that
    come apart is needed otherwise."""
    split = {value for one in chosen for value in one.values}
    if any((of in split) != (gradient in split) for of, gradient in graph.gradients):
        return False
    ways: dict[int, bool] = {}
    gradients = {gradient: of for of, gradient in graph.gradients}
    allowed = set[tuple[int, int]]()
    for op, sides in convolutions:
        by = [one in split for one in (sides.wide, sides.narrow)]
        if all(by):
            return False
        if not any(by):
            continue
        weight = gradients.get(sides.weight, -1) if op.target == conv.WEIGHT_GRADIENT else sides.weight
        if weight < 0 or graph.values[weight].kind != "parameter" or ways.setdefault(weight, by[0]) != by[0]:
            return False
        allowed |= {(op.index, weight), (op.index, sides.weight)}
    apart = {*ways, *(gradient for gradient, of in gradients.items() if of in ways)}
    used = {(op.index, one) for op in graph.ops for one in (*refs((op.args, op.kwargs)), *op.outputs) if one in apart}
    return used <= allowed and not split & apart


class Groups(Rebuild):
    """A graph in the making whose components come in groups."""

    def __init__(self, device: DeviceGraph, plan: Tiling) -> None:
        graph = device.graph
        values = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
        super().__init__(replace(graph, values=values, forms=()))
        self.plan, self.offsets = plan, dict(device.offsets)
        self.component = {value: at for at, one in enumerate(plan.components) for value in one.values}
        self.axis = {value: axis for one in plan.components for value, axis in one.values.items()}
        self.bounds = [plan.bounds(at) for at in range(len(plan.components))]
        self.parts: dict[tuple[int, int], int] = {}
        """By value and group: the part of it."""
        self.sums: dict[int, int] = {}
        """By value that groups contribute to: what those so far have made of it."""
        self.of: dict[int, int] = {}
        """By op: its component."""
        for op in self.graph.ops:
            self._belongs(op)

    def _belongs(self, op: GraphOp) -> None:
        """Note the component of an op, and how its weights come apart."""
        sides = sides_of(op)
        if sides is None:
            together = joined_by(self.graph, op) or ()
            if together and together[0] in self.component:
                self.of[op.index] = self.component[together[0]]
            return
        for side, axis in ((sides.wide, 0), (sides.narrow, 1)):
            if side in self.component:
                self.of[op.index] = self.component[side]
                self.axis[sides.weight] = axis
                self.component[sides.weight] = self.component[side]

    def order(self) -> tuple[Run, ...] | None:
        """Return the order of the ops; None where there is none."""
        return ordered(self.graph, self.of, self.component)

    # -- parts

    def part(self, value: int, group: int, op: GraphOp) -> int:
        """Return the part of a value that a group has: a view, where other ops made it as a whole."""
        if (value, group) not in self.parts:
            low, high = self.bounds[self.component[value]][group]
            found, axis = self.values[value], self.axis[value]
            if found.kind in ("parameter", "buffer"):
                self.parts[value, group] = self._of_parameter(found, axis, low, high)
            else:
                part = self._as_view(found, axis, low, high)
                args = (Ref(value), axis, low, high)
                self.add(_call(op, "aten.slice.Tensor", args, (part,), makes=(), seconds=0.0))
                self.parts[value, group] = part
        return self.parts[value, group]

    def _of_parameter(self, of: Value, axis: int, low: int, high: int) -> int:
        shape = (*of.shape[:axis], high - low, *of.shape[axis + 1 :])
        size = of.bytes * (high - low) // of.shape[axis]
        number = self.value(of.name, of, shape=shape, stride=of.stride, bytes=size)
        self.values[number] = replace(self.values[number], kind=of.kind, path=of.path)
        self.offsets[number] = low * of.stride[axis]
        return number

    def _as_view(self, of: Value, axis: int, low: int, high: int) -> int:
        shape = (*of.shape[:axis], high - low, *of.shape[axis + 1 :])
        number = self.value(of.name, of, shape=shape, stride=of.stride, base=of.base, bytes=0)
        self.offsets[number] = self.offsets.get(of.id, 0) + low * of.stride[axis]
        return number

    def made(self, value: int, group: int, op: GraphOp) -> int:
        """Add the part of a value that an op makes for a group. A weight's gradient lies as the weight does."""
        low, high = self.bounds[self.component[value]][group]
        of, axis = self.values[value], self.axis[value]
        shape = (*of.shape[:axis], high - low, *of.shape[axis + 1 :])
        stride = of.stride if op.target == conv.WEIGHT_GRADIENT else conv.contiguous(shape)
        size = words(of.bytes * (high - low) // of.shape[axis])
        number = self.value(of.name, of, shape=shape, stride=stride, bytes=size, op=None)
        self.parts[value, group] = number
        return number

    # -- ops

    def run(self, run: Run) -> None:
        """Add the ops of a run, for each group of channels one after the other."""
        if run.component is None:
            for op in run.ops:
                self.add(op)
            return
        groups = len(self.bounds[run.component])
        inside = {one for op in run.ops for one in op.outputs if one is not None}
        for group in range(groups):
            for op in run.ops:
                self._one(op, group, group == groups - 1)
        for one in inside & self.plan.components[run.component].whole:
            for group in range(groups):  # later readers look into the whole of it
                del self.parts[one, group]

    def _one(self, op: GraphOp, group: int, last: bool) -> None:
        """Add an op for one group."""

        def mapped(value: int) -> Ref:
            return Ref(self.part(value, group, op)) if value in self.component else Ref(value)

        args, kwargs = map_refs(op.args, mapped), map_refs(op.kwargs, mapped)
        whole = op.outputs[0]
        if sides_of(op) is not None and whole is not None and whole not in self.component:
            self._contribution(op, args, whole, group, last)
            return
        if is_depthwise(self.graph, op):
            low, high = self.bounds[self.of[op.index]][group]
            args = (*args[: groups_at(op)], high - low, *args[groups_at(op) + 1 :])
        outputs = tuple(None if one is None else self.made(one, group, op) for one in op.outputs)
        makes = tuple(one for one, was in zip(outputs, op.outputs, strict=True) if was in op.makes and one is not None)
        over = tuple(self._overwritten(op, args, outputs[0]))
        self.add(op, args=args, kwargs=kwargs, outputs=outputs, makes=makes, overwrites=over)
        for was in op.outputs:
            if was is not None and was in self.plan.components[self.of[op.index]].whole:
                self._insert(op, was, group, last)

    def _overwritten(self, op: GraphOp, args: tuple[Any, ...], made: int | None) -> Iterator[int]:
        """Return the parts whose memory a part of the result can take over."""
        for before, now in zip(op.args, args, strict=True):
            if isinstance(before, Ref) and self.values[before.value].base in op.overwrites and made is not None:
                found = self.values[now.value]
                if found.base == found.id and found.bytes == self.values[made].bytes:
                    yield found.id

    def _contribution(self, op: GraphOp, args: tuple[Any, ...], whole: int, group: int, last: bool) -> None:
        """Add what one group contributes to a convolution's result."""
        made = self._next(whole, last)
        before = self.sums.get(whole)
        self.sums[whole] = made
        if before is not None:
            bias_added = (*args[:2], None, *args[3:])
            self.add(op, args=(*bias_added, Ref(before)), outputs=(made,), makes=(made,), overwrites=(before,))
        else:
            self.add(op, args=args, outputs=(made,), makes=(made,), overwrites=())

    def _insert(self, op: GraphOp, whole: int, group: int, last: bool) -> None:
        """Add a group's part to the value that others read as a whole."""
        made, before = self._next(whole, last), self.sums.get(whole)
        self.sums[whole] = made
        low = self.bounds[self.component[whole]][group][0]
        args = (None if before is None else Ref(before), Ref(self.parts[whole, group]), low)
        self.add(_call(op, INSERT, args, (made,), makes=(made,), overwrites=() if before is None else (before,)))

    def _next(self, whole: int, last: bool) -> int:
        of = self.values[whole]
        return whole if last else self.value(of.name, of, shape=of.shape, stride=of.stride, bytes=of.bytes, op=None)

    # -- the whole

    def grouped(self, device: DeviceGraph) -> DeviceGraph:
        """Return the graph, once all runs are added."""
        split = {value for value, _ in self.parts if self.values[value].kind in ("parameter", "buffer")}
        for value in split:
            self.values[value] = replace(self.values[value], bytes=0)
        gradients = tuple(pair for of, gradient in self.graph.gradients for pair in self._gradients(of, gradient))
        made = replace(self.finished(), gradients=gradients)
        strided = frozenset(of for of, _ in gradients if not is_contiguous(made.values[of]))
        return replace(device, graph=made, offsets=self.offsets, strided=strided)

    def _gradients(self, of: int, gradient: int) -> list[tuple[int, int]]:
        if (of, 0) not in self.parts:
            return [(of, gradient)]
        count = len(self.bounds[self.component[of]])
        return [(self.parts[of, group], self.parts[gradient, group]) for group in range(count)]


def _call(op: GraphOp, target: str, args: tuple[Any, ...], outputs: tuple[int, ...], **changes: Any) -> GraphOp:
    """Return a new op in the place of one."""
    given: dict[str, Any] = {
        "index": -1, "target": target, "args": args, "kwargs": {}, "outputs": outputs, "multiple": False,
        "overwrites": (), "random": False, "once": False, "gradient_of": None,
    }  # fmt: skip
    return replace(op, **{**given, **changes})


def in_groups(device: DeviceGraph, limit: int) -> DeviceGraph | None:
    """Split values of more bytes than a limit into groups of channels of at most that; None where nothing is split."""
    plan = tiling(device.graph, limit)
    while plan.components:
        groups = Groups(device, plan)
        runs = groups.order()
        if runs is not None:
            for run in runs:
                groups.run(run)
            return groups.grouped(device)
        plan = replace(plan, components=plan.components[:-1])
    return None
