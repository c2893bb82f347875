"""Workspaces of convolutions, and of matrix products in bfloat16 and float16, measured on this machine.

Which buffers oneDNN allocates depends on the processor: its kernels for tiles (AMX) differ from those for vectors, and
it packs as much of an operand as the caches hold. The formulas (convolution.py and matmul.py in
memplan.trace.semantics) fit some processors, and whole derivatives better than their parts. Each distinct call runs
once, on zeros; the allocator's events give its peak beyond its results. Results are cached for the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memplan import _torch
from memplan.planning.cost.clock import clock_of
from memplan.planning.cost.kernel_key import KernelCall
from memplan.planning.graph.joint_graph import JointGraph, map_refs
from memplan.planning.graph.op_schema import CHUNKED, NUMBER_TENSOR_BYTES
from memplan.planning.levers.chunk_convolutions import CONVOLUTION, meta_tensor
from memplan.planning.passes.split_convolution_backward import CONVOLUTION_BACKWARD
from memplan.trace.records import HOST
from memplan.trace.semantics.kinds import Arguments, Keywords, Semantics, Temporary

LIMIT = 3.0
"""Approximate limit in seconds on measuring a graph's calls: the remaining calls go by the formulas."""
PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))
CONVOLUTIONS = frozenset([CONVOLUTION, CONVOLUTION_BACKWARD, CHUNKED])
REDUCED = frozenset([torch.bfloat16, torch.float16])

_Key = tuple[int, str]
"""(number of threads, `KernelCall.key`)."""
_known: dict[_Key, int] = {}
"""Measured workspaces in bytes."""
_failed: set[_Key] = set()
"""Calls that failed when they were measured."""


def with_measured_scratch(graph: JointGraph, limit: float = LIMIT) -> JointGraph:
    """Return the graph with measured workspaces of its convolutions and reduced-precision products.

    Args:
        graph: of a step on the CPU.
        limit: approximate limit on measuring, in seconds.
    """
    calls = dict[int, KernelCall]()
    for op in graph.ops:
        if op.target in CONVOLUTIONS | PRODUCTS:
            args = map_refs(op.args, lambda value: meta_tensor(graph.values[value]))
            call = KernelCall.of(op.target, args, op.kwargs)
            if _needs_measurement(call):
                calls[op.index] = call
    distinct = {call.key: call for call in calls.values()}
    largest_first = sorted(distinct.values(), key=lambda call: (call.bytes, call.key), reverse=True)
    _measure(largest_first, limit)
    ops = list(graph.ops)
    for index, call in calls.items():
        workspace = _known.get(_key(call))
        if workspace is not None:  # and 0-d tensors for numbers among the arguments
            ops[index] = replace(ops[index], scratch=workspace + NUMBER_TENSOR_BYTES)
    return replace(graph, ops=tuple(ops))


def with_measured_workspaces(semantics: Semantics, limit: float = math.inf) -> Semantics:
    """Return the semantics of a recording on the CPU with measured workspaces of convolutions and reduced-precision
    products, in place of their formulas.

    Args:
        semantics: which temporaries, results and strides ops have.
        limit: approximate limit on measuring during the recording, in seconds: later calls go by the formulas.
    """
    measuring_seconds, clock = 0.0, clock_of(HOST)

    def temporaries(
        name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
    ) -> Sequence[Temporary]:
        """Return the buffers that a call allocates in addition to its results."""
        nonlocal measuring_seconds
        begin = clock()
        size = measured_workspace(name, args, kwargs, measure_new=measuring_seconds < limit)
        measuring_seconds += clock() - begin
        if size is None:  # not measured: its formula counts
            return semantics.temporaries(name, args, kwargs, result, in_backward)
        return (Temporary(size),) if size else ()

    return replace(semantics, temporaries=temporaries)


def measured_workspace(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, measure_new: bool = True
) -> int | None:
    """Return the workspace of a call in bytes; None for an op that goes by its formula.

    Args:
        name: of the op, as ``aten.convolution.default``; an ``out`` overload counts as ``default``.
        args, kwargs: arguments; of tensors only shape, strides and dtype count.
        measure_new: whether to run a call that was not measured before; if not, None is returned for it.
    """
    if name.replace(".out", ".default") not in CONVOLUTIONS | PRODUCTS:  # `KernelCall.of` takes longer
        return None
    call = KernelCall.of(name, args, kwargs)
    if not _needs_measurement(call):
        return None
    if measure_new:
        with _torch.no_modes():
            _measure([call], LIMIT)
    return _known.get(_key(call))


def _key(call: KernelCall) -> _Key:
    """Return the key of a call's measured workspace, which depends on the number of threads."""
    return torch.get_num_threads(), call.key


def _needs_measurement(call: KernelCall) -> bool:
    """Return whether a call's workspace depends on the processor: a convolution, or a reduced-precision product."""
    return call.name in CONVOLUTIONS or (call.name in PRODUCTS and call.args[0].dtype in REDUCED)


def _measure(calls: Sequence[KernelCall], limit: float) -> None:
    """Run calls that were not measured before, until the limit in seconds, and add their workspaces to `_known`.
    Nothing is measured while another profiler runs: torch allows only one at a time."""
    calls = [call for call in calls if _key(call) not in _known and _key(call) not in _failed]
    if not calls or _torch.is_profiled():
        return
    clock = clock_of(HOST)
    profile, deadline, ran = _torch.memory_profile(), clock() + limit, list[KernelCall]()
    with torch.no_grad(), torch.autocast("cpu", enabled=False), profile:
        for call in calls:
            if ran and clock() >= deadline:
                break
            args, kwargs = call.on_zeros(HOST)
            try:
                with _torch.marker(str(len(ran))):  # marks the allocator's events with the call's number
                    result = call.run(args, kwargs)
                del result  # outside of the marker: a call's net bytes are its results
            except Exception:  # any error of the kernel: then the formula counts
                _failed.add(_key(call))
            ran.append(call)
    workspaces = _workspaces(_torch.Profile.of(profile), len(ran))
    _known.update((_key(call), workspaces[index]) for index, call in enumerate(ran) if _key(call) not in _failed)


def _workspaces(profile: _torch.Profile, calls: int) -> list[int]:
    """Return the peak of each call in bytes, less its results. ``calls``: number of calls that the profile has events
    of; an event's mark is the number of its call."""
    current, peak = [0] * calls, [0] * calls
    for event in profile.events:
        if event.mark:
            index = int(event.mark)
            current[index] += event.bytes
            peak[index] = max(peak[index], current[index])
    # what is still allocated after a call is its results
    return [peak_bytes - result_bytes for peak_bytes, result_bytes in zip(peak, current, strict=True)]
