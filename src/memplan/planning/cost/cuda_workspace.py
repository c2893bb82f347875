"""Workspaces of a graph's ops on a CUDA card: from this environment's cuDNN, or else from the model of its choice.

Ops that were timed on the card have measured workspaces instead (see op_timing.py): measuring all would take too long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from memplan._bytes import round_to_blocks
from memplan.cudnn.ask import ask
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn
from memplan.cudnn.expected_workspace import ExpectedWorkspace
from memplan.devices import Device
from memplan.planning.cost.kernel_key import KernelCall
from memplan.planning.cost.op_timing import isolated, workspace_on
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, map_refs
from memplan.planning.graph.op_schema import KERNELS, TOKEN_STATISTICS, TOKEN_STATISTICS_BACKWARD
from memplan.planning.graph.placement import Home
from memplan.planning.levers.chunk_convolutions import meta_tensor
from memplan.trace.semantics.cuda import table as cuda
from memplan.trace.semantics.kinds import Temporary, WorkspaceQuery


@dataclass(frozen=True)
class CardWorkspaces:
    """A graph with the workspaces of a card's kernels."""

    graph: JointGraph
    """The graph, whose ops have the workspaces of CUDA's kernels."""
    workspace_by_op: Mapping[int, int]
    """Bytes of workspaces that libraries keep allocated from their first call on, by index of the op that calls them
    first."""
    expected_scratch: Mapping[int, ExpectedScratch] = field(default_factory=dict)
    """Possible workspaces, by index of the op, where a model of cuDNN's choice predicts them."""


@dataclass(frozen=True)
class ExpectedScratch:
    """The possible workspaces of an op, with their probabilities."""

    queries: tuple[WorkspaceQuery, ...]
    """Questions to cuDNN: ops with equal questions have equal workspaces."""
    sizes: ExpectedWorkspace


def with_card_workspaces(graph: JointGraph, device: Device) -> CardWorkspaces:
    """Return a captured graph with the workspaces of its ops on a card.

    Args:
        graph: a step whose tensors are on a card.
        device: the card.
    """
    library = find_cudnn(environment=None)
    # on a single stream, all tensors on the card
    semantics = cuda.semantics(device, stream=lambda: 0, on_card=lambda _: True, asks=library is not None)
    temporaries_of_ops = list[Sequence[Temporary]]()
    for op in graph.ops:  # an op that declares its own scratch may still call a library
        temporaries_of = _products_of if _declares_scratch(op) else _temporaries_of
        temporaries_of_ops.append(temporaries_of(graph, op, semantics.temporaries))
    all_temporaries = [temporary for temporaries in temporaries_of_ops for temporary in temporaries]
    cudnn_bytes, expected_bytes = ({}, {}) if library is None else _cudnn_bytes(library, device, all_temporaries)
    workspace_by_op = {
        op.index: sum(round_to_blocks(temporary.bytes) for temporary in temporaries if temporary.permanent)
        for op, temporaries in zip(graph.ops, temporaries_of_ops, strict=True)
    }
    ops, expected = list[GraphOp](), dict[int, ExpectedScratch]()
    for op, temporaries in zip(graph.ops, temporaries_of_ops, strict=True):
        if _declares_scratch(op):
            ops.append(op)
            continue
        scratch = _scratch(graph, op, temporaries, cudnn_bytes)
        requests, before_results = _requests(temporaries)
        ops.append(replace(op, scratch=scratch, requests=requests, requests_before_results=before_results))
        queries = dict.fromkeys(temporary.query for temporary in temporaries if temporary.query in expected_bytes)
        uncertain = {query: expected_bytes[query] for query in queries if query is not None}
        if uncertain:  # the scratch of each combination of possible workspaces
            probabilities = defaultdict[int, float](float)  # by scratch in bytes
            distributions = [zip(sizes.sizes, sizes.probabilities, strict=True) for sizes in uncertain.values()]
            for outcome in product(*distributions):
                sizes = dict(zip(uncertain, (size for size, _ in outcome), strict=True))
                outcome_scratch = _scratch(graph, op, temporaries, {**cudnn_bytes, **sizes})
                probabilities[outcome_scratch] += prod(probability for _, probability in outcome)
            ordered = sorted(probabilities)
            workspace = ExpectedWorkspace(scratch, tuple(ordered), tuple(probabilities[size] for size in ordered))
            expected[op.index] = ExpectedScratch(tuple(uncertain), workspace)
    return CardWorkspaces(
        replace(graph, ops=tuple(ops)), {index: size for index, size in workspace_by_op.items() if size}, expected
    )


def _declares_scratch(op: GraphOp) -> bool:
    """Return whether an op is memplan's own: these have the right scratch on every device."""
    return op.target.startswith("memplan.")


def _cudnn_bytes(
    library: Cudnn, device: Device, temporaries: Sequence[Temporary]
) -> tuple[dict[WorkspaceQuery, int], dict[WorkspaceQuery, ExpectedWorkspace]]:
    """Return the bytes of cuDNN's workspaces by query, and the distributions of those that a model only expects. The
    bytes are measured ones, else those of cuDNN's first plan or, with ``benchmark``, of its largest, else the expected
    ones."""
    queries = dict.fromkeys(temporary.query for temporary in temporaries if temporary.query is not None)
    answers = ask(library, device, (query.question for query in queries))
    workspaces, expected = dict[WorkspaceQuery, int](), dict[WorkspaceQuery, ExpectedWorkspace]()
    for query in queries:
        plans = answers.plans.get(query.question, ())
        if query.plan == "first" and query.question in answers.measured:
            workspaces[query] = answers.measured[query.question]
        elif plans:
            largest = max(plan.workspace for plan in plans)
            workspaces[query] = plans[0].workspace if query.plan == "first" else largest
        elif query.plan == "first" and query.question in answers.expected:
            expected[query] = answers.expected[query.question]
            workspaces[query] = expected[query].bytes
    return workspaces, expected


