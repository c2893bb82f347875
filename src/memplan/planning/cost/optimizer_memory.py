"""Memory of an optimizer: its state and the temporaries of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, MemplanError
from memplan.planning.cost.cuda_workspace import libraries
from memplan.planning.graph.joint_graph import JointGraph, Value
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.ops.packed_masters import PackedMasters
from memplan.simulation.simulate import live_at, simulate
from memplan.trace.record import record_for
from memplan.trace.records import Cause

Optimizer = Callable[[Any], Any]

_NOTHING = Fraction(0)

_TensorLayout = tuple[tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes of an optimizer's update."""

    state: int
    """Bytes of the optimizer's state."""
    most: int
    """Peak bytes of an update beyond parameters, gradients and state."""
    packed: int = 0
    """Bytes of the state that are low halves of master weights."""


def memory_outside_graph(
    model: nn.Module, graph: JointGraph, optimizer: Optimizer | None, gradients: GradientUse = STAYS, *,
    home: Home | None = None, loss_bytes_ratio: Fraction = _NOTHING,
) -> OutsideMemory:  # fmt: skip
    """Return the memory that a plan cannot change: optimizer state, accumulated gradients, workspaces of libraries.

    Args:
        model: the model of the graph. Parameters that require a gradient but get none in this graph may get one in
            another step: they have optimizer state and, with accumulation, an accumulated gradient.
        graph: its parameters with a gradient are updated.
        optimizer: a callable of the parameters; None: no update is counted.
        gradients: whether parameters are updated in the backward pass, and whether accumulated gradients exist when the
            step begins.
        home: device of the step; None: the CPU.
        loss_bytes_ratio: temporary bytes of a loss outside of the graph, for each byte of the tangents.
    """
    home = home or Home()
    loss_bytes = int(loss_bytes_ratio * sum(value.bytes for value in graph.values if value.kind == "tangent"))
    trained_names, other_bytes = {graph.values[of].path for of, _ in graph.gradients}, dict[Cause, int]()
    idle_parameters = [p for name, p in model.named_parameters() if p.requires_grad and name not in trained_names]
    if gradients.adds:
        other_bytes["parameter_gradient"] = sum(home.allocated(p.numel() * p.element_size()) for p in idle_parameters)
    library_bytes = libraries(graph, home)
    if library_bytes:
        other_bytes["workspace"] = library_bytes
    if optimizer is None:
        return OutsideMemory(other_bytes=other_bytes, loss_bytes=loss_bytes, home=home)
    parameters = [graph.values[of] for of, _ in graph.gradients if graph.values[of].kind == "parameter"]
    shapes = [_shape_of(value) for value in parameters]
    update = update_of(optimizer, shapes, home)
    idle_shapes = [(tuple(p.shape), p.stride(), str(p.dtype).removeprefix("torch.")) for p in idle_parameters]
    update_with_idle = update_of(optimizer, [*shapes, *idle_shapes], home) if idle_parameters else update
    other_bytes["optimizer_state"] = update_with_idle.state - update.state
    update_bytes = dict[int, int]()
    if gradients.updates:
        by_shape = {shape: update_of(optimizer, [shape], home) for shape in dict.fromkeys(shapes)}
        update_bytes = {value.id: by_shape[_shape_of(value)].most for value in parameters}
    return OutsideMemory(
        state=update.state,
        packed=update.packed,
        update=(update_with_idle if gradients.adds else update).most,
        update_by_parameter=update_bytes,
        other_bytes=other_bytes,
        loss_bytes=loss_bytes,
        home=home,
    )


def update_of(optimizer: Optimizer, shapes: Sequence[_TensorLayout], home: Home | None = None) -> Update:
    """Record the second update of parameters with these shapes, strides and dtypes, without allocating memory.

    Raises:
        InputError: the optimizer refuses its parameters, or its step cannot be recorded.
    """
    if not shapes:
        return Update(0, 0)

    home = home or Home()
    packed = 0

    def build() -> Callable[[], Any]:
        nonlocal packed
        parameters = [
            nn.Parameter(torch.empty_strided(sizes, stride, dtype=getattr(torch, dtype), device=home.type))
            for sizes, stride, dtype in shapes
        ]
        instance = optimizer(parameters)
        if isinstance(instance, PackedMasters):
            packed = instance.packed_bytes
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        return instance.step

    try:
        trace = record_for(build, home.target)
    except MemplanError as error:
        raise InputError(
            f"the optimizer's update cannot be recorded: {error}",
            expected="a callable of the parameters, such as torch.optim.AdamW, whose step() needs no closure",
            do="Pass such a callable, or leave optimizer out: then none is counted",
        ) from error
    timeline = simulate(trace)
    begin = trace.steps[1]
    live = sum(home.allocated(storage.bytes) for storage in live_at(trace, begin))
    inputs = (storage for storage in live_at(trace, trace.steps[0]) if storage.cause in _INPUTS)
    state = live - sum(home.allocated(storage.bytes) for storage in inputs)
    return Update(state, timeline.steps[1].peak_allocated - live, packed)


_INPUTS = ("weight", "parameter_gradient")


def _shape_of(value: Value) -> _TensorLayout:
    return value.shape, value.stride, value.dtype
