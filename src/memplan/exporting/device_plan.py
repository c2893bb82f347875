"""Plan a captured step within a budget: what runs when on the device, and where everything lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from memplan._bytes import format_bytes
from memplan.errors import BudgetError, InputError
from memplan.exporting.arena.lifetimes import lifetimes
from memplan.exporting.arena.offset_check import check_offsets
from memplan.exporting.arena.offsets import ROUNDS, choose_offsets
from memplan.exporting.fused_updates import parameters_worth_fusing, with_fused_updates
from memplan.exporting.kernels.frozen_weights import (
    LARGEST_INT8,
    Quantized,
    parameters_readable_in_int8,
    quantized,
    trainable,
)
from memplan.exporting.lower import lowered
from memplan.exporting.lowering.arena_input import IN_ARENA
from memplan.exporting.lowering.device_graph import WORD, DeviceGraph
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.exporting.source.step_layout import (
    INPUT,
    TARGET,
    Memory,
    Pass,
    PersistentTensor,
    StepLayout,
    one_after_another,
    state_members,
    tensors_of,
)
from memplan.exporting.step_outputs import CapturedStep
from memplan.exporting.tiling.tilings import USUAL_OP_LIMIT, tilings
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.plan.budget_error import budget_error
from memplan.planning.request import Request
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import base_level, levels
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.search.search import Heuristics, Search, Solution
from memplan.planning.validation.validate import validate

PLACEMENT_LIMIT = 60_000
"""Buffer placements without a smaller arena after which the local search for offsets ends."""
QUICK = Heuristics(pairs=False, shakes=0)
"""A quick search, for steps whose many values are in groups of channels."""
WeightType = Literal["float32", "int8"]
HEADROOM = 1.25
"""Range of a weight that is trained in eight bits, over its largest magnitude at export, for each output channel: over
five seeds of two trainings accuracies were those of 1, and fewer weights stood at their bounds (docs/export.md)."""

Inputs = Mapping[int, str]
"""Name of the C argument of each tensor of the call, by its position."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Where weights and arena lie."""

    frozen_type: WeightType = "float32"
    """Type of the frozen weights, where kernels can read it."""
    trained_type: WeightType = "float32"
    """Type of the trained weights, likewise."""
    in_weights_file: bool = False
    """Whether weights are in a file instead of the program."""
    separate_arena: bool = False
    """Whether the caller gives memory for the arena besides that of the state."""
    arena_input: str = ""
    """Position, as a text, of the input that lies in the arena; empty if none does."""

    @property
    def pointers(self) -> int:
        """Number of pointers in the state."""
        return self.in_weights_file + self.separate_arena


@dataclass(frozen=True)
class DevicePlan:
    """Both passes of an export, with the memory that they take."""

    layout: StepLayout
    outside_memory: OutsideMemory
    """RAM besides the graph's values: optimizer state and counters."""
    lever_peaks: tuple[tuple[str, int], ...]
    """The memory techniques, each on top of those before, with the most bytes of the arena then live."""
    smallest_bytes: int
    """Bytes of RAM of the smallest plan."""
    could_be_int8: tuple[PersistentTensor, ...]
    """Frozen weights in float32 that kernels could read as int8."""


