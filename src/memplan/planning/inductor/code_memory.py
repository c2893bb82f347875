"""Bytes that a step of fused kernels holds: its generated code, run on tensors without data.

The code says what is allocated and freed, and which of torch's kernels are called: they count with what they hold. The
code's own kernels hold nothing beyond what is allocated for them. So fusion is not modelled: it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from memplan._torch import inductor
from memplan.errors import CompileError, MemplanError
from memplan.planning.graph.joint_graph import RESIDENT, Value
from memplan.planning.graph.resident import Surroundings
from memplan.planning.inductor.extern_kernels import Kernels, kernels_on
from memplan.planning.inductor.partition import Fused, Halves
from memplan.planning.schedule.scheduler import frees_gradient
from memplan.simulation.simulate import simulate
from memplan.simulation.timeline import Timeline
from memplan.trace.record import record_for
from memplan.trace.records import HOST
from memplan.trace.trace import Trace


def fused_timeline(of: Fused, codes: Mapping[str, inductor.Code], around: Surroundings) -> Timeline:
    """Return the bytes over time of a step, from what is handed in to the optimizer's update.

    Args:
        of: what runs.
        codes: by name of a part, what `inductor.code_of` wrote for it.
        around: what there is beside the graph's values.

    Raises:
        CompileError: the code calls what nobody knows here.
    """
    step, kernels = _Step(of, codes, around), kernels_on(around.home, of.schedule.graph)
    with torch.autocast(around.home.type, enabled=False):
        try:
            trace = _recorded(step, kernels)
            if kernels.measure():  # what the code calls was not known before
                trace = _recorded(step, kernels)
        except MemplanError as error:
            raise CompileError(
                f"The code that Inductor wrote cannot be followed without data: {error.found}",
                expected="code as torch 2.11 to 2.15 write it",
                do="Leave engine out: 'graph' runs torch's own kernels and compiles nothing",
            ) from error
    return simulate(trace)


def _recorded(step: _Step, kernels: Kernels) -> Trace:
    return record_for(step.build, step.around.home.target, 1, kernels.known)


class _Step:
    def __init__(self, of: Fused, codes: Mapping[str, inductor.Code], around: Surroundings) -> None:
        self.graph, self.choices, self.around = of.schedule.graph, of.schedule.choices, around
        self.halves = Halves(of, lambda part: inductor.without_kernels(part.lowerable, codes[part.name].text))
        self.tangents = [value for value in self.graph.values if value.kind == "tangent"]
        self.beside: list[Tensor] = []
        self.handed: list[Tensor] = []

    def build(self) -> Callable[[], None]:
        """Make what is there all the time."""
        values = self.graph.values
        there = {value.id: _made(value) for value in values if value.kind in RESIDENT and not value.is_view}
        self.handed = [_seen(value, there[value.base]) for value in values if value.kind in RESIDENT]
        self.beside = [self._bytes(self.around.held_bytes)]
        if self.choices.gradients.adds:
            trained = [values[of] for of, _ in self.graph.gradients if values[of].kind == "parameter"]
            self.beside += [self._bytes(value.own_bytes) for value in trained]
        return self.step

    @torch.no_grad()
    def step(self) -> None:
        """Run one step as the engine does, and hold what the receivers of its gradients hold."""
        outputs, saved = self.halves.forward(list(self.handed))
        summed = self._summed()
        tangents = [_made(value) for value in self.tangents]
        self._bytes(self.around.outside)
        stay: list[Tensor] = [one for one, value in zip(tangents, self.tangents, strict=True) if value.held]
        for given in self.halves.backward(list(self.handed), saved, tangents):
            stay += [gradient for value, gradient in given if not self._used_up(value)]
            given.clear()
        if not self.choices.gradients.updates:
            self._bytes(self.around.update)
        del outputs, stay, summed

    def _summed(self) -> list[Tensor]:
        """Return the numbers of a loss that sums the outputs, where none is given: a sum of each, and the gradient of
        all."""
        if any(value.held for value in self.tangents):
            return []
        sums = [_number(value) for value in self.tangents]
        return [*sums, _number(self.tangents[0])] if sums else []

    def _used_up(self, value: int) -> bool:
        """Return whether a gradient is freed as soon as it is given, after what its update holds for a moment."""
        if not frees_gradient(self.graph, self.choices, value):
            return False
        if self.choices.gradients.updates:
            self._bytes(self.around.update_of.get(value, 0))
        return True

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.around.home.type)


def _made(value: Value) -> Tensor:
    place = HOST if value.place == HOST else "cuda"  # of one card: whichever it is does not matter here
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device=place)


def _number(value: Value) -> Tensor:
    """One of its dtype, where it lies."""
    return _made(replace(value, shape=(), stride=()))


def _seen(value: Value, base: Tensor) -> Tensor:
    return base.as_strided(value.shape, value.stride) if value.is_view else base
