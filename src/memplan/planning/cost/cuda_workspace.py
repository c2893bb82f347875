"""Workspaces of a graph's ops on a CUDA card: as this environment's cuDNN says, else by formulas of recorded steps.

What ran there while it was timed was measured, and that is taken instead (see op_timing.py): there is not the time to
run all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan._bytes import round_to_blocks
from memplan.cudnn.ask import ask
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn
from memplan.devices import Device
from memplan.planning.cost.kernel_key import KernelCall
from memplan.planning.cost.op_timing import alone, held_on
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, map_refs
from memplan.planning.graph.placement import Home
from memplan.planning.levers.chunk_convolutions import meta_tensor
from memplan.trace.semantics.cuda import table as cuda
from memplan.trace.semantics.kinds import Asked, Extra


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
    library = find_cudnn(None)
    semantics = cuda.semantics(device, lambda: 0, lambda _: True, asks=library is not None)
    ours = [op.target.startswith("memplan.") for op in graph.ops]  # these say themselves what they hold
    taken = [
        () if own or op.is_view else _extras(graph, op, semantics.extras)
        for op, own in zip(graph.ops, ours, strict=True)
    ]
    answered = {} if library is None else _answered(library, device, [extra for of in taken for extra in of])
    kept, ops = 0, list[GraphOp]()
    for op, own, extras in zip(graph.ops, ours, taken, strict=True):
        kept += sum(round_to_blocks(extra.bytes) for extra in extras if extra.held)
        other = sum(round_to_blocks(extra.bytes) for extra in extras if not extra.held and extra.asked is None)
        ops.append(op if own else replace(op, scratch=other + _of_cudnn(graph, op, extras, answered)))
    return OnCard(replace(graph, ops=tuple(ops)), kept)


def _answered(library: Cudnn, device: Device, extras: Sequence[Extra]) -> dict[Asked, int]:
    """Return the bytes of workspaces as cuDNN says them: without benchmark that of its first plan, else the largest."""
    asked = dict.fromkeys(extra.asked for extra in extras if extra.asked is not None)
    answers = ask(library, device, (one.question for one in asked))
    found = dict[Asked, int]()
    for one in asked:
        plans = answers.plans.get(one.question, ())
        if one.plan == "first" and one.question in answers.measured:
            found[one] = answers.measured[one.question]
        elif plans:
            found[one] = plans[0].workspace if one.plan == "first" else max(plan.workspace for plan in plans)
    return found


def _of_cudnn(graph: JointGraph, op: GraphOp, extras: Sequence[Extra], answered: Mapping[Asked, int]) -> int:
    """Return what an op's workspaces of cuDNN take beside its results: one is freed before the next result is made."""
    most = 0
    for extra in extras:
        if extra.asked is not None:
            later = (op.outputs[number] for number in range((extra.after or 0) + 1, len(op.outputs)))
            made_later = sum(round_to_blocks(graph.values[value].bytes) for value in later if value is not None)
            most = max(most, round_to_blocks(answered.get(extra.asked, extra.bytes)) - made_later)
    return most


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
    args = map_refs(op.args, lambda value: meta_tensor(graph.values[value]))
    kwargs = map_refs(op.kwargs, lambda value: meta_tensor(graph.values[value]))
    outputs = [None if value is None else meta_tensor(graph.values[value]) for value in op.outputs]
    result = outputs if op.multiple else outputs[0]
    try:  # a planned backward pass runs in the thread that calls it, so both passes share a library's handle
        return extras(op.target, tuple(args), dict(kwargs), result, False)
    except Exception:  # a formula of a result that nobody reads, and of which nothing is known therefore
        return ()