def planned_step(
    name: str, request: Request, captured: CapturedStep, infer: CapturedStep, rules: UpdateRules, stored: StorageOptions
) -> DevicePlan:
    """Plan both passes of an export within the budget of the request.

    Args:
        name: a C identifier for files and functions.
        request: the step and its budget.
        captured: the captured step.
        infer: its forward pass in evaluation mode.
        rules: the optimizer's update rules.
        stored: where weights and arena lie.

    Raises:
        BudgetError: no plan fits.
        RecordingError: an op has no kernel.
    """
    device, infer_device, memory = _lowered_passes(request, captured, infer, stored)
    inputs = _argument_names(request)
    padding = -memory.elements("trained_int8") % WORD  # the state has whole words of weights in eight bits
    surroundings = _outside_memory(memory.elements("trained"), rules, stored, padding)
    use = rules.gradients.use
    outside_arena = _outside_arena(device, surroundings, use)
    step, tiles = _step_within(device, surroundings, request.bytes, inputs, use)
    infer_pass = _infer_pass(infer_device, step.placement.bytes, inputs)
    infer_bytes = infer_pass.placement.bytes + outside_arena
    if infer_bytes > request.bytes:  # `infer` recomputes nothing, so it can take more than the step
        error = budget_error(infer_pass.schedule, surroundings, request.bytes)
        raise _for_device(error.but(smallest_budget=infer_bytes))
    layout = StepLayout(
        name,
        memory,
        rules,
        step,
        infer_pass,
        captured.outputs,
        infer.outputs,
        stored.in_weights_file,
        stored.separate_arena,
    )
    peaks = _peaks(device, tiles, surroundings, use)
    levers = tuple((technique, peak - outside_arena) for technique, peak in peaks)
    readable_in_int8 = parameters_readable_in_int8(
        (device.graph, infer_device.graph), (tensor.path for tensor in memory.frozen)
    )
    could_be_int8 = tuple(tensor for tensor in memory.frozen if tensor.path in readable_in_int8)
    return DevicePlan(layout, surroundings, levers, min(tile.ram for tile in tiles), could_be_int8)


def _lowered_passes(
    request: Request, captured: CapturedStep, infer: CapturedStep, stored: StorageOptions
) -> tuple[DeviceGraph, DeviceGraph, Memory]:
    """Return the step and the inference pass in the device's kernels, and the tensors that both read."""
    graph = captured.graph
    trained = {parameter: True for parameter, _ in graph.gradients if graph.values[parameter].kind == "parameter"}
    device = lowered(graph, captured.constants, trained, captured.returned_values, stored.arena_input)
    paths = {graph.values[parameter].path for parameter in trained}
    infer_trained = {value.id: value.path in paths for value in infer.graph.values if value.kind == "parameter"}
    infer_device = lowered(infer.graph, infer.constants, infer_trained, infer.returned_values, stored.arena_input)
    memory = _memory(request, (device.graph, infer_device.graph), paths, stored)
    in_int8 = {tensor.path for tensor in memory.trained_int8}
    return _with_int8(device, in_int8), _with_int8(infer_device, in_int8), memory


def _with_int8(device: DeviceGraph, paths: Collection[str]) -> DeviceGraph:
    """Return the graph with the parameters of these names in eight bits: a byte an element."""
    values = tuple(
        replace(value, bytes=math.prod(value.shape)) if value.kind == "parameter" and value.path in paths else value
        for value in device.graph.values
    )
    return replace(device, graph=replace(device.graph, values=values))


def state_and_inputs(
    request: Request, captured: CapturedStep, infer: CapturedStep, rules: UpdateRules, stored: StorageOptions
) -> tuple[int, int, int]:
    """Return the bytes of the state struct without the arena, of the inputs, and of the weights in flash: they are the
    same in all plans. Arguments are those of `planned_step`."""
    device, _, memory = _lowered_passes(request, captured, infer, stored)
    state = 4 * (sum(count for _, count in state_members(memory, rules)) + stored.pointers)
    inputs = sum(value.bytes for value in device.graph.values if value.kind == "input")
    return state, inputs, memory.flash_bytes


def _peaks(
    device: DeviceGraph, tiles: Sequence[_TiledStep], surroundings: OutsideMemory, use: GradientUse
) -> Iterator[tuple[str, int]]:
    """Yield the memory techniques, each on top of those before, with the most bytes of RAM then live."""

    def peak(variant: DeviceGraph, **choices: Any) -> int:
        return levels(schedule(variant.graph, Choices(**choices)), surroundings).peak

    late_update = use if use.accumulates else KEPT_UNTIL_UPDATE  # gradients that are added up have no earlier use
    yield "everything kept, gradients until the update", peak(device, in_place=False, gradients=late_update)
    yield "results in the place of what dies", peak(device, gradients=late_update)
    if use.updates_early:
        yield "each weight updated as its gradient is made", peak(device, gradients=use)
    yield "element by element, where that takes less", peak(tiles[0].device, gradients=use)
    yield "results recomputed, signs as bits: at most", tiles[0].least_live
    if tiles[1:]:
        yield "a few channels of large values at a time: at most", tiles[-1].least_live


