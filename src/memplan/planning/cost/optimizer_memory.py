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
from memplan.planning.graph.resident import Surroundings
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.simulation.simulate import live_at, simulate
from memplan.trace.record import record_for
from memplan.trace.records import Cause

Optimizer = Callable[[Any], Any]

_NOTHING = Fraction(0)

_Shape = tuple[tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes of an optimizer's update."""

    state: int
    """Bytes of the optimizer's state."""
    most: int
    """Peak bytes of an update beyond parameters, gradients and state."""


def surroundings(
    model: nn.Module, graph: JointGraph, optimizer: Optimizer | None, gradients: GradientUse = STAYS, *,
    home: Home | None = None, outside: Fraction = _NOTHING,
) -> Surroundings:  # fmt: skip
    """Return the memory on the device outside of the graph's values.

    Args:
        model: the model of the graph. Parameters that require a gradient but get none in this graph may get one in
            another step: they have optimizer state and, with accumulation, an accumulated gradient.
        graph: its parameters with a gradient are updated.
        optimizer: a callable of the parameters; None: no update is counted.
        gradients: whether parameters are updated in the backward pass, and whether accumulated gradients exist when the
            step begins.
        home: device of the step; None: the CPU.
        outside: temporary bytes of a loss outside of the graph, for each byte of the tangents.
    """
    home = home or Home()
    loss = int(outside * sum(value.bytes for value in graph.values if value.kind == "tangent"))
    trained, others = {graph.values[of].path for of, _ in graph.gradients}, dict[Cause, int]()
    idle = [p for name, p in model.named_parameters() if p.requires_grad and name not in trained]
    if gradients.adds:
        others["parameter_gradient"] = sum(home.allocated(p.numel() * p.element_size()) for p in idle)
    library_bytes = libraries(graph, home)
    if library_bytes:
        others["workspace"] = library_bytes
    if optimizer is None:
        return Surroundings(others=others, outside=loss, home=home)
    parameters = [graph.values[of] for of, _ in graph.gradients if graph.values[of].kind == "parameter"]
    shapes = [_shape(value) for value in parameters]
    own = update_of(optimizer, shapes, home)
    idle_shapes = [(tuple(p.shape), p.stride(), str(p.dtype).removeprefix("torch.")) for p in idle]
    with_idle = update_of(optimizer, [*shapes, *idle_shapes], home) if idle else own
    others["optimizer_state"] = with_idle.state - own.state
    each = dict[int, int]()
    if gradients.updates:
        by_shape = {shape: update_of(optimizer, [shape], home) for shape in dict.fromkeys(shapes)}
        each = {value.id: by_shape[_shape(value)].most for value in parameters}
    return Surroundings(own.state, (with_idle if gradients.adds else own).most, each, others, loss, home)


def update_of(optimizer: Optimizer, shapes: Sequence[_Shape], home: Home | None = None) -> Update:
    """Record the second update of parameters with these shapes, strides and dtypes, without allocating memory.

    Raises:
        InputError: the optimizer refuses its parameters, or its step cannot be recorded.
    """
    if not shapes:
        return Update(0, 0)

    home = home or Home()

    def build() -> Callable[[], Any]:
        parameters = [
            nn.Parameter(torch.empty_strided(sizes, stride, dtype=getattr(torch, dtype), device=home.type))
            for sizes, stride, dtype in shapes
        ]
        instance = optimizer(parameters)
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
    return Update(state, timeline.steps[1].peak_allocated - live)


_INPUTS = ("weight", "parameter_gradient")


def _shape(value: Value) -> _Shape:
    return value.shape, value.stride, value.dtype
