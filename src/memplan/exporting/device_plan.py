"""A captured step and a budget -> what runs when on the device, and where everything lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from memplan._bytes import format_bytes
from memplan.errors import BudgetError, InputError
from memplan.exporting.arena.lifetimes import lifetimes
from memplan.exporting.arena.offset_check import check_offsets
from memplan.exporting.arena.offsets import ROUNDS, placed
from memplan.exporting.fused_updates import with_fused, worthwhile
from memplan.exporting.kernels.frozen_weights import quantized, readable
from memplan.exporting.lower import lowered
from memplan.exporting.lowering.device_graph import DeviceGraph
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.exporting.source.program_text import held_of
from memplan.exporting.source.step_layout import Held, Memory, Pass, StepLayout, name_of, tensors_of
from memplan.exporting.tiling.tilings import tilings
from memplan.planning.capture.capture import Captured
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import Surroundings
from memplan.planning.levers.lever import GradientUse
from memplan.planning.plan.budget_error import budget_error
from memplan.planning.request import Request
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.search.search import Found, Heuristics, Search
from memplan.planning.validation.validate import validate

PLACINGS = 60_000
"""Times that a buffer is given an address, in rounds of local search that find no smaller arena."""
QUICK = Heuristics(pairs=False, shakes=0)
"""Of the search where values come in groups: there are many of them."""
Narrow = Literal["float32", "int8"]

EARLY = GradientUse(updates=True)
Inputs = Mapping[int, str]
"""Name of the C argument of each tensor of the call, by its number."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How weights lie in flash."""

    frozen: Narrow = "float32"
    """Those that are not trained, where kernels can read them so."""
    file: bool = False
    """In a file of their own, not in the program."""


@dataclass(frozen=True)
class DevicePlan:
    """Both passes of an export, and figures of what was decided."""

    layout: StepLayout
    around: Surroundings
    """What is in RAM beside the graph's values."""
    levers: tuple[tuple[str, int], ...]
    """What was done one after another, and the bytes in use at once with it."""
    smallest: int
    """Bytes of RAM of the smallest plan that was found."""
    could_be_int8: tuple[Held, ...]
    """Weights in float32 in flash that eight bits would do for."""


def planned_step(
    name: str, asked: Request, captured: Captured, infer: Captured, rules: UpdateRules, stored: Stored
) -> DevicePlan:
    """Plan both passes of an export within its budget.

    Raises:
        BudgetError: no plan fits.
        RecordingError: an op has no kernel.
    """
    graph = _named(captured.graph, asked)
    trained = {of: True for of, _ in graph.gradients if graph.values[of].kind == "parameter"}
    device = lowered(graph, captured.constants, trained)
    paths = {graph.values[of].path for of in trained}
    alone = _forward_only(infer)
    of_infer = {value.id: value.path in paths for value in alone.values if value.kind == "parameter"}
    infer_device = lowered(alone, infer.constants, of_infer)
    memory = _memory(asked, (device.graph, infer_device.graph), paths, stored)
    inputs = _arguments(device.graph, asked)
    around = _beside(memory.floats("trained"), rules, stored)
    step, tiles = _within(device, around, asked.bytes, inputs)
    infer_pass = _alone(infer_device, step.placement.bytes, inputs)
    alone_bytes = infer_pass.placement.bytes + _outside(device, around)
    if alone_bytes > asked.bytes:  # what the model computes alone can take more than a step that computes parts again
        raise _for_device(budget_error(infer_pass.schedule, around, asked.bytes).but(smallest_budget=alone_bytes))
    output = infer_device.graph.values[infer_device.graph.outputs[0]].shape
    layout = StepLayout(name, memory, rules, step, infer_pass, output, stored.file)
    fused, outside = tiles[0].device, _outside(device, around)
    kept = [
        ("everything kept, gradients until the update", device, Choices(in_place=False)),
        ("results in the place of what dies", device, Choices()),
        ("each weight updated as its gradient is made", device, Choices(gradients=EARLY)),
        ("element by element, where that takes less", fused, Choices(gradients=EARLY)),
    ]
    lines = [(words, levels(schedule(one.graph, choices), around).peak - outside) for words, one, choices in kept]
    again = ("results made again, signs as bits: at most", tiles[0].live - outside)
    less = [("a few channels of large values at a time: at most", one.live - outside) for one in tiles[1:]]
    smallest = min(one.bytes for one in tiles)
    narrow = readable((device.graph, infer_device.graph), (one.path for one in memory.frozen))
    could = tuple(one for one in memory.frozen if one.path in narrow)
    return DevicePlan(layout, around, (*lines, again, *less[-1:]), smallest, could)


