"""Workspaces of torch's kernels where generated code calls them.

On the CPU convolutions, and products in fewer bits, are measured as they are met. On a card whatever is called is, in
one go once it is known: while a step is recorded, nothing can be asked of a card.
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
from memplan.trace.semantics.kinds import Arguments, Extra, Keywords, Semantics


class Kernels(Protocol):
    """Torch's kernels in the code of one step."""

    def known(self, semantics: Semantics) -> Semantics:
        """Return the semantics of where the step runs, with what is known of these kernels."""
        ...

    def measure(self) -> bool:
        """Measure the calls that are not known yet; return whether there were any."""
        ...


def kernels_on(home: Home, graph: JointGraph) -> Kernels:
    """Return the kernels of a step of this graph, by its device."""
    return OnCPU(graph) if home.card is None else OnCard(graph, home.name)


class OnCPU:
    """Kernels of the CPU."""

    def __init__(self, graph: JointGraph) -> None:
        self._opaque = _of_opaque_calls(graph)

    def known(self, semantics: Semantics) -> Semantics:
        """See `Kernels`."""
        torchs = cpu_workspace.known(semantics)

        def extras(name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool) -> Sequence[Extra]:
            name = _AS_TORCHS.get(name, name)
            if not _is_opaque(name):
                return torchs.extras(name, args, kwargs, result, in_backward)
            taken = self._opaque.get((name, args[-1]), 0)
            return (Extra(taken),) if taken else ()

        return replace(semantics, extras=extras)

    def measure(self) -> bool:
        """See `Kernels`: all of it is known."""
        return False


class OnCard:
    """Kernels of a card.

    Args:
        graph: of the step. Workspaces that stay with a library are counted for it, not for the code.
        place: as torch calls the card.
    """

    def __init__(self, graph: JointGraph, place: str) -> None:
        self._opaque, self._place = _of_opaque_calls(graph), place
        self._unknown = dict[str, KernelCall]()

    def known(self, semantics: Semantics) -> Semantics:
        """See `Kernels`."""
        measured = cuda_workspace.known(self._place)

        def extras(name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool) -> Sequence[Extra]:
            call = KernelCall.of(name, args, kwargs)
            taken = self._opaque.get((name, args[-1]), 0) if _is_opaque(name) else measured.get(call.key)
            if taken is not None:
                return (Extra(taken),) if taken else ()
            if call.key not in measured and _runs_alone(call.name):
                self._unknown[call.key] = call
            found = semantics.extras(call.name, args, kwargs, result, in_backward)
            return [extra for extra in found if not extra.held]

        return replace(semantics, extras=extras)

    def measure(self) -> bool:
        """See `Kernels`."""
        unknown, self._unknown = self._unknown, {}
        if unknown:
            cuda_workspace.measure(self._place, unknown.values())
        return bool(unknown)


def _runs_alone(name: str) -> bool:
    """Return whether it is a kernel that can run on made-up tensors on the card: what others wrote may trust its
    arguments, and what reads host memory, too, goes by its formula."""
    if not name.startswith("aten.") or name in NEEDS_SEEDS or name in _MAKE or name in _READ_HOST:
        return False
    return not overload(name).is_view


_MAKE = frozenset(f"aten.{name}" for name in ("empty.memory_format", "empty_strided.default", "as_strided.default"))
"""Ops that hold nothing beside their results."""
_READ_HOST = frozenset(
    f"aten.{name}"
    for name in (
        *("_to_copy.default", "copy_.default", "index.Tensor", "index_put.default", "index_put_.default"),
        "_index_put_impl_.default",
    )
)
"""Copies between host and card, and ops whose indices may lie in host memory: their workspace depends on that."""


def _is_opaque(name: str) -> bool:
    return name in (_torch.OPAQUE, _torch.OPAQUE_BACKWARD)


def _of_opaque_calls(graph: JointGraph) -> dict[tuple[str, str], int]:
    """Return the workspaces of opaque calls, which the graph knows."""
    known = dict[tuple[str, str], int]()
    for op in graph.ops:
        if _is_opaque(op.target):
            key = op.target, op.args[-1]
            known[key] = max(op.scratch, known.get(key, 0))
    return known


_AS_TORCHS = {str(ours): str(torchs) for torchs, ours in POOLS.items()}
"""torch's kernel for each op of memplan's that calls it."""