def _outside_memory(trained: int, rules: UpdateRules, stored: StorageOptions, padding: int = 0) -> OutsideMemory:
    """Return the RAM besides the graph's values and gradients that stay until the update.

    It has ``padding`` bytes and, each of 4 bytes, the elements of the optimizer's state of ``trained`` weights, its
    counters, and the pointers to weights and arena stored elsewhere.
    """
    words = trained * len(rules.arrays) + rules.counters_and_factors + stored.pointers
    return OutsideMemory(state_bytes=WORD * words + padding)


def ram_by_trained_set(captured: CapturedStep, rules: UpdateRules, stored: StorageOptions) -> Callable[..., int]:
    """Return a function that gives the bytes of RAM of a step that trains only some of the parameters.

    Its arguments are the names of these parameters, and whether to search with all memory techniques. The bytes are
    those live at once; the arena can be a little larger.
    """
    graph, use = captured.graph, rules.gradients.use

    def ram(paths: Collection[str], all_techniques: bool) -> int:
        gradients = tuple(pair for pair in graph.gradients if graph.values[pair[0]].path in paths)
        trained = {parameter: True for parameter, _ in gradients}
        reduced = replace(graph, gradients=gradients)
        device = lowered(reduced, captured.constants, trained, captured.returned_values, stored.arena_input)
        fused = with_fused_updates(device, parameters_worth_fusing(device.graph, use), use)
        weights = sum(math.prod(graph.values[parameter].shape) for parameter in trained)
        outside_memory = _outside_memory(weights, rules, stored)
        if all_techniques:
            return Search(fused.graph, outside_memory, gradients=use).floor_peak
        return levels(schedule(fused.graph, Choices(gradients=use)), outside_memory).peak

    return ram


def _outside_arena(device: DeviceGraph, surroundings: OutsideMemory, use: GradientUse) -> int:
    """Return the bytes of RAM outside of the arena."""
    return base_level(device.graph, Choices(gradients=use), surroundings)


@dataclass(frozen=True)
class _TiledStep:
    """A step whose values are whole or in groups of channels, and the RAM that it takes."""

    device: DeviceGraph
    least_live: int
    """Bytes of RAM that are live at once in its smallest plan."""
    ram: int
    """Bytes of RAM of that plan, with the whole arena."""
    fastest: Pass | None
    """The fastest pass within the budget; None if none fits, or a coarser tiling has one."""


def _step_within(
    device: DeviceGraph, surroundings: OutsideMemory, budget: int, inputs: Inputs, use: GradientUse
) -> tuple[Pass, list[_TiledStep]]:
    """Return the pass of the coarsest tiling that fits a budget, and all tilings, each smaller than the one before.

    Raises:
        BudgetError: no tiling fits.
    """
    tiles = list[_TiledStep]()
    for tiled in tilings(device, use):
        has_pass = any(tile.fastest is not None for tile in tiles)
        if has_pass and len(tiled.graph.ops) > USUAL_OP_LIMIT:
            break
        search = Search(tiled.graph, surroundings, gradients=use, heuristics=QUICK if tiles else None)
        if tiles and search.floor_peak >= tiles[-1].least_live:
            break
        tiles.append(_planned_tiling(tiled, search, budget, inputs, with_pass=not has_pass))
    for tile in tiles:
        if tile.fastest is not None:
            return tile.fastest, tiles
    smallest = min(tiles, key=lambda tile: tile.ram)
    search = Search(smallest.device.graph, surroundings, gradients=use, heuristics=QUICK)
    error = budget_error(schedule(smallest.device.graph, search.within(0).choices), surroundings, budget)
    raise _for_device(error.but(smallest_budget=smallest.ram))


