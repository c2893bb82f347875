"""What an optimizer holds: its state, and the bytes of a moment while it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import InputError, MemplanError
from memplan.planning.graph import JointGraph, Value
from memplan.planning.peaks import Surroundings
from memplan.simulation.liveness import simulate
from memplan.trace.model import HOST
from memplan.trace.record import record

Optimizer = Callable[[Any], Any]

_Shape = tuple[tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes of one update: ``state`` stays, ``most`` is there for a moment beyond parameters, gradients and state."""

    state: int
    most: int


def surroundings(
    graph: JointGraph, optimizer: Optimizer | None, *, early: bool = False, other_bytes: int = 0
) -> Surroundings:
    """What there is beside the graph's values.

    Args:
        graph: whose parameters with a gradient are updated.
        optimizer: a callable of the parameters; None: no update is counted.
        early: each parameter is updated by itself.
        other_bytes: what else is there all the time (parameters that the step does not read).
    """
    if optimizer is None:
        return Surroundings(held_bytes=other_bytes)
    parameters = [graph.values[of] for of, _ in graph.gradients if graph.values[of].kind == "parameter"]
    whole = update_of(optimizer, [_shape(value) for value in parameters])
    alone = dict[_Shape, Update]()
    if early:
        alone = {shape: update_of(optimizer, [shape]) for shape in dict.fromkeys(_shape(v) for v in parameters)}
    each = {value.id: alone[_shape(value)].most for value in parameters} if early else {}
    return Surroundings(other_bytes + whole.state, whole.most, each)


def update_of(optimizer: Optimizer, shapes: Sequence[_Shape]) -> Update:
    """Record the second update of parameters of these shapes, strides and dtypes; nothing is allocated.

    Raises:
        InputError: the optimizer refuses its parameters, or its step cannot be recorded.
    """
    if not shapes:
        return Update(0, 0)

    def build() -> Callable[[], Any]:
        parameters = [_parameter(shape) for shape in shapes]
        made = optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        return made.step

    try:
        trace = record(build, device=HOST)
    except MemplanError as error:
        raise InputError(
            f"the optimizer's update cannot be recorded: {error}",
            expected="a callable of the parameters, such as torch.optim.AdamW, whose step() needs no closure",
            do="Pass such a callable, or leave optimizer out: then none is counted",
        ) from error
    timeline = simulate(trace)
    begin = trace.steps[1]
    held = sum(s.bytes for s in trace.storages if s.born <= begin and (s.died is None or s.died > begin))
    given = sum(s.bytes for s in trace.storages if s.born <= trace.steps[0] and s.cause in _GIVEN)
    return Update(held - given, timeline.steps[1].peak_allocated - held)


_GIVEN = ("weight", "parameter_gradient")


def _parameter(shape: _Shape) -> nn.Parameter:
    sizes, stride, dtype = shape
    return nn.Parameter(torch.empty_strided(sizes, stride, dtype=getattr(torch, dtype)))


def _shape(value: Value) -> _Shape:
    return value.shape, value.stride, value.dtype


def bytes_beside(model: nn.Module, graph: JointGraph) -> int:
    """Bytes of the model's parameters and buffers that the graph does not read."""
    read = {value.path for value in graph.values if value.kind in ("parameter", "buffer")}
    named = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    seen = {_storage(tensor) for name, tensor in named.items() if name in read}
    beside = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in named.values()}
    return sum(size for storage, size in beside.items() if storage not in seen)


def _storage(tensor: torch.Tensor) -> int:
    return _torch.storage_key(tensor.untyped_storage())
