"""Memory of an optimizer: its state and the temporaries of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import InputError, MemplanError, UsageError
from memplan.planning.cost.cuda_workspace import library_workspaces
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.ops.eight_bit_moments import EightBitMoments, has_counterpart
from memplan.planning.ops.packed_masters import PackedMasters
from memplan.simulation.simulate import live_at, simulate
from memplan.trace.record import record_for
from memplan.trace.records import HOST, Cause

Optimizer = Callable[[Any], Any]

_NOTHING = Fraction(0)

_TensorLayout = tuple[tuple[int, ...], tuple[int, ...], str]
"""Shape, strides and dtype of a tensor."""


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes of an optimizer's update."""

    state_bytes: int
    """Bytes of the optimizer's state."""
    peak_bytes: int
    """Peak bytes that an update allocates in addition to parameters, gradients and state."""
    packed_half_bytes: int = 0
    """Bytes of the state that are low halves of master weights, of which the parameters are the high halves."""
    moments_fit_8_bits: bool = False
    """Whether there is a counterpart of the optimizer with moments in 8 bits."""


class RecordedUpdates:
    """Updates that were recorded for a step. Its studies in other precisions, layouts or pieces need the same ones,
    and to record one with moments in 8 bits takes seconds where torchao compiles it."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[int, bool, tuple[_TensorLayout, ...], Home], tuple[Optimizer, Update]] = {}
        """By id() of the user's optimizer, which is kept alive, whether moments are in 8 bits, parameters and home."""

    def update_of(self, optimizer: Optimizer, layouts: Sequence[_TensorLayout], home: Home) -> Update:
        """Return what the function `update_of` returns; it is called for the same arguments once."""
        in_8_bits = isinstance(optimizer, EightBitMoments)
        users = optimizer.exact if isinstance(optimizer, EightBitMoments) else optimizer
        key = id(users), in_8_bits, tuple(layouts), home
        if key not in self._recorded:
            self._recorded[key] = users, update_of(optimizer, layouts, home)
        _, update = self._recorded[key]
        return update


def memory_outside_graph(
    model: nn.Module, graph: JointGraph, optimizer: Optimizer | None, gradients: GradientUse = KEPT_UNTIL_UPDATE, *,
    home: Home | None = None, loss_bytes_ratio: Fraction = _NOTHING, tensors: Mapping[int, torch.Tensor] | None = None,
    recorded: RecordedUpdates | None = None,
) -> OutsideMemory:  # fmt: skip
    """Return the memory that a plan cannot change: optimizer state, accumulated gradients, workspaces of libraries.
    The fields of `OutsideMemory` say what each number counts.

    Args:
        model: the model of the graph. Parameters that require a gradient but get none in this graph may get one in
            another step: they have optimizer state and, with accumulation, an accumulated gradient.
        graph: its parameters with a gradient are updated.
        optimizer: a callable of the parameters; None: no update is counted.
        gradients: whether parameters are updated in the backward pass, and whether accumulated gradients exist when the
            step begins.
        home: device of the step; None: the CPU.
        loss_bytes_ratio: temporary bytes of a loss outside of the graph, for each byte of the tangents, which are the
            gradients of the model's outputs; 0 if the graph has the loss.
        tensors: inputs of the step and constants of its graph, by value, for their addresses on a card; None: they are
            not there yet.
        recorded: updates that were recorded before; new ones are added.
    """
    home = home or Home()
    addresses = _addresses(graph, model, tensors or {}, home)
    loss_bytes = int(loss_bytes_ratio * sum(value.bytes for value in graph.values if value.kind == "tangent"))
    trained = [graph.values[value] for value, _ in graph.gradients]
    trained_names, other_bytes = {value.path for value in trained}, dict[Cause, int]()
    # parameters that get their gradients in other steps
    idle_parameters = [p for name, p in model.named_parameters() if p.requires_grad and name not in trained_names]
    if gradients.accumulates:
        other_bytes["parameter_gradient"] = sum(home.allocated(p.numel() * p.element_size()) for p in idle_parameters)
    workspace_by_op = library_workspaces(graph, home)
    if workspace_by_op:
        other_bytes["workspace"] = sum(workspace_by_op.values())
    without_update = OutsideMemory(
        other_bytes=other_bytes, workspace_by_op=workspace_by_op, loss_bytes=loss_bytes, home=home, addresses=addresses,
    )  # fmt: skip
    if optimizer is None:
        return without_update
    recorded = recorded or RecordedUpdates()
    parameters = [value for value in trained if value.kind == "parameter"]  # the others are inputs
    layouts: list[_TensorLayout] = [(value.shape, value.stride, value.dtype) for value in parameters]
    update = recorded.update_of(optimizer, layouts, home)
    idle_layouts = [(tuple(p.shape), p.stride(), str(p.dtype).removeprefix("torch.")) for p in idle_parameters]
    update_with_idle = recorded.update_of(optimizer, [*layouts, *idle_layouts], home) if idle_parameters else update
    idle_state_bytes = update_with_idle.state_bytes - update.state_bytes
    moment_bytes_saved = 0
    if isinstance(optimizer, EightBitMoments):
        moment_bytes_saved = recorded.update_of(optimizer.exact, layouts, home).state_bytes - update.state_bytes
    update_bytes = dict[int, int]()
    if gradients.updates_early:  # each parameter is updated by itself
        update_by_layout = {layout: recorded.update_of(optimizer, [layout], home) for layout in dict.fromkeys(layouts)}
        pairs = zip(parameters, layouts, strict=True)
        update_bytes = {value.id: update_by_layout[layout].peak_bytes for value, layout in pairs}
    return replace(
        without_update, other_bytes={**other_bytes, "optimizer_state": idle_state_bytes},
        state_bytes=update.state_bytes, packed_half_bytes=update.packed_half_bytes,
        moment_bytes_saved=moment_bytes_saved, moments_fit_8_bits=update.moments_fit_8_bits,
        # idle parameters are updated only if they have gradients of other micro-batches
        update_bytes=(update_with_idle if gradients.accumulates else update).peak_bytes,
        update_by_parameter=update_bytes,
    )  # fmt: skip