def _planned_tiling(device: DeviceGraph, search: Search, budget: int, inputs: Inputs, *, with_pass: bool) -> _TiledStep:
    """Find the fewest bytes that a step takes and, if `with_pass`, the fastest pass within the budget.

    The arena can be larger than the live bytes that the search bounds, so the search repeats with a smaller target.
    """
    outside_arena, target = _outside_arena(device, search.outside_memory, search.gradients), budget
    smallest_plan = search.within(0).choices  # 0: no plan fits, so the search returns the smallest
    smallest_pass = _placed_pass(device, schedule(device.graph, smallest_plan), inputs)
    least_ram = smallest_pass.placement.bytes + outside_arena
    while with_pass and least_ram <= budget:
        result = search.within(target)
        step = _placed_pass(device, schedule(device.graph, result.choices), inputs)
        excess = step.placement.bytes + outside_arena - budget
        if excess <= 0:
            validate(device.graph, step.schedule, outside_memory=search.outside_memory)
            return _TiledStep(device, search.floor_peak, least_ram, step)
        assert isinstance(result, Solution), "the least fits"
        target = min(target, result.peak) - excess
    return _TiledStep(device, search.floor_peak, least_ram, fastest=None)


def _infer_pass(device: DeviceGraph, arena: int, inputs: Inputs) -> Pass:
    """Return the pass of the model without loss in the coarsest tiling that fits the step's arena, or the smallest."""
    best: Pass | None = None
    for tiled in tilings(device, KEPT_UNTIL_UPDATE):
        infer = _placed_pass(tiled, schedule(tiled.graph, Choices()), inputs)
        if best is None or infer.placement.bytes < best.placement.bytes:
            best = infer
        if best.placement.bytes <= arena:
            break
    assert best is not None, "the first one is as it was"
    return best


def _for_device(error: BudgetError) -> BudgetError:
    """Return the error without the advice to use autocast: kernels compute in float32."""
    remedies = tuple(remedy for remedy in error.lower_by if "autocast" not in remedy.do)
    size = error.smallest_budget
    do = f"Give {format_bytes(size)} ({size} bytes)" + (f", or {'; or '.join(map(str, remedies))}" if remedies else "")
    return error.but(do=do, lower_by=remedies)


