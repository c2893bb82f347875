"""Memory of an optimizer: its state, and the temporaries of an update."""

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
    """Bytes of one update: ``state`` stays, ``most`` is there for a moment beyond parameters, gradients and state."""

    state: int
    most: int


def surroundings(
    model: nn.Module,
    graph: JointGraph,
    optimizer: Optimizer | None,
    gradients: GradientUse = STAYS,
    *,
    home: Home | None = None,
    outside: Fraction = _NOTHING,
) -> Surroundings:
    """Return what is on the device beside the graph's values.

    Args:
        model: what the graph was captured from. Parameters that need a gradient and get none in this graph may get one
            in another step: they have optimizer state, and where gradients are held, theirs are.
        graph: whose parameters with a gradient are updated.
        optimizer: a callable of the parameters; None: no update is counted.
        gradients: whether each parameter is updated by itself, and whether gradients are there when the step begins.
        home: where the step runs; None: on the CPU.
        outside: bytes that a loss outside of the graph holds for a moment, for each byte of the tangents.
    """
    home = home or Home()
    loss = int(outside * sum(value.bytes for value in graph.values if value.kind == "tangent"))
    idle, others = _untrained(model, graph), dict[Cause, int]()
    if gradients.adds:
        others["parameter_gradient"] = sum(home.taken(one.numel() * one.element_size()) for one in idle)
    kept = libraries(graph, home)
    if kept:
        others["workspace"] = kept
    if optimizer is None:
        return Surroundings(others=others, outside=loss, home=home)
    parameters = [graph.values[of] for of, _ in graph.gradients if graph.values[of].kind == "parameter"]
    shapes = [_shape(value) for value in parameters]
    own = update_of(optimizer, shapes, home)
    all_ = update_of(optimizer, [*shapes, *map(_shape_of, idle)], home) if idle else own
    others["optimizer_state"] = all_.state - own.state
    alone = {shape: update_of(optimizer, [shape], home) for shape in dict.fromkeys(shapes)} if gradients.updates else {}
    each = {value.id: alone[_shape(value)].most for value in parameters} if gradients.updates else {}
    return Surroundings(own.state, (all_ if gradients.adds else own).most, each, others, loss, home)


def update_of(optimizer: Optimizer, shapes: Sequence[_Shape], home: Home | None = None) -> Update:
    """Record the second update of parameters of these shapes, strides and dtypes; nothing is allocated.

    Raises:
        InputError: the optimizer refuses its parameters, or its step cannot be recorded.
    """
    if not shapes:
        return Update(0, 0)

    home = home or Home()

    def build() -> Callable[[], Any]:
        parameters = [_parameter(shape, home.type) for shape in shapes]
        made = optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        return made.step

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
    held = sum(home.taken(s.bytes) for s in live_at(trace, begin))
    given = sum(home.taken(s.bytes) for s in live_at(trace, trace.steps[0]) if s.cause in _GIVEN)
    return Update(held - given, timeline.steps[1].peak_allocated - held)


_GIVEN = ("weight", "parameter_gradient")


def _parameter(shape: _Shape, place: str) -> nn.Parameter:
    sizes, stride, dtype = shape
    return nn.Parameter(torch.empty_strided(sizes, stride, dtype=getattr(torch, dtype), device=place))


def _shape(value: Value) -> _Shape:
    return value.shape, value.stride, value.dtype


def _shape_of(tensor: torch.Tensor) -> _Shape:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch.")


def _untrained(model: nn.Module, graph: JointGraph) -> list[nn.Parameter]:
    """Return the model's parameters that need a gradient and get none in the graph."""
    given = {graph.values[of].path for of, _ in graph.gradients}
    return [one for name, one in model.named_parameters() if one.requires_grad and name not in given]
