"""What the ops of a graph take on a CUDA card beside their results, by the formulas of recorded steps.

What ran there while it was timed was measured, and that is taken instead (see `costs`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.devices import Device
from memplan.planning.chunks import alike
from memplan.planning.costs import alone, held_on
from memplan.planning.graph import GraphOp, JointGraph, map_refs
from memplan.planning.home import Home, blocks
from memplan.planning.kernel_calls import KernelCall
from memplan.trace.semantics import cuda
from memplan.trace.semantics.extra import Extra


@dataclass(frozen=True)
class OnCard:
    """A graph for a card."""

    graph: JointGraph
    """Its ops have the scratch that CUDA's kernels take."""
    libraries: int
    """Bytes of workspaces that stay with a library once it was called."""


def on_card(graph: JointGraph, device: Device) -> OnCard:
    """A captured graph with what its ops take on a card.

    Args:
        graph: of a step whose tensors are on a card.
        device: the card.
    """
    semantics, kept, ops = cuda.semantics(device, lambda: 0, lambda _: True), 0, list[GraphOp]()
    for op in graph.ops:
        extras = () if op.is_view else _extras(graph, op, semantics.extras)
        kept += sum(blocks(extra.bytes) for extra in extras if extra.held)
        passing = [extra for extra in extras if not extra.held and extra.owner is None]
        reserves = sum(blocks(extra.bytes) for extra in extras if extra.owner is not None)
        ops.append(replace(op, scratch=sum(blocks(extra.bytes) for extra in passing) + reserves))
    return OnCard(replace(graph, ops=tuple(ops)), kept)


def libraries(graph: JointGraph, home: Home) -> int:
    """`OnCard.libraries`; on the CPU none."""
    return 0 if home.card is None else on_card(graph, home.card).libraries


_known: dict[str, dict[str, int | None]] = {}
"""By card and call: bytes; None where it failed."""
LIMIT = 3.0
"""Seconds that measuring may take, more or less."""


def measured(place: str, calls: Collection[KernelCall]) -> dict[str, int]:
    """What calls hold on a card beside what is left of them, in bytes, by their keys: without those that failed there,
    or that the time did not reach. Each runs once, on zeros, which holds for the process.

    Args:
        place: as torch calls the card.
        calls: of torch's own kernels.
    """
    known, end = _known.setdefault(place, {}), time.perf_counter() + LIMIT
    with alone(place):
        for call in calls:
            if call.key not in known and time.perf_counter() < end:
                known[call.key] = _held(place, call)
    return {call.key: held for call in calls if (held := known.get(call.key)) is not None}


def _held(place: str, call: KernelCall) -> int | None:
    try:
        args, kwargs = call.on_zeros(place)
        return held_on(place, lambda: call.run(args, kwargs))
    except Exception:  # whatever a kernel objects to, too little memory among it: then the formula stands
        return None


def _extras(graph: JointGraph, op: GraphOp, extras: Any) -> Sequence[Extra]:
    args = map_refs(op.args, lambda value: alike(graph.values[value]))
    kwargs = map_refs(op.kwargs, lambda value: alike(graph.values[value]))
    outputs = [None if value is None else alike(graph.values[value]) for value in op.outputs]
    result = outputs if op.multiple else outputs[0]
    try:
        return extras(op.target, tuple(args), dict(kwargs), result, op.phase == "backward")
    except Exception:  # a formula of a result that nobody reads, and of which nothing is known therefore
        return ()