def _beside(trained: int, rules: UpdateRules, stored: Stored) -> Surroundings:
    """Return what is in RAM beside the graph's values: what the optimizer holds, and a few numbers."""
    numbers = 3 + sum(len(group.logarithms) for group in rules.groups) + stored.file
    return Surroundings(state=4 * (trained * rules.floats + numbers))


def ram_of_updates(asked: Request, captured: Captured, rules: UpdateRules, stored: Stored) -> Callable[..., int]:
    """Return what gives the bytes of RAM of a step that trains some of the parameters.

    It takes their names, and whether to search with all levers; addresses can take a little more.
    """
    graph = _named(captured.graph, asked)

    def ram(paths: Collection[str], levers: bool) -> int:
        kept = tuple(pair for pair in graph.gradients if graph.values[pair[0]].path in paths)
        device = lowered(replace(graph, gradients=kept), captured.constants, {of: True for of, _ in kept})
        fused = with_fused(device, worthwhile(device.graph))
        around = _beside(sum(math.prod(graph.values[of].shape) for of, _ in kept), rules, stored)
        if levers:
            return Search(fused.graph, around, gradients=EARLY).floor_peak
        return levels(schedule(fused.graph, Choices(gradients=EARLY)), around).peak

    return ram


def _outside(device: DeviceGraph, around: Surroundings) -> int:
    """Return the bytes of RAM outside of the arena."""
    return around.held_bytes + sum(v.bytes for v in device.graph.values if v.kind in ("parameter", "buffer", "input"))


@dataclass(frozen=True)
class _Tried:
    """A step with its values in groups of channels, or whole, and the least that it takes."""

    device: DeviceGraph
    live: int
    """Bytes of RAM that are in use at once."""
    bytes: int
    """Bytes of RAM with addresses."""
    fits: Pass | None
    """The fastest pass within the budget."""


def _within(device: DeviceGraph, around: Surroundings, budget: int, inputs: Inputs) -> tuple[Pass, list[_Tried]]:
    """Return a pass that fits a budget with values as large as they can be; and all that was tried, each with a smaller
    peak than the one before."""
    tried = list[_Tried]()
    for tiled in tilings(device):
        search = Search(tiled.graph, around, gradients=EARLY, heuristics=QUICK if tried else None)
        if tried and search.floor_peak >= tried[-1].live:
            break
        tried.append(_tried(tiled, search, budget, inputs, wanted=all(one.fits is None for one in tried)))
    for one in tried:
        if one.fits is not None:
            return one.fits, tried
    least = min(tried, key=lambda one: one.bytes)
    search = Search(least.device.graph, around, gradients=EARLY, heuristics=QUICK)
    error = budget_error(schedule(least.device.graph, search.within(0).choices), around, budget)
    raise _for_device(error.but(smallest_budget=least.bytes))


def _tried(device: DeviceGraph, search: Search, budget: int, inputs: Inputs, wanted: bool) -> _Tried:
    """Find the least that a step takes and, where it is wanted, a pass within the budget.

    The arena can be a little larger than what is there at once: by so much less it is planned again.
    """
    outside, target = _outside(device, search.around), budget
    least = _pass(device, schedule(device.graph, search.within(0).choices), inputs).placement.bytes + outside
    while wanted and least <= budget:
        found = search.within(target)
        step = _pass(device, schedule(device.graph, found.choices), inputs)
        over = step.placement.bytes + outside - budget
        if over <= 0:
            validate(device.graph, step.schedule, surroundings=search.around)
            return _Tried(device, search.floor_peak, least, step)
        assert isinstance(found, Found), "the least fits"
        target = min(target, found.peak) - max(over, 1)
    return _Tried(device, search.floor_peak, least, None)


def _alone(device: DeviceGraph, arena: int, inputs: Inputs) -> Pass:
    """Return the model alone, with values as large as they can be in the arena of the step."""
    best: Pass | None = None
    for tiled in tilings(device):
        made = _pass(tiled, schedule(tiled.graph, Choices()), inputs)
        if best is None or made.placement.bytes < best.placement.bytes:
            best = made
        if best.placement.bytes <= arena:
            break
    assert best is not None, "the first one is as it was"
    return best


