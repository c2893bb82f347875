"""Workspaces of torch's kernels that generated code calls.

On the CPU convolutions and reduced-precision products are measured while the step is recorded. On a card all called
kernels are measured together after a first recording, because nothing can run on the card during a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from memplan import _torch
from memplan.planning.cost import cpu_workspace, cuda_workspace
from memplan.planning.cost.kernel_key import KernelCall
from memplan.planning.cost.op_timing import NEEDS_SEEDS
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.op_schema import overload
from memplan.planning.graph.placement import Home
from memplan.planning.inductor.max_pool import POOLS
from memplan.trace.semantics.kinds import Arguments, Keywords, Semantics, Temporary


class Kernels(Protocol):
    """Torch's kernels in the code of one step."""

    def with_known_workspaces(self, semantics: Semantics) -> Semantics:
        """Return the device's semantics with the workspaces of these kernels that are known."""
        ...

    def measure_unknown(self) -> bool:
        """Measure the calls whose workspace is not known yet. Return whether there were any."""
        ...


def kernels_on(home: Home, graph: JointGraph) -> Kernels:
    """Return the kernels for a step of this graph on its device."""
    return OnCPU(graph) if home.card is None else OnCard(graph, home.name)


class OnCPU:
    """Kernels of the CPU."""

    def __init__(self, graph: JointGraph) -> None:
        self._opaque_workspaces = _workspaces_of_opaque_calls(graph)
        """Bytes by (op, key of the call)."""

    def with_known_workspaces(self, semantics: Semantics) -> Semantics:
        """Return the CPU's semantics with the workspaces of opaque calls, convolutions and products."""
        measured = cpu_workspace.with_measured_workspaces(semantics)

        def workspaces(
            name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
        ) -> Sequence[Temporary]:
            """Return the temporaries of a kernel call."""
            name = _ATEN_POOLS.get(name, name)
            if not _is_opaque(name):
                return measured.temporaries(name, args, kwargs, result, in_backward)
            key_of_call = args[-1]  # an opaque op's last argument
            size = self._opaque_workspaces.get((name, key_of_call), 0)
            return (Temporary(size),) if size else ()

        return replace(semantics, temporaries=workspaces)

    def measure_unknown(self) -> bool:
        """Return False: the CPU's kernels are measured during the recording."""
        return False


class OnCard:
    """Kernels of a card. Workspaces that libraries keep are counted with the graph, not with the code. ``place`` is
    torch's name of the card."""

    def __init__(self, graph: JointGraph, place: str) -> None:
        self._place = place
        self._opaque_workspaces = _workspaces_of_opaque_calls(graph)
        """Bytes by (op, key of the call)."""
        self._unknown = dict[str, KernelCall]()
        """By key: calls of kernels whose workspaces are not measured yet."""

    def with_known_workspaces(self, semantics: Semantics) -> Semantics:
        """Return the card's semantics with the workspaces measured so far, and note calls that are not measured."""
        measured = cuda_workspace.measured_workspaces(self._place)

        def workspaces(
            name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
        ) -> Sequence[Temporary]:
            """Return the temporaries of a kernel call: measured, else by the device's formulas."""
            call = KernelCall.of(name, args, kwargs)
            if _is_opaque(name):
                key_of_call = args[-1]  # an opaque op's last argument
                size = self._opaque_workspaces.get((name, key_of_call), 0)
            else:
                size = measured.get(call.key)
            if size is not None:
                return (Temporary(size),) if size else ()
            if call.key not in measured and _is_measurable(call.name):  # those that failed are in it, as None
                self._unknown[call.key] = call
            temporaries = semantics.temporaries(call.name, args, kwargs, result, in_backward)
            # workspaces that libraries keep are counted with the graph
            return [temporary for temporary in temporaries if not temporary.permanent]

        return replace(semantics, temporaries=workspaces)

    def measure_unknown(self) -> bool:
        """Measure the calls whose workspace is not known yet. Return whether there were any."""
        unknown, self._unknown = self._unknown, {}
        if unknown:
            cuda_workspace.measure_workspaces(self._place, unknown.values())
        return bool(unknown)


def _is_measurable(name: str) -> bool:
    """Return whether an op can run on tensors of zeros on the card. Custom ops may need valid arguments, and ops that
    read host memory go by their formula."""
    if not name.startswith("aten.") or name in NEEDS_SEEDS or name in _NO_WORKSPACE or name in _READ_HOST:
        return False
    return not overload(name).is_view


_NO_WORKSPACE = frozenset({"aten.empty.memory_format", "aten.empty_strided.default", "aten.as_strided.default"})
_READ_HOST = frozenset({
    "aten._to_copy.default", "aten.copy_.default", "aten.index.Tensor", "aten.index_put.default",
    "aten.index_put_.default", "aten._index_put_impl_.default",
})  # fmt: skip
"""Copies between host and card, and ops whose indices may be in host memory: their workspace depends on that."""


def _is_opaque(name: str) -> bool:
    """Return whether an op is that of a call that cannot be traced, or of its derivative."""
    return name in (_torch.OPAQUE, _torch.OPAQUE_BACKWARD)


def _workspaces_of_opaque_calls(graph: JointGraph) -> dict[tuple[str, str], int]:
    """Return the workspaces of the calls that cannot be traced in bytes, by (op, key of the call)."""
    workspaces = dict[tuple[str, str], int]()
    for op in graph.ops:
        if _is_opaque(op.target):
            key = op.target, op.args[-1]
            workspaces[key] = max(op.scratch, workspaces.get(key, 0))
    return workspaces


_ATEN_POOLS = {str(memplan_op): str(aten_op) for aten_op, memplan_op in POOLS.items()}
"""torch's op that each of memplan's pools calls."""
