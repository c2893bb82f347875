"""Check: convolutions whose cuDNN workspace can exceed their tensors, and shapes that change under cudnn.benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

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
    """Return a finding if the workspaces of convolutions can add a large share to the peak, with what would lower
    them."""
    trace = subject.trace
    plans_of = {answer.storage: answer.plans for answer in trace.engines}
    expected = {
        size.storage for size in trace.expected
        if (op := trace.storages[size.storage].op) is not None and "convolution" in trace.ops[op].name
    }  # fmt: skip
    by_layer = _larger_than_tensors(trace, {*plans_of, *expected})
    if not by_layer:
        return []
    unplanned = tuple(
        replace(storage, bytes=0) if storage.id in plans_of or storage.id in expected else storage
        for storage in trace.storages
    )
    low = simulate(replace(trace, storages=unplanned, expected=()), workspace="low").peak_allocated
    high = simulate(trace).peak_allocated
    ordered = sorted(by_layer.items(), key=lambda item: -item[1][0].bytes)
    layer, (workspace, tensor_bytes, op) = ordered[0]
    is_3d = any(len(trace.storages[r.storage].shape) == 5 for r in op.reads)
    dimensions = 5 if is_3d else 4
    if high - low < _MIN_SHARE[dimensions] * low:
        return []
    plans = plans_of.get(workspace.id, ())
    if workspace.id in expected:
        message, advice = _of_expected(trace, workspace, layer, tensor_bytes, (low, high))
    else:
        message, advice = _message_and_advice(workspace, plans, layer, tensor_bytes, (low, high), is_3d=is_3d)
    tried = remedies(subject.recorder, dimensions) if plans and subject.recorder is not None else []
    rows = [
        {"layer": name, "where": op.where, "bytes": workspace.bytes}
        | ({"engine": plans_of[workspace.id][0].engine} if workspace.id in plans_of else {})
        for name, (workspace, _, op) in ordered
    ]
    details = {"kind": "larger than tensors", "low": low, "high": high, "layers": rows}
    details["remedies"] = {remedy.name: remedy.peak for remedy in tried}
    return [Finding(ID, "info", layer, op.where, high - low, message, (*advice, *_remedy_advice(tried, high)), details)]


def _larger_than_tensors(trace: Trace, sized: Collection[int]) -> dict[str, tuple[Storage, int, Op]]:
    """Return, by layer, the largest workspace that exceeds the tensors of its convolution, the bytes of these tensors,
    and the op. ``sized``: the workspaces of one size, planned or expected."""
    by_layer: dict[str, tuple[Storage, int, Op]] = {}
    for storage in trace.counted:
        if storage.cause != "workspace" or storage.op is None or (storage.low is None and storage.id not in sized):
            continue
        op = trace.ops[storage.op]
        if "convolution" not in op.name:
            continue
        tensors = sum(trace.storages[n].bytes for n in {*(r.storage for r in op.reads), *op.writes})
        if storage.bytes > tensors and (op.layer not in by_layer or storage.bytes > by_layer[op.layer][0].bytes):
            by_layer[op.layer] = (storage, tensors, op)
    return by_layer


def _message_and_advice(
    workspace: Storage, plans: Plans, layer: str, tensor_bytes: int, peaks: tuple[int, int], *, is_3d: bool
) -> tuple[str, tuple[str, ...]]:
    """Return message and advice about a workspace that cuDNN planned or, without plans, about its interval of bytes."""
    size, own = format_bytes(workspace.bytes), format_bytes(tensor_bytes)
    low, high = map(format_bytes, peaks)
    if plans:
        message = (
            f"cuDNN plans {size} of workspace for {layer} (engine {plans[0].engine}), whose tensors are {own}; the "
            f"step's peak is {high}, and without such workspaces {low}"
        )
        less = f"{plans[-1].engine}, with {format_bytes(plans[-1].workspace)}"
        room = f"where there is no room for it, torch takes a slower engine, down to {less}"
        return message, ("Measure it on the card, which can choose another engine", *([room] * (len(plans) > 1)))
    message = (
        f"cuDNN may take up to {size} of workspace for {layer}, whose tensors are {own}; the step's peak lies between "
        f"{low} and {high}"
    )
    known = (
        "In 3D more is on record (17 GB, then 161 GiB asked for when the depth went from 4 to 5: pytorch#128947, also "
        "#136479, #31500, #13412): measure it on the card before you trust a smaller input to take less",
    )
    advice = (
        "Leave room up to the high figure; torch.backends.cudnn.benchmark = False keeps the trials of the first step "
        "away, and channels_last often leads to algorithms without workspace",
        *(known if is_3d else ()),
    )
    return message, advice


def _of_expected(
    trace: Trace, workspace: Storage, layer: str, tensor_bytes: int, peaks: tuple[int, int]
) -> tuple[str, tuple[str, ...]]:
    """Return the texts about a workspace that is expected by the model of cuDNN's choice."""
    low, high = map(format_bytes, peaks)
    ends = (format_bytes(simulate(trace, workspace=end).peak_allocated) for end in ("low", "high"))
    message = (
        f"cuDNN is expected to take {format_bytes(workspace.bytes)} of workspace for {layer}, whose tensors are "
        f"{format_bytes(tensor_bytes)}; the step's peak is about {high} (95 %: {' to '.join(ends)}), and without such "
        f"workspaces {low}"
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
    shapes: dict[int, set[tuple[tuple[int, ...], str]]] = {}
    first_op: dict[int, Op] = {}
    weight_of: dict[int, int] = {}
    for op in trace.ops:
        operands = {r.name: trace.storages[r.storage] for r in op.reads}
        if op.phase == "forward" and "convolution" in base_name(op.name) and {"input", "weight"} <= set(operands):
            weight = weight_of[op.index] = operands["weight"].id
            shapes.setdefault(weight, set()).add((trace.storages[op.writes[0]].shape, operands["input"].dtype))
            first_op.setdefault(weight, op)
    changing = [weight for weight, of_weight in shapes.items() if len(of_weight) > 1]
    if not changing:
        return []
    op = first_op[changing[0]]
    workspace = _largest_workspace(trace, {index for index, weight in weight_of.items() if weight in changing})
    sizes = max(len(shapes[weight]) for weight in changing)
    count = len(changing)
    message = (
        f"torch.backends.cudnn.benchmark is on, and {count} convolution{'' if count == 1 else 's'} met inputs "
        f"of {sizes} sizes in {len(trace.steps)} step{'' if len(trace.steps) == 1 else 's'}: for each new one cuDNN "
        f"tries all algorithms, the largest of whose workspaces may take up to {format_bytes(workspace)}"
    )
    advice = ("Set torch.backends.cudnn.benchmark = False, or pad inputs to a few fixed sizes",)
    rows = [{"layer": first_op[w].layer, "where": first_op[w].where, "sizes": len(shapes[w])} for w in changing]
    details = {"kind": "benchmark", "workspace": workspace, "layers": rows}
    return [Finding(ID, "warning", op.layer, op.where, 0, message, advice, details)]


def _largest_workspace(trace: Trace, convolutions: set[int]) -> int:
    """Return the bytes of the largest workspace of these convolutions and their gradients."""
    planned = {answer.storage for answer in trace.engines}
    sizes = [0]
    for storage in trace.counted:
        known = storage.low is not None or storage.id in planned
        if storage.cause == "workspace" and storage.op is not None and known:
            op = trace.ops[storage.op]
            if {op.index, op.gradient_of} & convolutions:
                sizes.append(storage.bytes)
    return max(sizes)