def _addresses(graph: JointGraph, model: nn.Module, tensors: Mapping[int, torch.Tensor], home: Home) -> dict[int, int]:
    """Return the addresses of the resident values whose tensors begin a block of the card's segments. ``tensors``:
    inputs and constants, by value."""
    if home.occupied is None:
        return {}
    named = {
        **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))
    }  # fmt: skip
    found, live = dict[int, int](), home.occupied.live
    for value in graph.values:
        if value.kind not in RESIDENT or value.is_view or value.place == HOST:
            continue
        tensor = named.get(value.path) if value.kind in ("parameter", "buffer") else tensors.get(value.id)
        if tensor is None or _torch.untraceable_reason(tensor) is not None:
            continue
        address = tensor.untyped_storage().data_ptr()
        if live.get(address, 0) >= value.bytes:  # several can be views of the same memory
            found[value.id] = address
    return found


def update_of(optimizer: Optimizer, shapes: Sequence[_TensorLayout], home: Home | None = None) -> Update:
    """Record the second update of an optimizer, which has its state by then, without allocating memory.

    Args:
        optimizer: a callable of the parameters.
        shapes: shape, strides and dtype of each parameter.
        home: device of the parameters; None: the CPU.

    Raises:
        InputError: the optimizer refuses its parameters, or its step cannot be recorded.
    """
    if not shapes:
        return Update(state_bytes=0, peak_bytes=0)

    home = home or Home()
    packed, moments_fit_8_bits = 0, False

    def build() -> Callable[[], Any]:
        """Return ``step()`` of the optimizer, with parameters that have a gradient."""
        nonlocal packed, moments_fit_8_bits
        parameters = [
            nn.Parameter(torch.empty_strided(sizes, stride, dtype=getattr(torch, dtype), device=home.type))
            for sizes, stride, dtype in shapes
        ]
        instance = optimizer(parameters)
        moments_fit_8_bits = has_counterpart(instance)
        if isinstance(instance, PackedMasters):
            packed = instance.packed_bytes
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        return instance.step

    try:
        trace = record_for(build, home.target)
    except UsageError as error:  # of an optimizer of memplan, about its parameters or options
        raise InputError(f"the optimizer: {error.found}", expected=error.expected, do=error.do) from error
    except MemplanError as error:
        raise InputError(
            f"the optimizer's update cannot be recorded: {error.found}",
            expected="a callable of the parameters, such as torch.optim.AdamW, whose step() needs no closure",
            do="Pass such a callable, or leave optimizer out: then none is counted",
        ) from error
    first_step, second_step = trace.steps[:2]
    live = sum(home.allocated(storage.bytes) for storage in live_at(trace, second_step))
    inputs = (s for s in live_at(trace, first_step) if s.cause in ("weight", "parameter_gradient"))
    state = live - sum(home.allocated(storage.bytes) for storage in inputs)
    most = simulate(trace).steps[1].peak_allocated - live
    return Update(state, most, packed, moments_fit_8_bits)
