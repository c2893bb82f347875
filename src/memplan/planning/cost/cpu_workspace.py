"""Scratch of convolutions, and of matrix products in bfloat16 and float16, measured on this machine.

Which buffers oneDNN takes for these depends on the processor: with tiles (AMX) it computes otherwise than with vectors
alone, and packs as much of an operand as its caches take. The formulas (convolution.py and matmul.py in
memplan.trace.semantics) fit some of them, and whole derivatives better than their parts. Each distinct call runs once,
on zeros, and the allocator's own events say what it holds beyond its results. That holds for the process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memplan import _torch
from memplan.planning.cost.kernel_key import KernelCall
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, map_refs
from memplan.planning.graph.op_schema import CHUNKED, NUMBERS
from memplan.planning.levers.chunk_convolutions import CONVOLUTION, meta_tensor
from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.trace.records import HOST
from memplan.trace.semantics.kinds import Arguments, Extra, Keywords, Semantics

LIMIT = 3.0
"""Seconds that the calls of a graph may take, more or less: the others go by the formulas."""
PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))
CONVOLUTIONS = frozenset([CONVOLUTION, CONVOLUTION_BACKWARD, CHUNKED])
REDUCED = frozenset([torch.bfloat16, torch.float16])

_Key = tuple[int, str]
_known: dict[_Key, int] = {}
"""Measured bytes, by number of threads and call."""
_refused: set[_Key] = set()
"""Calls that failed when they were measured."""


def with_measured_scratch(graph: JointGraph, limit: float = LIMIT) -> JointGraph:
    """Return the graph with what its convolutions, and its products in fewer bits, hold on this machine beyond their
    results.

    Args:
        graph: of a step on the CPU.
        limit: seconds.
    """
    calls = {op.index: call for op in graph.ops if (call := _call_of(graph, op)) is not None}
    _measure(sorted({call.key: call for call in calls.values()}.values(), key=_size, reverse=True), limit)
    return replace(graph, ops=tuple(_with(op, calls.get(op.index)) for op in graph.ops)) if calls else graph


def known(semantics: Semantics, limit: float = math.inf) -> Semantics:
    """Return the CPU's semantics, with these kernels' workspaces as measured on this machine in place of formulas.

    Args:
        semantics: of a recording.
        limit: seconds that measuring may take in it, more or less: the other calls go by the formulas.
    """
    spent = 0.0

    def extras(name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool) -> Sequence[Extra]:
        nonlocal spent
        begin = time.perf_counter()
        taken = measured(name, args, kwargs, anew=spent < limit)
        spent += time.perf_counter() - begin
        if taken is None:
            return semantics.extras(name, args, kwargs, result, in_backward)
        return (Extra(taken),) if taken else ()

    return replace(semantics, extras=extras)


def measured(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, anew: bool = True) -> int | None:
    """Return the bytes that a call holds beyond its results; None for an op that goes by its formula.

    Args:
        name: of the op, as ``aten.convolution.default``; ``aten.mm.out`` counts as its default.
        args, kwargs: what it is called with; of tensors, shapes, strides and dtypes alone count.
        anew: whether a call that is not known yet is run.
    """
    if name.replace(".out", ".default") not in CONVOLUTIONS | PRODUCTS:  # most are not: looking closer takes time
        return None
    call = KernelCall.of(name, args, kwargs)
    if not _is_measured(call):
        return None
    if anew:
        with _torch.no_modes():
            _measure([call], LIMIT)
    return _known.get(_key(call))


def _with(op: GraphOp, call: KernelCall | None) -> GraphOp:
    found = None if call is None else _known.get(_key(call))
    return op if found is None else replace(op, scratch=found + NUMBERS)


def _key(call: KernelCall) -> _Key:
    return torch.get_num_threads(), call.key


def _call_of(graph: JointGraph, op: GraphOp) -> KernelCall | None:
    if op.target not in CONVOLUTIONS | PRODUCTS:
        return None
    call = KernelCall.of(op.target, map_refs(op.args, lambda value: meta_tensor(graph.values[value])), op.kwargs)
    return call if _is_measured(call) else None


def _is_measured(call: KernelCall) -> bool:
    return call.name in CONVOLUTIONS or (call.name in PRODUCTS and call.args[0].dtype in REDUCED)


def _size(call: KernelCall) -> tuple[int, str]:
    return call.bytes, call.key


def _measure(calls: Sequence[KernelCall], limit: float) -> None:
    """Run what is not known yet, as far as the time goes; nothing while another profiler runs: torch has one at a
    time."""
    calls = [call for call in calls if _key(call) not in _known and _key(call) not in _refused]
    if not calls or _torch.is_profiled():
        return
    profile, end, ran = _torch.memory_profile(), time.perf_counter() + limit, list[KernelCall]()
    with torch.no_grad(), torch.autocast("cpu", enabled=False), profile:
        for call in calls:
            if ran and time.perf_counter() >= end:
                break
            args, kwargs = call.on_zeros(HOST)
            try:
                with _torch.marker(str(len(ran))):
                    result = call.run(args, kwargs)
                del result  # outside: what is left of a call are its results
            except Exception:  # whatever a kernel objects to: then the formula stands
                _refused.add(_key(call))
            ran.append(call)
    held = _held(_torch.Profile.of(profile), len(ran))
    _known.update((_key(call), held[at]) for at, call in enumerate(ran) if _key(call) not in _refused)


def _held(profile: _torch.Profile, calls: int) -> list[int]:
    """Return, by number of a call, its highest level less what remains of it: its results."""
    level, most = [0] * calls, [0] * calls
    for event in profile.events:
        if event.mark:
            number = int(event.mark)
            level[number] += event.bytes
            most[number] = max(most[number], level[number])
    return [high - left for high, left in zip(most, level, strict=True)]
