"""Turns the records of an observer into the parts of a Trace: layer names, causes of storages, saved tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

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
    updated = set[int]()  # storages that an update reads and writes in place
    for op in ops:
        if op.phase == "optimizer" and op.writes and op.writes[0] in {operand.storage for operand in op.reads}:
            updated.add(op.writes[0])
    computed = _computed(ops, observer)
    collective = collective_storages(ops, observer.ownership.weights.keys())
    for entry in observer.ledger.entries:
        cause = _cause(entry, observer, ops, sharers, updated, computed, collective, ticks[0])
        weight = observer.ownership.gradients.get(entry.id, entry.id)  # a gradient gets the name of its parameter
        storages.append(Storage(
            id=entry.id, bytes=entry.bytes, cause=cause, born=entry.born, died=entry.died, op=entry.op,
            dtype=entry.dtype, shape=entry.shape, device=entry.device, name=names.storages.get(weight, ""),
            sharers=tuple(sharers.get(entry.id, ())), low=entry.low, used_on=entry.used_on,
            stream=entry.stream + entry.pool * PRIVATE_POOL,  # stream and pool in a single number
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
    models = [root for root in roots if next(root.parameters(), None) is not None]
    called = set(place.called)
    used = [root for root in models if any(id(module) in called for module in root.modules())] or models
    result: dict[int, str] = {}
    roots_of_kind: dict[str, int] = {}  # class name -> number of its roots so far
    for root in used + [root for root in roots if root not in used]:
        kind = type(root).__name__
        roots_of_kind[kind] = number = roots_of_kind.get(kind, 0) + 1
        title = kind if number == 1 else f"{kind}#{number}"
        prefix = "" if len(used) == 1 and root is used[0] else title + "."
        for path, module in root.named_modules():
            result.setdefault(id(module), prefix + path if path else title)
    return result


def _name_layers(observer: Observer) -> _Names:
    """Return the names of all live modules and of their parameters and buffers, with a Layer for each module."""
    names = _Names(module_names(observer.place))

    def storages_of(path: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
        """Return the storages of a module's (name, tensor) pairs, and add their names."""
        storages: list[int] = []
        for name, tensor in tensors:
            for part, inner in _torch.inner_tensors(tensor).items():  # a quantized weight consists of several
                entry = observer.ledger.find(inner)
                if entry is not None:
                    storages.append(entry.id)
                    names.storages.setdefault(entry.id, f"{path}.{name}" + (f".{part}" if part else ""))
                    names.owners.setdefault(entry.id, path)
        return tuple(storages)

    for module in observer.place.live_modules():
        path = names.modules.get(id(module))
        if path is not None:
            weights = storages_of(path, module.named_parameters(recurse=False, remove_duplicate=False))
            buffers = storages_of(path, module.named_buffers(recurse=False, remove_duplicate=False))
            where = format_frame(observer.place.made_at.get(id(module)))
            names.layers.append(Layer(path, type(module).__name__, weights, buffers, where))
    return names


def _ops(observer: Observer, names: _Names) -> list[Op]:
    """Return an Op for each note. A backward op gets layer and line of its forward op, else the layer whose weight it
    works on."""
    lines = {frame: format_frame(frame) for frame in {note.frame for note in observer.notes}}
    ops: list[Op] = []
    for index, note in enumerate(observer.notes):
        # within a backward pass, only a checkpoint calls modules with gradients enabled
        recomputed = note.phase == "backward" and note.grad_enabled and note.module != 0
        forward_op = None
        if note.phase == "backward" and not recomputed and note.sequence is not None:
            forward_op = observer.creating_ops.by_sequence_number.get(note.sequence)
        where = lines[note.frame]
        layer = names.modules.get(note.module, "")
        if forward_op is not None:
            layer, where = ops[forward_op].layer, ops[forward_op].where
        elif note.phase in ("backward", "optimizer") and not layer:
            layer = _owning_layer(note, observer, names)
        ops.append(
            Op(
                index=index, name=note.name, phase=note.phase, step=note.step, layer=layer, where=where,
                start=note.start, end=note.end, reads=tuple(Operand(name, storage) for name, storage in note.reads),
                writes=tuple(note.writes), needs_grad=note.needs_grad, gradient_of=forward_op, recomputed=recomputed,
            )
        )  # fmt: skip
    return ops


