"""Turns the records of an observer into the parts of a Trace: layer names, causes of storages, saved tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import nn

from memplan import _torch
from memplan.trace.recording.collectives import Collective, collective_storages
from memplan.trace.recording.ledger import Entry, Note
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Place, format_frame
from memplan.trace.records import (
    HOST,
    PRIVATE_POOL,
    Assumption,
    BackwardPass,
    Call,
    Cause,
    Counters,
    Form,
    FunctionLines,
    HostStorage,
    Layer,
    LoaderUse,
    Op,
    Operand,
    Returned,
    Sharer,
    Storage,
)
from memplan.trace.trace import Trace

_COPY = "aten._to_copy.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The fields of a Trace that an observer records, each as in `memplan.Trace`."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    layers: tuple[Layer, ...]
    steps: tuple[int, ...]
    end: int
    forms: tuple[Form, ...] = ()
    returned: tuple[Returned, ...] = ()
    lines: tuple[FunctionLines, ...] = ()
    passes: tuple[BackwardPass, ...] = ()
    optimized: tuple[int, ...] = ()
    ungraded: tuple[int, ...] = ()


def trace_of(
    parts: StepParts,
    *,
    origin: Literal["recorded", "measured", "dry"],
    device: str,
    notes: tuple[str, ...] = (),
    assumptions: tuple[Assumption, ...] = (),
    calls: tuple[Call, ...] = (),
    other_kernels: tuple[str, ...] = (),
    alike: tuple[str, ...] = (),
    counters: tuple[Counters, ...] = (),
    collected: tuple[int, ...] = (),
    loaders: tuple[LoaderUse, ...] = (),
    host: tuple[HostStorage, ...] = (),
) -> Trace:
    """Return the Trace of the parts, for this version of torch."""
    return Trace(
        **{part.name: getattr(parts, part.name) for part in fields(parts)}, origin=origin, device=device,
        torch=torch.__version__, notes=notes, assumptions=assumptions, calls=calls, other_kernels=other_kernels,
        alike=alike, counters=counters, collected=collected, loaders=loaders, host=host,
    )  # fmt: skip


@dataclass(slots=True)
class _Names:
    """Names of modules and of the parameters and buffers in them."""

    modules: dict[int, str] = field(default_factory=dict)
    """id() of a module -> its path."""
    layers: list[Layer] = field(default_factory=list)
    storages: dict[int, str] = field(default_factory=dict)
    """Storage of a parameter or buffer -> its name, such as "fc.weight"."""
    owners: dict[int, str] = field(default_factory=dict)
    """Storage of a parameter or buffer -> path of its module."""


def finish(observer: Observer, ticks: Sequence[int], lines: tuple[FunctionLines, ...] = ()) -> StepParts:
    """Return the parts of a trace from an observer's records. The step's models must be alive, to name the layers.

    ``ticks``: ticks of the ledger at which building and each step ended.
    """
    names = _name_layers(observer)
    ops = _ops(observer, names)
    sharers = _saving_ops(observer, ops)
    for entry in observer.ledger.entries:
        for companion in entry.companions:  # a storage without a tensor is saved together with its owner
            if entry.id in sharers:
                sharers.setdefault(companion.id, sharers[entry.id])
    storages = list[Storage]()
    updated = {
        op.writes[0]
        for op in ops
        if op.phase == "optimizer" and op.writes and op.writes[0] in {operand.storage for operand in op.reads}
    }
    computed = _computed(ops, observer)
    collective = collective_storages(ops, observer.ownership.weights.keys())
    for entry in observer.ledger.entries:
        cause = _cause(entry, observer, ops, sharers, updated, computed, collective, ticks[0])
        weight = observer.ownership.gradients.get(entry.id, entry.id)
        storages.append(Storage(
            id=entry.id, bytes=entry.bytes, cause=cause, born=entry.born, died=entry.died, op=entry.op,
            dtype=entry.dtype, shape=entry.shape, device=entry.device, name=names.storages.get(weight, ""),
            sharers=tuple(sharers.get(entry.id, ())), low=entry.low, used_on=entry.used_on,
            stream=entry.stream + entry.pool * PRIVATE_POOL,
        ))  # fmt: skip
    forms = observer.forms
    returned = tuple(Returned(names.modules.get(module, ""), after, views) for module, after, views in forms.returned)
    ownership = observer.ownership
    return StepParts(
        ops=tuple(ops), storages=tuple(storages), layers=tuple(names.layers), steps=tuple(ticks[:-1]), end=ticks[-1],
        forms=tuple(forms.forms), returned=returned, lines=lines, passes=tuple(ownership.passes),
        optimized=tuple(sorted(ownership.optimized)), ungraded=tuple(sorted(ownership.optimized - ownership.graded)),
    )  # fmt: skip


def module_names(place: Place) -> dict[int, str]:
    """Return id() of a module -> its path as in `named_modules` of its root; for the root, its class name.

    Where several roots are used (models, or losses that are modules), paths begin with the root's class name.
    """
    live = list(place.live_modules())
    children = {id(child) for module in live for child in module.children()}
    roots = [module for module in live if id(module) not in children]
    models = [root for root in roots if any(True for _ in root.parameters())]
    called = set(place.called)
    used = [root for root in models if any(id(m) in called for m in root.modules())] or models
    result: dict[int, str] = {}
    counts: dict[str, int] = {}
    for root in used + [r for r in roots if r not in used]:
        kind = type(root).__name__
        counts[kind] = counts.get(kind, 0) + 1
        title = kind if counts[kind] == 1 else f"{kind}#{counts[kind]}"
        prefix = "" if len(used) == 1 and root is used[0] else title + "."
        for path, module in root.named_modules():
            result.setdefault(id(module), prefix + path if path else title)
    return result


def _name_layers(observer: Observer) -> _Names:
    """Return the names of all live modules, with a Layer for each."""
    names = _Names(module_names(observer.place))
    for module in observer.place.live_modules():
        layer = _layer(module, names, observer)
        if layer is not None:
            names.layers.append(layer)
    return names


def _layer(module: nn.Module, names: _Names, observer: Observer) -> Layer | None:
    """Return the Layer of a module, and add its parameters and buffers to ``names``; None if the module has no path."""
    path = names.modules.get(id(module))
    if path is None:
        return None
    owned: list[list[int]] = [[], []]  # storages of parameters, of buffers
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    for kind, tensors in enumerate((parameters, buffers)):
        for name, tensor in tensors:
            for part, inner in _torch.inner_tensors(tensor).items():  # a quantized weight consists of several
                entry = observer.ledger.find(inner)
                if entry is not None:
                    owned[kind].append(entry.id)
                    names.storages.setdefault(entry.id, f"{path}.{name}" + (f".{part}" if part else ""))
                    names.owners.setdefault(entry.id, path)
    where = format_frame(observer.place.made_at.get(id(module)))
    return Layer(path, type(module).__name__, tuple(owned[0]), tuple(owned[1]), where)


def _ops(observer: Observer, names: _Names) -> list[Op]:
    """Return an Op for each note. A backward op gets layer and line of its forward op, else the layer whose weight it
    works on."""
    frames: dict[tuple[str, int], str | None] = {}
    ops: list[Op] = []
    for index, note in enumerate(observer.notes):
        recomputed = note.phase == "backward" and note.grad_enabled and note.module != 0
        source = None
        if note.phase == "backward" and not recomputed and note.sequence is not None:
            source = observer.creating_ops.by_sequence_number.get(note.sequence)
        if note.frame is not None and note.frame not in frames:
            frames[note.frame] = format_frame(note.frame)
        where = frames[note.frame] if note.frame is not None else None
        layer = names.modules.get(note.module, "")
        if source is not None:
            layer, where = ops[source].layer, ops[source].where
        elif note.phase in ("backward", "optimizer") and not layer:
            layer = _owning_layer(note, observer, names)
        ops.append(
            Op(
                index=index, name=note.name, phase=note.phase, step=note.step, layer=layer, where=where,
                start=note.start, end=note.end, reads=tuple(Operand(name, storage) for name, storage in note.reads),
                writes=tuple(note.writes), needs_grad=note.needs_grad, gradient_of=source, recomputed=recomputed,
            )
        )  # fmt: skip
    return ops


def _owning_layer(note: Note, observer: Observer, names: _Names) -> str:
    """Return the layer of the only weight whose value or gradient an op reads or writes; "" if there are several."""
    gradients = observer.ownership.gradients
    owners = {
        names.owners[weight]
        for entry in (*(storage for _, storage in note.reads), *note.writes)
        if (weight := gradients.get(entry, entry)) in names.owners
    }
    return owners.pop() if len(owners) == 1 else ""


def _saving_ops(observer: Observer, ops: list[Op]) -> dict[int, list[Sharer]]:
    """Return storage -> the forward ops that saved it for backward: those whose derivative formulas read it."""
    entries = observer.ledger.entries
    by_storage: dict[int, dict[tuple[int, str], Sharer]] = {}
    recomputed = _recomputed_roles(ops)
    for op in ops:
        if op.phase != "backward" or op.gradient_of is None:
            continue
        source = ops[op.gradient_of]
        for read in op.reads:
            allocating = entries[read.storage].op
            maker = ops[allocating] if allocating is not None else None
            if maker is not None and maker.phase == "backward" and not maker.recomputed and maker.index > source.index:
                continue  # a gradient or temporary of this backward pass
            if maker is not None and maker.phase == "optimizer":
                continue
            for role in _roles(source, read, recomputed):
                by_storage.setdefault(read.storage, {}).setdefault(
                    (source.index, role), Sharer(source.index, role, read.name)
                )
    return {storage: list(sharers.values()) for storage, sharers in by_storage.items()}


def _roles(source: Op, read: Operand, recomputed: dict[int, list[tuple[str, str]]]) -> list[str]:
    """Return the roles (argument name, "result", "kept") of a storage in the forward op whose backward reads it.

    ``recomputed``: by storage, (name of the op, role in it) for the recomputed ops that read or made it.
    """
    if read.storage in source.writes:
        # in place: the formula of an op that overwrote its input can only mean the result
        return ["result"]
    roles = sorted({operand.name for operand in source.reads if operand.storage == read.storage})
    # under checkpointing the formula reads the storages of the recomputed op
    roles = roles or sorted({role for name, role in recomputed.get(read.storage, ()) if name == source.name})
    if not roles and read.name in {operand.name for operand in source.reads}:
        roles = [read.name]  # a copy that the op saved under the same name
    return roles or ["kept"]


def _recomputed_roles(ops: list[Op]) -> dict[int, list[tuple[str, str]]]:
    """Return storage -> (op name, role) of the recomputed ops that read or wrote it."""
    roles: dict[int, list[tuple[str, str]]] = {}
    for op in ops:
        if op.recomputed:
            for operand in op.reads:
                roles.setdefault(operand.storage, []).append((op.name, operand.name))
            for storage in op.writes:
                roles.setdefault(storage, []).append((op.name, "result"))
    return roles


def _computed(ops: list[Op], observer: Observer) -> set[int]:
    """Return the storages of results computed in modules, and storages into which ops write such results in place, as
    into the buffer of an output that is stitched from tiles."""
    entries, computed = observer.ledger.entries, set[int]()
    for op in ops:
        if op.phase != "forward":
            continue
        in_place = op.name.split(".")[1].endswith("_")
        if any(read.storage in computed for read in op.reads) or (op.layer and not in_place):
            computed.update(number for number in op.writes if in_place or entries[number].op == op.index)
    return computed


def _is_input_copy(entry: Entry, op: Op, observer: Observer, ops: list[Op]) -> bool:
    """Return whether a storage is a copy on the card of results of ops on the host: a batch moved to the card."""
    if entry.device == HOST or op.name != _COPY or not op.reads:
        return False
    sources, seen = [operand.storage for operand in op.reads], set[int]()
    while sources:
        source = observer.ledger.entries[sources.pop()]
        if source.device != HOST:
            return False
        if source.id not in seen and source.op is not None:
            sources += [operand.storage for operand in ops[source.op].reads]
        seen.add(source.id)
    return True


def _cause(
    entry: Entry,
    observer: Observer,
    ops: list[Op],
    sharers: dict[int, list[Sharer]],
    updated: set[int],
    computed: set[int],
    collective: Collective,
    first_step: int,
) -> Cause:
    """Return why a storage exists. Owners come first, then when it was allocated, then its op and who saves it."""
    ownership = observer.ownership
    if entry.id in ownership.workspaces:
        return "workspace"
    if entry.id in collective.gathered:
        return "gathered_weight"
    if entry.id in ownership.weights:
        return "weight"
    if entry.id in ownership.buffers:
        return "buffer"
    if entry.id in ownership.states:
        return "optimizer_state"
    if entry.id in ownership.gradients or entry.id in collective.gradients:
        return "parameter_gradient"
    if entry.id in collective.buffers:
        return "communication"
    if entry.born <= first_step and entry.id in updated:
        return "optimizer_state"  # built before the first step and changed by every update: a hand-written momentum
    if entry.born <= first_step:
        return "temporary" if entry.died is not None and entry.died <= first_step else "input"
    op = ops[entry.op] if entry.op is not None else None
    if op is None:
        return "saved" if entry.id in sharers and entry.died is not None else "input"
    if entry.died is not None and entry.died <= op.end:
        return "temporary"
    if op.phase == "optimizer":
        return "temporary"
    created = not op.reads and not op.layer and entry.id not in computed
    if op.phase == "forward" and (created or _is_input_copy(entry, op, observer, ops)):
        return "input"
    if entry.id in sharers:
        return "saved"
    if op.phase == "backward" and not op.recomputed:
        return "activation_gradient"
    return "activation"
