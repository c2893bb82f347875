"""Check: convolutions whose cuDNN workspace can exceed their tensors, and shapes that change under cudnn.benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.op_names import base_name
from memplan.checks.workspace_remedies import Remedy, remedies
from memplan.cudnn.questions import Plans
from memplan.simulation.simulate import simulate
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

ID = "workspace-surprise"
TITLE = "A convolution's workspace can exceed its tensors"

_MIN_SHARE = {4: 0.5, 5: 0.1}
"""Smallest share of the peak, by the dimensions of the tensors, that workspaces have to be able to add for a finding.
Most steps on a card have workspaces; those of 3D convolutions are the ones that surprise."""


def find(subject: Subject) -> list[Finding]:
    """Return findings about large workspaces and about changing shapes under cudnn.benchmark; none on the CPU."""
    if subject.card is None:
        return []
    return [*_large_workspaces(subject), *_changing_shapes(subject.trace)]


def _large_workspaces(subject: Subject) -> list[Finding]:
    """Return a finding if workspaces of convolutions can be a large share of the peak, with what lowers them."""
    trace = subject.trace
    plans_of = {answer.storage: answer.plans for answer in trace.engines}  # workspace -> cuDNN's plans for its op
    expected: set[int] = set()  # workspaces of convolutions whose size is an expected value
    for size in trace.expected:
        op_index = trace.storages[size.storage].op
        if op_index is not None and "convolution" in trace.ops[op_index].name:
            expected.add(size.storage)
    by_layer = _larger_than_tensors(trace, {*plans_of, *expected})
    if not by_layer:
        return []
    without = tuple(
        replace(storage, bytes=0) if storage.id in plans_of or storage.id in expected else storage
        for storage in trace.storages
    )
    low = simulate(replace(trace, storages=without, expected=()), workspace="low").peak_allocated
    high = simulate(trace).peak_allocated
    ordered = sorted(by_layer.values(), key=lambda large: -large.storage.bytes)
    largest = ordered[0]
    is_3d = any(len(trace.storages[read.storage].shape) == 5 for read in largest.op.reads)
    dimensions = 5 if is_3d else 4
    if high - low < _MIN_SHARE[dimensions] * low:
        return []
    plans = plans_of.get(largest.storage.id, ())
    if largest.storage.id in expected:
        message, advice = _of_expected(trace, largest, low, high)
    elif plans:
        message, advice = _of_plans(largest, plans, low, high)
    else:
        message, advice = _of_interval(largest, low, high, is_3d=is_3d)
    tried = remedies(subject.recorder, dimensions) if plans and subject.recorder is not None else []
    rows: list[dict[str, Any]] = []
    for large in ordered:
        rows.append({"layer": large.op.layer, "where": large.op.where, "bytes": large.storage.bytes})
        if large.storage.id in plans_of:
            rows[-1]["engine"] = plans_of[large.storage.id][0].engine
    details = {"kind": "larger than tensors", "low": low, "high": high, "layers": rows}
    details["remedies"] = {remedy.name: remedy.peak for remedy in tried}
    advice = (*advice, *_remedy_advice(tried, high))
    return [Finding(ID, "info", largest.op.layer, largest.op.where, high - low, message, advice, details)]


class _LargeWorkspace(NamedTuple):
    """A workspace that exceeds the tensors of its convolution."""

    storage: Storage
    op: Op
    tensor_bytes: int
    """Bytes of all operands and results of the op."""


def _larger_than_tensors(trace: Trace, sized: Collection[int]) -> dict[str, _LargeWorkspace]:
    """Return the largest workspace of each layer, if it exceeds the tensors of its convolution. ``sized`` are the
    workspaces of a known size, planned or expected; others have an interval of bytes."""
    by_layer: dict[str, _LargeWorkspace] = {}
    for storage in trace.counted:
        if storage.cause != "workspace" or storage.op is None or (storage.low is None and storage.id not in sized):
            continue
        op = trace.ops[storage.op]
        if "convolution" not in op.name:
            continue
        tensor_bytes = sum(trace.storages[n].bytes for n in {*(r.storage for r in op.reads), *op.writes})
        largest = by_layer.get(op.layer)
        if storage.bytes > tensor_bytes and (largest is None or storage.bytes > largest.storage.bytes):
            by_layer[op.layer] = _LargeWorkspace(storage, op, tensor_bytes)
    return by_layer


def _of_plans(large: _LargeWorkspace, plans: Plans, low: int, high: int) -> tuple[str, tuple[str, ...]]:
    """Return message and advice about a workspace that cuDNN planned. ``low`` and ``high`` are the step's peak without
    and with such workspaces."""
    message = (
        f"cuDNN plans {format_bytes(large.storage.bytes)} of workspace for {large.op.layer} (engine "
        f"{plans[0].engine}), whose tensors are {format_bytes(large.tensor_bytes)}; the step's peak is "
        f"{format_bytes(high)}, and without such workspaces {format_bytes(low)}"
    )
    advice = ["Measure it on the card, which can choose another engine"]
    if len(plans) > 1:
        smallest = f"{plans[-1].engine}, with {format_bytes(plans[-1].workspace)}"
        advice.append(f"where there is no room for it, torch takes a slower engine, down to {smallest}")
    return message, tuple(advice)


def _of_interval(large: _LargeWorkspace, low: int, high: int, *, is_3d: bool) -> tuple[str, tuple[str, ...]]:
    """Return message and advice about a workspace whose bytes are known as an interval. ``low`` and ``high`` are the
    least and the largest peak of the step."""
    message = (
        f"cuDNN may take up to {format_bytes(large.storage.bytes)} of workspace for {large.op.layer}, whose tensors "
        f"are {format_bytes(large.tensor_bytes)}; the step's peak lies between {format_bytes(low)} and "
        f"{format_bytes(high)}"
    )
    advice = [
        "Leave room up to the high figure; torch.backends.cudnn.benchmark = False keeps the trials of the first step "
        "away, and channels_last often leads to algorithms without workspace"
    ]
    if is_3d:
        advice.append(
            "In 3D more is on record (17 GB, then 161 GiB asked for when the depth went from 4 to 5: pytorch#128947, "
            "also #136479, #31500, #13412): measure it on the card before you trust a smaller input to take less"
        )
    return message, tuple(advice)


def _of_expected(trace: Trace, large: _LargeWorkspace, low: int, high: int) -> tuple[str, tuple[str, ...]]:
    """Return message and advice about a workspace of an expected size. ``low`` and ``high`` are the step's peak without
    and with such workspaces."""
    ends = (format_bytes(simulate(trace, workspace=end).peak_allocated) for end in ("low", "high"))
    message = (
        f"cuDNN is expected to take {format_bytes(large.storage.bytes)} of workspace for {large.op.layer}, whose "
        f"tensors are {format_bytes(large.tensor_bytes)}; the step's peak is about {format_bytes(high)} (95 %: "
        f"{' to '.join(ends)}), and without such workspaces {format_bytes(low)}"
    )
    return message, ("For cuDNN's own plan: pip install memplan[cudnn]; or measure it on the card",)


def _remedy_advice(tried: Sequence[Remedy], peak: int) -> tuple[str, ...]:
    """Return a line for each remedy that lowers the peak, the best first, and a line that lists the others."""
    helpful = sorted((remedy for remedy in tried if remedy.peak < peak), key=lambda remedy: remedy.peak)
    useless = [remedy.name for remedy in tried if remedy.peak >= peak]
    last = (f"No less with: {', '.join(useless)}",) if useless else ()
    return (*(f"{remedy.do}: the peak is {format_bytes(remedy.peak)}" for remedy in helpful), *last)


def _changing_shapes(trace: Trace) -> list[Finding]:
    """Return a finding if convolutions get several input shapes under cudnn.benchmark: for every new shape cuDNN tries
    all algorithms, each with its workspace."""
    if not any("cudnn.benchmark = True" in note for note in trace.notes):
        return []
    ops_by_weight: dict[int, list[Op]] = {}
    kinds_of_input: dict[int, set[Any]] = {}  # weight -> shape of the result and dtype of the input, of each call
    for op in trace.ops:
        operands = {read.name: trace.storages[read.storage] for read in op.reads}
        if op.phase == "forward" and "convolution" in base_name(op.name) and {"input", "weight"} <= set(operands):
            weight = operands["weight"].id
            ops_by_weight.setdefault(weight, []).append(op)
            kind = trace.storages[op.writes[0]].shape, operands["input"].dtype
            kinds_of_input.setdefault(weight, set()).add(kind)
    changing = {weight: ops for weight, ops in ops_by_weight.items() if len(kinds_of_input[weight]) > 1}
    if not changing:
        return []
    workspace = _largest_workspace(trace, {op.index for ops in changing.values() for op in ops})
    sizes = max(len(kinds_of_input[weight]) for weight in changing)
    count = len(changing)
    message = (
        f"torch.backends.cudnn.benchmark is on, and {count} convolution{'' if count == 1 else 's'} met inputs "
        f"of {sizes} sizes in {len(trace.steps)} step{'' if len(trace.steps) == 1 else 's'}: for each new one cuDNN "
        f"tries all algorithms, the largest of whose workspaces may take up to {format_bytes(workspace)}"
    )
    advice = ("Set torch.backends.cudnn.benchmark = False, or pad inputs to a few fixed sizes",)
    rows = [
        {"layer": ops[0].layer, "where": ops[0].where, "sizes": len(kinds_of_input[weight])}
        for weight, ops in changing.items()
    ]
    details = {"kind": "benchmark", "workspace": workspace, "layers": rows}
    return [
        Finding(
            ID, "warning", layer=rows[0]["layer"], where=rows[0]["where"], bytes=0, message=message, advice=advice,
            details=details,
        )
    ]  # fmt: skip


def _largest_workspace(trace: Trace, convolutions: set[int]) -> int:
    """Return the bytes of the largest workspace of convolutions (forward ops, by index) and their gradients."""
    planned = {answer.storage for answer in trace.engines}
    largest = 0
    for storage in trace.counted:
        is_cudnn = storage.low is not None or storage.id in planned  # its bytes are an interval, or those of a plan
        if storage.cause == "workspace" and storage.op is not None and is_cudnn:
            op = trace.ops[storage.op]
            if op.index in convolutions or op.gradient_of in convolutions:
                largest = max(largest, storage.bytes)
    return largest