def _placed_pass(device: DeviceGraph, order: Schedule, inputs: Inputs) -> Pass:
    """Return the pass of a schedule, with the offsets of its buffers chosen and checked."""
    lives = lifetimes(order)
    placement = choose_offsets(
        lives.buffers, lives.peak_bytes, rounds=min(ROUNDS, PLACEMENT_LIMIT // (len(lives.buffers) + 1))
    )
    check_offsets(lives.buffers, placement.offsets, placement.bytes)
    _check_fused(device, order)
    arguments = {value.id: inputs[int(value.path)] for value in device.graph.values if value.kind == "input"}
    return Pass(device, order, lives, placement, arguments)


def _check_fused(device: DeviceGraph, order: Schedule) -> None:
    """Assert that no weight is read after its fused update, where gradients are not added up."""
    if order.choices.gradients.accumulates:
        return
    parameter_of = {device.graph.base(gradient): parameter for parameter, gradient in device.graph.gradients}
    updated = set[int]()
    for action in (*order.forward, *order.backward):
        assert updated.isdisjoint(action.reads), "a weight is read after its update"
        updated |= {parameter_of[value] for value in action.makes if value in device.fused_gradients}


def largest_input(request: Request) -> str:
    """Return the position, as a text, of the largest input of the model that can lie in the arena.

    Raises:
        InputError: all inputs are integers of more than eight bits.
    """
    names = _argument_names(request)
    sizes = {
        str(position): tensor.numel() * tensor.element_size()
        for position, tensor in enumerate(request.call.tensors)
        if names[position].startswith(INPUT) and str(tensor.dtype).removeprefix("torch.") in IN_ARENA
    }
    if not sizes:
        raise InputError(
            "input_in_arena=True, and all inputs are integers of more than eight bits",
            expected="an input in float32, uint8 or int8", do="Leave it out: such inputs are small",
        )  # fmt: skip
    return max(sizes, key=lambda position: sizes[position])


def _argument_names(request: Request) -> dict[int, str]:
    """Return the C name of each tensor of the call, by its position: x for an input, y for a target, or x0, x1, ..."""
    target_count = getattr(request.step, "targets", 0)
    input_count = len(request.call.tensors) - target_count
    names = [
        f"{letter}{k}" if count > 1 else letter
        for letter, count in ((INPUT, input_count), (TARGET, target_count))
        for k in range(count)
    ]
    return dict(enumerate(names))


def _memory(request: Request, graphs: tuple[JointGraph, ...], trained: set[str], stored: StorageOptions) -> Memory:
    """Lay out the parameters and buffers that the graphs read or change; the first graph is the step's."""
    step = graphs[0]
    read = {value.path for graph in graphs for op in graph.ops for base in op.reads
            if (value := graph.values[base]).kind in ("parameter", "buffer")}  # fmt: skip
    tensors = tensors_of(request)
    changed = {v.path for v in step.values if v.kind == "buffer" and v.bytes}  # those in flash have no bytes of RAM
    order = [path for path in tensors if path in read | trained | changed]
    shapes = {path: tuple(tensors[path].shape) for path in order}
    frozen = [path for path in order if path not in trained and path not in changed]
    values = {path: tensors[path].detach().numpy().astype(np.float32) for path in order}
    frozen_in_int8 = parameters_readable_in_int8(graphs, frozen) if stored.frozen_type == "int8" else set()
    trained_in_int8 = parameters_readable_in_int8(graphs, trained) if stored.trained_type == "int8" else set()
    frozen_int8 = {path: quantized(values[path]) for path in frozen if path in frozen_in_int8}
    trained_int8 = {path: _trainable(path, values[path]) for path in order if path in trained_in_int8}
    return Memory(
        trained=one_after_another(
            (path, shapes[path]) for path in order if path in trained and path not in trained_int8
        ),
        statistics=one_after_another((path, shapes[path]) for path in order if path in changed),
        frozen=one_after_another((path, shapes[path]) for path in frozen if path not in frozen_int8),
        initial_values=values,
        int8=one_after_another((path, shapes[path]) for path in frozen_int8),
        scales=one_after_another((path, shapes[path][:1]) for path in (*frozen_int8, *trained_int8)),
        trained_int8=one_after_another((path, shapes[path]) for path in trained_int8),
        quantized=frozen_int8 | trained_int8,
    )


def _trainable(path: str, weight: np.ndarray) -> Quantized:
    """Round a weight that is trained in eight bits. Raises InputError if it has no range, or one beyond float32."""
    if not weight.any():
        raise InputError(
            f"{path} has zeros alone", expected="weights whose largest magnitude is the range of the eight bits",
            do="Initialize it, or train in float32: leave out trained_weights='int8'",
        )  # fmt: skip
    largest, floats = float(np.abs(weight).max()), np.finfo(np.float32)
    # scales, `largest * HEADROOM / LARGEST_INT8`, have to be normal numbers
    if not LARGEST_INT8 * float(floats.tiny) <= largest * HEADROOM <= float(floats.max):
        raise InputError(
            f"{path} has a largest magnitude of {largest:g}, and {HEADROOM:g} times that is no range of eight bits in "
            "float32", expected="weights of usual size",
            do="Initialize it, or train in float32: leave out trained_weights='int8'",
        )  # fmt: skip
    return trainable(weight, HEADROOM)
