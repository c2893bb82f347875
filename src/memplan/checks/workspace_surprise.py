"""Convolutions whose cuDNN workspace can exceed their own tensors, and shapes that change under cudnn.benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_LEAST = {4: 0.5, 5: 0.1}
"""Share of the peak that workspaces can add before it is worth a word, by the dimensions of the tensors: most steps on
a card have some, and those of 3D convolutions are the ones that surprise."""


def find(subject: Subject) -> list[Finding]:
    """Report the interval of workspaces that cuDNN may take on a card."""
    if subject.card is None:
        return []
    return [*_larger(subject), *_changing(subject.trace)]


def _larger(subject: Subject) -> list[Finding]:
    trace = subject.trace
    engines = {one.storage: one.plans for one in trace.engines}
    most = _larger_than_tensors(trace, engines)
    if not most:
        return []
    low = simulate(_without_engines(trace, engines), workspace="low").peak_allocated
    high = simulate(trace).peak_allocated
    ordered = sorted(most.items(), key=lambda item: -item[1][0].bytes)
    layer, (storage, tensors, op) = ordered[0]
    three = any(len(trace.storages[r.storage].shape) == 5 for r in op.reads)
    if high - low < _LEAST[5 if three else 4] * low:
        return []
    plans = engines.get(storage.id, ())
    message, advice = _words(storage, plans, layer, tensors, (low, high), three=three)
    tried = remedies(subject.remaker, 5 if three else 4) if plans and subject.remaker is not None else []
    advice = (*advice, *_told(tried, high))
    rows = [
        {"layer": name, "where": one.where, "bytes": found.bytes}
        | ({"engine": engines[found.id][0].engine} if found.id in engines else {})
        for name, (found, _, one) in ordered
    ]
    details = {"kind": "larger than tensors", "low": low, "high": high, "layers": rows}
    details["remedies"] = {one.name: one.peak for one in tried}
    return [Finding(ID, "info", layer, op.where, high - low, message, advice, details)]


def _larger_than_tensors(trace: Trace, engines: Mapping[int, Plans]) -> dict[str, tuple[Storage, int, Op]]:
    """Return the largest workspace of each layer that takes more than its op's tensors, with their bytes."""
    most: dict[str, tuple[Storage, int, Op]] = {}
    for storage in trace.counted:
        known = storage.id in engines
        if storage.cause != "workspace" or storage.op is None or (storage.low is None and not known):
            continue
        op = trace.ops[storage.op]
        if "convolution" not in op.name:
            continue
        tensors = sum(trace.storages[n].bytes for n in {*(r.storage for r in op.reads), *op.writes})
        if storage.bytes > tensors and (op.layer not in most or storage.bytes > most[op.layer][0].bytes):
            most[op.layer] = (storage, tensors, op)
    return most


def _without_engines(trace: Trace, engines: Mapping[int, Plans]) -> Trace:
    storages = tuple(replace(one, bytes=0) if one.id in engines else one for one in trace.storages)
    return replace(trace, storages=storages)


def _words(
    storage: Storage, plans: Plans, layer: str, tensors: int, peaks: tuple[int, int], *, three: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the message and the advice on a workspace that cuDNN named, or that is known as an interval."""
    size, own = format_bytes(storage.bytes), format_bytes(tensors)
    low, high = map(format_bytes, peaks)
    if plans:
        message = (
            f"cuDNN plans {size} of workspace for {layer} (engine {plans[0].engine}), whose tensors are {own}; the "
            f"step's peak is {high}, and without such workspaces {low}"
        )
        less = f"{plans[-1].engine}, with {format_bytes(plans[-1].workspace)}"
        room = f"where there is no room for it, torch takes a slower engine, down to {less}"
        return message, (
            "Measure it on the card, which can choose another engine",
            *([room] * (len(plans) > 1)),
        )
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
        *(known if three else ()),
    )
    return message, advice


def _told(tried: Sequence[Remedy], peak: int) -> tuple[str, ...]:
    """Return the ways out that were computed, the one that takes least first; in a line those that do not help."""
    less = sorted((one for one in tried if one.peak < peak), key=lambda one: one.peak)
    other = [one.name for one in tried if one.peak >= peak]
    vain = (f"No less with: {', '.join(other)}",) if other else ()
    return (*(f"{one.do}: the peak is {format_bytes(one.peak)}" for one in less), *vain)


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
    asked = {one.storage for one in trace.engines}
    ours = [s for s in trace.counted if s.cause == "workspace" and s.op is not None]
    ours = [s for s in ours if s.low is not None or s.id in asked]
    ops = {s.id: trace.ops[s.op or 0] for s in ours}
    return max((s.bytes for s in ours if {ops[s.id].index, ops[s.id].gradient_of} & convolutions), default=0)
