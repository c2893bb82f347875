"""Convolutions whose cuDNN workspace can exceed their own tensors, and shapes that change under cudnn.benchmark."""

from __future__ import annotations

from memplan._bytes import format_bytes
from memplan.checks.fields.walk import base_name
from memplan.checks.finding import Finding, Subject
from memplan.simulation.simulate import simulate
from memplan.trace.records import Op
from memplan.trace.trace import Trace

ID = "workspace-surprise"
TITLE = "A convolution's workspace can exceed its tensors"

_LEAST = {4: 0.5, 5: 0.1}
"""Share of the peak that workspaces can add before it is worth a word, by the dimensions of the tensors: most steps on
a card have some, and those of 3D convolutions are the ones that surprise."""


def find(subject: Subject) -> list[Finding]:
    """Report the interval of workspaces that cuDNN may take on a card."""
    if subject.card is None:
        return []
    return [*_larger(subject.trace), *_changing(subject.trace)]


def _larger(trace: Trace) -> list[Finding]:
    most: dict[str, tuple[int, int, Op]] = {}
    for storage in trace.counted:
        if storage.cause != "workspace" or storage.low is None or storage.op is None:
            continue
        op = trace.ops[storage.op]
        if "convolution" not in op.name:
            continue
        tensors = sum(trace.storages[n].bytes for n in {*(r.storage for r in op.reads), *op.writes})
        if storage.bytes > tensors and storage.bytes > most.get(op.layer, (0, 0, op))[0]:
            most[op.layer] = (storage.bytes, tensors, op)
    low, high = (simulate(trace, workspace=case).peak_allocated for case in ("low", "high"))  # pyright: ignore[reportArgumentType]  # two cases
    if not most:
        return []
    ordered = sorted(most.items(), key=lambda item: -item[1][0])
    layer, (size, tensors, op) = ordered[0]
    three = any(len(trace.storages[r.storage].shape) == 5 for r in op.reads)
    if high - low < _LEAST[5 if three else 4] * low:
        return []
    message = (
        f"cuDNN may take up to {format_bytes(size)} of workspace for {layer}, whose tensors are "
        f"{format_bytes(tensors)}; the step's peak lies between {format_bytes(low)} and {format_bytes(high)}"
    )
    known = (
        "In 3D more is on record (17 GB, then 161 GiB asked for when the depth went from 4 to 5: pytorch#128947, also "
        "#136479, #31500, #13412): measure it on the card before you trust a smaller input to take less",
    )
    advice = (
        "Leave room up to the high figure; torch.backends.cudnn.benchmark = False keeps the trials of the first step "
        "away, and channels_last often leads to algorithms without workspace",
        *(known if three else ()),
    )
    rows = [{"layer": name, "where": one.where, "bytes": bytes_} for name, (bytes_, _, one) in ordered]
    details = {"kind": "larger than tensors", "low": low, "high": high, "layers": rows}
    return [Finding(ID, "info", layer, op.where, high - low, message, advice, details)]


def _changing(trace: Trace) -> list[Finding]:
    """Report shapes that change under cudnn.benchmark: every new one tries all algorithms anew, each with its
    workspace."""
    if not any("cudnn.benchmark = True" in note for note in trace.notes):
        return []
    shapes: dict[int, set[tuple[tuple[int, ...], str]]] = {}
    where: dict[int, Op] = {}
    weight_of: dict[int, int] = {}
    for op in trace.ops:
        given = {r.name: trace.storages[r.storage] for r in op.reads}
        if op.phase == "forward" and "convolution" in base_name(op.name) and {"input", "weight"} <= set(given):
            weight = weight_of[op.index] = given["weight"].id
            shapes.setdefault(weight, set()).add((trace.storages[op.writes[0]].shape, given["input"].dtype))
            where.setdefault(weight, op)
    many = [weight for weight, seen in shapes.items() if len(seen) > 1]
    if not many:
        return []
    op = where[many[0]]
    most = _most_workspace(trace, {index for index, weight in weight_of.items() if weight in many})
    sizes = max(len(shapes[weight]) for weight in many)
    message = (
        f"torch.backends.cudnn.benchmark is on, and {len(many)} convolution{'' if len(many) == 1 else 's'} met inputs "
        f"of {sizes} sizes in {len(trace.steps)} step{'' if len(trace.steps) == 1 else 's'}: for each new one cuDNN "
        f"tries all algorithms, the largest of whose workspaces may take up to {format_bytes(most)}"
    )
    advice = ("Set torch.backends.cudnn.benchmark = False, or pad inputs to a few fixed sizes",)
    rows = [{"layer": where[w].layer, "where": where[w].where, "sizes": len(shapes[w])} for w in many]
    details = {"kind": "benchmark", "workspace": most, "layers": rows}
    return [Finding(ID, "warning", op.layer, op.where, 0, message, advice, details)]


def _most_workspace(trace: Trace, convolutions: set[int]) -> int:
    """Return bytes that the largest workspace of these or their gradients can take."""
    ours = [s for s in trace.counted if s.cause == "workspace" and s.low is not None and s.op is not None]
    ops = {s.id: trace.ops[s.op or 0] for s in ours}
    return max((s.bytes for s in ours if {ops[s.id].index, ops[s.id].gradient_of} & convolutions), default=0)
