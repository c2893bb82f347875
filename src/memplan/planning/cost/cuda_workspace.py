"""Workspaces of a graph's ops on a CUDA card, by the formulas of recorded steps.

What ran there while it was timed was measured, and that is taken instead (see op_timing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.devices import Device
from memplan.planning.cost.kernel_key import KernelCall
from memplan.planning.cost.op_timing import alone, held_on
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, map_refs
from memplan.planning.graph.placement import Home, blocks
from memplan.planning.levers.chunk_convolutions import alike
from memplan.trace.semantics.cuda import table as cuda
from memplan.trace.semantics.kinds import Extra


@dataclass(frozen=True)
class OnCard:
    """A graph with the workspaces of a card's kernels."""

    graph: JointGraph
    """Its ops have the scratch that CUDA's kernels take."""
    libraries: int
    """Bytes of workspaces that stay with a library once it was called."""


def on_card(graph: JointGraph, device: Device) -> OnCard:
    """Return a captured graph with the workspaces of its ops on a card.

    Args:
        graph: of a step whose tensors are on a card.
        device: the card.
    """
    semantics, kept, ops = cuda.semantics(device, lambda: 0, lambda _: True), 0, list[GraphOp]()
    for op in graph.ops:
        if op.target.startswith("memplan."):  # ours say themselves what they hold
            ops.append(op)
            continue
        extras = () if op.is_view else _extras(graph, op, semantics.extras)
        kept += sum(blocks(extra.bytes) for extra in extras if extra.held)
        passing = [extra for extra in extras if not extra.held and extra.owner is None]
        reserves = sum(blocks(extra.bytes) for extra in extras if extra.owner is not None)
        ops.append(replace(op, scratch=sum(blocks(extra.bytes) for extra in passing) + reserves))
    return OnCard(replace(graph, ops=tuple(ops)), kept)


def libraries(graph: JointGraph, home: Home) -> int:
    """`OnCard.libraries`; on the CPU none."""
    return 0 if home.card is None else on_card(graph, home.card).libraries


_known: dict[tuple[str, bool, bool], dict[str, int | None]] = {}
"""Measured bytes by card, with cuDNN's switches, and call; None where it failed."""


def known(place: str) -> dict[str, int | None]:
    """Return the workspaces measured on a card in this process, by `KernelCall.key`, which includes cuDNN's
    switches."""
    cudnn = torch.backends.cudnn
    return _known.setdefault((place, cudnn.benchmark, cudnn.deterministic), {})


def measure(place: str, calls: Iterable[KernelCall]) -> None:
    """Measure what calls hold on a card beside what is left of them: each runs once, on zeros, however long that takes,
    so that one candidate is not held against another's formulas.

    Args:
        place: as torch calls the card.
        calls: of torch's own kernels.
    """
    found = known(place)
    with alone(place):
        for call in calls:
            try:
                found[call.key] = _held(place, call)
            except torch.OutOfMemoryError:  # there may be room another time
                continue
            except Exception:  # whatever a kernel objects to: then the formula stands
                found[call.key] = None


def _held(place: str, call: KernelCall) -> int:
    args, kwargs = call.on_zeros(place)
    return held_on(place, lambda: call.run(args, kwargs))


def _extras(graph: JointGraph, op: GraphOp, extras: Any) -> Sequence[Extra]:
    args = map_refs(op.args, lambda value: alike(graph.values[value]))
    kwargs = map_refs(op.kwargs, lambda value: alike(graph.values[value]))
    outputs = [None if value is None else alike(graph.values[value]) for value in op.outputs]
    result = outputs if op.multiple else outputs[0]
    try:  # a planned backward pass runs in the thread that calls it, so both passes share a library's handle
        return extras(op.target, tuple(args), dict(kwargs), result, False)
    except Exception:  # a formula of a result that nobody reads, and of which nothing is known therefore
        return ()