def _owning_layer(note: Note, observer: Observer, names: _Names) -> str:
    """Return the layer whose weights, or their gradients, an op reads or writes; "" if there is none or several."""
    weight_of = observer.ownership.gradients  # storage of a gradient -> storage of its weight
    storages = [storage for _, storage in note.reads] + note.writes
    weights = {weight_of.get(storage, storage) for storage in storages}
    owners = {names.owners[weight] for weight in weights if weight in names.owners}
    return owners.pop() if len(owners) == 1 else ""


def _saving_ops(observer: Observer, ops: list[Op]) -> dict[int, list[Sharer]]:
    """Return storage -> the forward ops that saved it for backward: those whose derivative formulas read it."""
    entries = observer.ledger.entries
    by_storage: dict[int, dict[tuple[int, str], Sharer]] = {}
    recomputed = _recomputed_roles(ops)
    for op in ops:
        if op.phase != "backward" or op.gradient_of is None:
            continue
        forward_op = ops[op.gradient_of]
        for read in op.reads:
            allocated_by = entries[read.storage].op
            if allocated_by is not None:
                allocating = ops[allocated_by]
                is_of_backward = allocating.phase == "backward" and not allocating.recomputed
                if allocating.phase == "optimizer" or (is_of_backward and allocated_by > forward_op.index):
                    continue  # a gradient or temporary of this backward pass or of an update, so not saved
            for role in _roles(forward_op, read, recomputed):
                by_storage.setdefault(read.storage, {}).setdefault(
                    (forward_op.index, role), Sharer(forward_op.index, role, read.name)
                )
    return {storage: list(sharers.values()) for storage, sharers in by_storage.items()}


def _roles(forward_op: Op, read: Operand, recomputed: dict[int, list[tuple[str, str]]]) -> list[str]:
    """Return the roles (argument name, "result", "kept") in ``forward_op`` of a storage that its backward reads."""
    if read.storage in forward_op.writes:
        # in place: the formula of an op that overwrote its input can only mean the result
        return ["result"]
    roles = {operand.name for operand in forward_op.reads if operand.storage == read.storage}
    if not roles:  # under checkpointing the formula reads the storages of the recomputed op
        roles = {role for name, role in recomputed.get(read.storage, ()) if name == forward_op.name}
    if not roles and read.name in {operand.name for operand in forward_op.reads}:
        roles = {read.name}  # a copy that the op saved under the same name
    return sorted(roles) or ["kept"]


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
    """Return the storages that forward ops compute in modules or from results of modules.

    Includes those into which an op writes such results in place, as into a buffer for an output computed in tiles.
    """
    entries, computed = observer.ledger.entries, set[int]()
    for op in ops:
        if op.phase != "forward":
            continue
        in_place = op.name.split(".")[1].endswith("_")
        reads_computed = any(read.storage in computed for read in op.reads)
        if reads_computed or (op.layer and not in_place):
            computed.update(storage for storage in op.writes if in_place or entries[storage].op == op.index)
    return computed


def _is_input_copy(entry: Entry, op: Op, observer: Observer, ops: list[Op]) -> bool:
    """Return whether ``op`` copies to the card what was computed on the host alone: it moves a batch to the card."""
    if entry.device == HOST or op.name != _COPY or not op.reads:
        return False
    queue, seen = [operand.storage for operand in op.reads], set[int]()
    while queue:
        source = observer.ledger.entries[queue.pop()]
        if source.device != HOST:
            return False
        if source.id not in seen and source.op is not None:
            queue += [operand.storage for operand in ops[source.op].reads]
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
    """Return why a storage exists. Owners come first, then when it was allocated, then its op and who saves it.

    Args:
        sharers: storage -> the forward ops that saved it for backward.
        updated: storages that updates write in place.
        computed: storages that forward ops compute in modules.
        collective: operands of collective operations.
        first_step: tick at which building ended.
    """
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
    created = not op.reads and not op.layer and entry.id not in computed  # outside of modules, by a factory
    if op.phase == "forward" and (created or _is_input_copy(entry, op, observer, ops)):
        return "input"
    if entry.id in sharers:
        return "saved"
    if op.phase == "backward" and not op.recomputed:
        return "activation_gradient"
    return "activation"