def _for_device(error: BudgetError) -> BudgetError:
    """Return the error without ways that a device does not have: it computes in float32."""
    ways = tuple(way for way in error.lower_by if "autocast" not in way.do)
    size = error.smallest_budget
    do = f"Give {format_bytes(size)} ({size} bytes)" + (f", or {'; or '.join(map(str, ways))}" if ways else "")
    return error.but(do=do, lower_by=ways)


def _pass(device: DeviceGraph, made: Schedule, inputs: Inputs) -> Pass:
    lives = lifetimes(made)
    placement = placed(lives.buffers, lives.peak, rounds=min(ROUNDS, PLACINGS // (len(lives.buffers) + 1)))
    check_offsets(lives.buffers, placement.offsets, placement.bytes)
    _check_fused(device, made)
    mine = {value.id: inputs[int(value.path)] for value in device.graph.values if value.kind == "input"}
    return Pass(device, made, lives, placement, mine)


def _check_fused(device: DeviceGraph, made: Schedule) -> None:
    """Assert that no weight is read after its update."""
    of = {device.graph.base(gradient): param for param, gradient in device.graph.gradients}
    updated = set[int]()
    for action in (*made.forward, *made.backward):
        assert updated.isdisjoint(action.reads), "a weight is read after its update"
        updated |= {of[value] for value in action.makes if value in device.fused}


def _forward_only(captured: Captured) -> JointGraph:
    """Return the graph of the model alone, without its backward pass."""
    graph, order = captured.graph, captured.returned.order
    if len(order) != 1:
        raise InputError(
            f"the model returns {len(order)} tensors",
            expected="a model that returns one",
            do="Wrap it in one that does",
        )
    alone = torch.empty(0)
    whole = captured.returned.structure.rebuild([alone])
    if whole is not alone:
        raise InputError(
            f"the model returns a {type(whole).__name__}",
            expected="a model that returns a tensor",
            do="Wrap it in one that does",
        )
    ops = tuple(op for op in graph.ops if op.phase == "forward")
    values = tuple(replace(v, op=None) if v.op is not None and v.op >= len(graph.ops) else v for v in graph.values)
    return replace(
        graph, values=values, ops=ops, outputs=(graph.outputs[order[0]],), gradients=(), mutations=(), forms=()
    )


def _named(graph: JointGraph, asked: Request) -> JointGraph:
    """Return the graph with parameters and buffers under the names that they have in the user's model."""
    if asked.step is asked.model:
        return graph
    named = ("parameter", "buffer")
    return replace(
        graph, values=tuple(replace(v, path=name_of(v.path)) if v.kind in named else v for v in graph.values)
    )


def _arguments(graph: JointGraph, asked: Request) -> dict[int, str]:
    """Return the C name of each tensor of the call, by its number: x, y; more of a kind are numbered."""
    tensors = len(asked.call.tensors)
    targets = getattr(asked.step, "targets", 0)
    inputs = tensors - targets
    names = [f"x{k}" if inputs > 1 else "x" for k in range(inputs)]
    return dict(enumerate([*names, *(f"y{k}" if targets > 1 else "y" for k in range(targets))]))


def _memory(asked: Request, graphs: tuple[JointGraph, ...], trained: set[str], stored: Stored) -> Memory:
    """Lay out what is there from step to step."""
    step = graphs[0]
    read = {value.path for graph in graphs for op in graph.ops for base in op.reads
            if (value := graph.values[base]).kind in ("parameter", "buffer")}  # fmt: skip
    tensors = tensors_of(asked)
    changed = {v.path for v in step.values if v.kind == "buffer" and v.bytes}
    order = [path for path in tensors if path in read | trained | changed]
    shapes = {path: tuple(tensors[path].shape) for path in order}
    frozen = [path for path in order if path not in trained and path not in changed]
    values = {path: tensors[path].detach().numpy().astype(np.float32) for path in order}
    narrow = readable(graphs, frozen) if stored.frozen == "int8" else set()
    int8 = {path: quantized(values[path]) for path in frozen if path in narrow}
    return Memory(
        held_of((path, shapes[path]) for path in order if path in trained),
        held_of((path, shapes[path]) for path in order if path in changed),
        held_of((path, shapes[path]) for path in frozen if path not in int8),
        values,
        held_of((path, shapes[path]) for path in int8),
        held_of((path, shapes[path][:1]) for path in int8),
        int8,
    )