def _scratch(
    graph: JointGraph, op: GraphOp, temporaries: Sequence[Temporary], cudnn_bytes: Mapping[WorkspaceQuery, int]
) -> int:
    """Return the bytes that an op's temporaries add to its peak. ``cudnn_bytes``: of cuDNN's workspaces, by query. A
    workspace of cuDNN is freed before the next result is allocated, so the later results count in its place."""
    scratch = cudnn_peak = 0
    for temporary in temporaries:
        if temporary.query is not None:
            results_before = (temporary.after or 0) + 1  # `after`: the last result that is allocated before it
            later_results = (value for value in op.outputs[results_before:] if value is not None)
            later_bytes = sum(round_to_blocks(graph.values[value].bytes) for value in later_results)
            workspace = round_to_blocks(cudnn_bytes.get(temporary.query, temporary.bytes))
            cudnn_peak = max(cudnn_peak, workspace - later_bytes)
        elif not temporary.permanent:
            scratch += round_to_blocks(temporary.bytes)
    return scratch + cudnn_peak


def _requests(temporaries: Sequence[Temporary]) -> tuple[tuple[int, ...], int]:
    """Return the requests of an op's temporaries, all of which are live at once, and how many of them are made before
    the results (see `GraphOp`); none if a library's workspace is among them."""
    if any(temporary.query is not None or temporary.permanent for temporary in temporaries):
        return (), 0
    before_results_first = sorted(temporaries, key=lambda temporary: not temporary.first)
    sizes = [round_to_blocks(temporary.bytes) for temporary in before_results_first]
    frees = range(-len(sizes), 0)  # of each request, the last first
    return (*sizes, *frees), sum(temporary.first for temporary in temporaries)


def library_workspaces(graph: JointGraph, home: Home) -> Mapping[int, int]:
    """Return the bytes of workspaces that libraries keep allocated on a step's device, by index of the op whose call
    allocates them; none on the CPU."""
    return {} if home.card is None else with_card_workspaces(graph, home.card).workspace_by_op


_known: dict[tuple[str, bool, bool], dict[str, int | None]] = {}
"""Measured bytes by (card, cuDNN settings) and call; None for calls that failed."""


def measured_workspaces(place: str) -> dict[str, int | None]:
    """Return the bytes of the workspaces measured on a card in this process under the current cuDNN settings, by
    `KernelCall.key`; None for calls that failed."""
    cudnn = torch.backends.cudnn
    return _known.setdefault((place, cudnn.benchmark, cudnn.deterministic), {})


def measure_workspaces(place: str, calls: Iterable[KernelCall]) -> None:
    """Measure the workspaces of calls on a card. Each runs once on zeros, without a time limit, so that all candidates
    of a search are compared by measured workspaces.

    Args:
        place: torch's name of the card.
        calls: calls of torch's own kernels.
    """
    workspaces = measured_workspaces(place)
    with isolated(place):
        for call in calls:
            try:
                args, kwargs = call.on_zeros(place)
                workspaces[call.key] = workspace_on(place, partial(call.run, args, kwargs))
            except torch.OutOfMemoryError:  # may succeed later
                continue
            except Exception:  # any error of the kernel: then the formula counts
                workspaces[call.key] = None


def _products_of(graph: JointGraph, op: GraphOp, formulas: Any) -> Sequence[Temporary]:
    """Return the workspaces that libraries keep allocated for the products inside of an op of `memplan.kernels`.
    ``formulas``: the temporaries of a call of a torch op."""
    if op.target not in (TOKEN_STATISTICS, TOKEN_STATISTICS_BACKWARD):
        return ()
    named = dict(zip(KERNELS[op.target], op.args, strict=True))
    hidden, weight = (meta_tensor(graph.values[named[name].value]) for name in ("hidden", "weight"))
    scores = hidden.new_empty(hidden.shape[0], weight.shape[0])
    operands = hidden, weight.to(hidden.dtype).t()
    temporaries = formulas("aten.mm.default", operands, {}, scores, False)  # False: in the thread of the forward pass
    return [temporary for temporary in temporaries if temporary.permanent]


def _temporaries_of(graph: JointGraph, op: GraphOp, formulas: Any) -> Sequence[Temporary]:
    """Return an op's temporaries, from ``formulas`` called with meta tensors; () if no formula applies."""
    if op.is_view:
        return ()
    args = map_refs(op.args, lambda value: meta_tensor(graph.values[value]))
    kwargs = map_refs(op.kwargs, lambda value: meta_tensor(graph.values[value]))
    outputs = [None if value is None else meta_tensor(graph.values[value]) for value in op.outputs]
    result = outputs if op.returns_tuple else outputs[0]
    # a planned backward pass runs in the caller's thread, so both passes share a library's handle
    in_backward = False
    try:
        return formulas(op.target, tuple(args), dict(kwargs), result, in_backward)
    except Exception:  # the formula needs a result that no op reads, so that the graph lacks its shape
        return ()
