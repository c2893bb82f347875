"""Memory timeline of a step of fused kernels, from running its generated code on tensors without data.

The code itself allocates and frees its buffers, and calls torch's kernels, whose workspaces are added. Generated
kernels have no workspace besides the buffers allocated for them. So fusion is observed in the code, not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memplan._torch import inductor
from memplan.errors import CompileError, MemplanError
from memplan.planning.graph.joint_graph import RESIDENT, Value
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.inductor.extern_kernels import kernels_on
from memplan.planning.inductor.partition import CompiledPasses, Fused
from memplan.planning.schedule.scheduler import frees_gradient
from memplan.simulation.allocator.occupied import Begin
from memplan.simulation.simulate import simulate, simulate_from
from memplan.simulation.timeline import Timeline
from memplan.trace.record import record_for
from memplan.trace.records import HOST
from memplan.trace.trace import Trace


def fused_timeline(fused: Fused, codes: Mapping[str, inductor.Code], outside_memory: OutsideMemory) -> Timeline:
    """Return the memory timeline of a step, from its inputs to the optimizer's update. ``codes`` has the result of
    `inductor.code_of` by name of the part. Raises CompileError if the code calls an op that cannot run without data."""
    home = outside_memory.home
    step, kernels = _Step(fused, codes, outside_memory), kernels_on(home, fused.schedule.graph)
    with torch.autocast(home.type, enabled=False):
        try:
            trace = record_for(step.build, home.target, steps=1, known=kernels.with_known_workspaces)
            # the code calls kernels that were not measured before: now with their workspaces
            if kernels.measure_unknown():
                trace = record_for(step.build, home.target, steps=1, known=kernels.with_known_workspaces)
        except MemplanError as error:
            raise CompileError(
                f"The code that Inductor wrote cannot be followed without data: {error.found}",
                expected="code as torch 2.11 to 2.15 write it",
                do="Leave engine out: 'graph' runs torch's own kernels and compiles nothing",
            ) from error
    if home.card is None:
        return simulate(trace)
    return simulate_from(trace, _begin(trace, step.resident, outside_memory), home.allocator)


def _begin(trace: Trace, resident: Sequence[Value], outside_memory: OutsideMemory) -> Begin | None:
    """Return the state of the card's allocator before a recorded step; None if it is empty. ``resident``: the values
    whose tensors the step's build allocates first, in order."""
    if outside_memory.home.occupied is None:
        return None
    storages = sorted(trace.counted, key=lambda storage: storage.born)
    on_card = (value for value in resident if value.place != HOST)
    addresses = {
        storage.id: outside_memory.addresses[value.id]
        for value, storage in zip(on_card, storages, strict=False)
        if value.id in outside_memory.addresses and storage.bytes == value.bytes
    }
    return Begin(outside_memory.home.occupied, addresses)


class _Step:
    """A step to be recorded: it runs generated code on tensors without data, and allocates what the step has in memory
    besides the code's buffers."""

    def __init__(self, fused: Fused, codes: Mapping[str, inductor.Code], outside_memory: OutsideMemory) -> None:
        self.graph, self.choices, self.outside_memory = fused.schedule.graph, fused.schedule.choices, outside_memory
        self.passes = CompiledPasses(
            fused, lambda part: inductor.without_kernels(part.lowerable, codes[part.name].text)
        )
        self.resident = [value for value in self.graph.values if value.kind in RESIDENT and not value.is_view]
        """Parameters, buffers, inputs and constants that own their memory."""
        self.tangents = [value for value in self.graph.values if value.kind == "tangent"]
        """Gradients of the step's outputs."""
        self.outside_tensors: list[Tensor] = []
        """Memory outside of the graph that is live throughout the step, such as the optimizer's state."""
        self.inputs: list[Tensor] = []
        """Parameters, buffers, inputs and constants, once they are allocated."""

    def build(self) -> Callable[[], None]:
        """Allocate what stays allocated during the step, and return the step as a function.

        That is parameters, inputs and what the graph does not contain: optimizer state and accumulated gradients.
        """
        resident = [value for value in self.graph.values if value.kind in RESIDENT]
        bases = {value.id: _empty(value) for value in self.resident}
        self.inputs = [
            bases[value.base].as_strided(value.shape, value.stride) if value.is_view else bases[value.base]
            for value in resident
        ]
        self.outside_tensors = [self._bytes(self.outside_memory.held_bytes)]
        # the step adds to gradients of earlier micro-batches, which exist already
        if self.choices.gradients.accumulates:
            trained = (self.graph.values[parameter] for parameter, _ in self.graph.gradients)
            self.outside_tensors += [
                self._bytes(value.contiguous_bytes) for value in trained if value.kind == "parameter"
            ]
        return self.step

    @torch.no_grad()
    def step(self) -> None:
        """Run one step as the engine does, and keep its gradients as the caller of the engine does."""
        outputs, saved = self.passes.forward(list(self.inputs))
        loss = self._default_loss()
        tangents = [_empty(value) for value in self.tangents]
        self._bytes(self.outside_memory.loss_bytes)  # allocated and freed at once: its peak counts
        # backward() itself holds the gradient of a scalar until it returns
        live: list[Tensor] = [
            tangent for tangent, value in zip(tangents, self.tangents, strict=True) if value.kept_by_backward
        ]
        for gradients in self.passes.backward(list(self.inputs), saved, tangents):
            live += [gradient for value, gradient in gradients if not self._is_freed_at_once(value)]
            gradients.clear()
        if not self.choices.gradients.updates_early:
            self._bytes(self.outside_memory.update_bytes)
        del outputs, live, loss  # the caller holds them until here

    def _default_loss(self) -> list[Tensor]:
        """Return the 0-d tensors that computing the default loss allocates; none if the step has a loss of its own.

        The default loss adds up the sum of each output. So there is a 0-d tensor for each output that gets a gradient,
        and another for the gradient of the loss.
        """
        has_own_loss = any(value.kept_by_backward for value in self.tangents)  # a 0-d output is a loss
        if has_own_loss:
            return []
        sums = [_scalar(value) for value in self.tangents]
        loss_gradient = [_scalar(self.tangents[0])] if sums else []  # in the dtype of the first sum
        return sums + loss_gradient

    def _is_freed_at_once(self, value: int) -> bool:
        """Return whether the gradient of a value is freed as soon as it is complete. If the backward pass itself
        updates the parameter with it, allocate and free the workspace of that update."""
        if not frees_gradient(self.graph, self.choices, value):
            return False
        if self.choices.gradients.updates_early:
            self._bytes(self.outside_memory.update_by_parameter.get(value, 0))
        return True

    def _bytes(self, size: int) -> Tensor:
        """Allocate ``size`` bytes on the step's device; they are freed with the tensor."""
        return torch.empty(size, dtype=torch.uint8, device=self.outside_memory.home.type)


def _empty(value: Value) -> Tensor:
    """Return an uninitialized tensor with the value's shape, strides and dtype, on its kind of device."""
    place = HOST if value.place == HOST else "cuda"  # a step uses a single card: its number does not matter
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device=place)


def _scalar(value: Value) -> Tensor:
    """Return a 0-d tensor of the value's dtype and device."""
    return _empty(replace(value, shape=(), stride=()))
