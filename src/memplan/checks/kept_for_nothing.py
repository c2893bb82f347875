"""Check: tensors saved for backward of which no gradient reads the values, and casts that no op reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memplan._bytes import format_bytes
from memplan.checks.finding import Finding, Subject
from memplan.checks.mended.savings import forms_of_all_steps, matters, readers_of, rows_of, saving, without_saving
from memplan.checks.op_names import base_name
from memplan.checks.own_copies import RELU, Copies, copies, is_dropout
from memplan.explanation.layers import OpSharers, gradients_needing, sharers_by_op
from memplan.trace.records import Form, Op, Storage
from memplan.trace.trace import Trace

ID = "kept-for-nothing"
TITLE = "Tensors are kept for the backward pass that no gradient reads"

_SHAPE_ALONE = frozenset({
    "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
})  # fmt: skip
"""Ops whose gradient saves a tensor and reads only its shape (aten/src/ATen/native/AveragePool2d.cpp and others)."""
_NORMS = frozenset({"native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
                    "batch_norm_with_update", "_batch_norm_with_update", "_native_batch_norm_legit"})  # fmt: skip
_TEXTS = {
    "unread casts": (
        "tensors of the forward pass are cast, and no op reads the copies, which live through the backward pass",
        "Let go of them before backward(), or do not make them: accelerate casts all outputs of a prepared model to "
        "float32; accelerator.unwrap_model(model, keep_fp32_wrapper=False) under accelerator.autocast() does not",
    ),
    "frozen": (
        "frozen layers keep their inputs for the gradient of a weight that gets none",
        "memplan.fit leaves them out (exact); or a torch.autograd.Function that saves the weight alone; or, where no "
        "layer before them trains, run them under torch.no_grad()",
    ),
    "shape": (
        "average pools and mirrored pads keep their inputs, of which their gradients read the shape alone",
        "Put them where the next layer keeps the tensor anyway (a pool before the activation), or write the pool as a "
        "torch.autograd.Function that keeps the shape; memplan.fit leaves them out (exact)",
    ),
    "relu before dropout": (
        "a ReLU keeps its result, and dropout behind it makes another, which the next layer keeps",
        "Swap the two: dropout, then ReLU. Both scale by factors of 0 or more, so the result is the same, and the next "
        "layer keeps the very tensor that ReLU keeps",
    ),
    "in place": (
        "activations keep their inputs, which nobody else reads, and the next layers keep their results",
        "Say inplace=True: LeakyReLU, ELU, SELU and CELU compute their gradient from the result then, which is kept "
        "anyway; the values are the same",
    ),
    "relu before cat": (
        "ReLUs keep their results, and cat makes another tensor of these, which the next layer keeps",
        "Call cat first, then ReLU on the whole (in place): the values are the same, and ReLU and the next layer keep "
        "one tensor",
    ),
    "relu": (
        "ReLUs keep results that nobody else keeps, of which their gradients read the sign alone",
        "memplan.fit keeps the signs, a bit each (exact); a torch.autograd.Function that saves x > 0 keeps a byte "
        "each, which the bytes here are for",
    ),
}
_NOTES = ("relu",)
"""Kinds that no argument of a layer can change: reported as "info"."""


def find(subject: Subject) -> list[Finding]:
    """Return a finding for each kind of needless saving that costs bytes at the peak."""
    trace = subject.trace
    forms = forms_of_all_steps(trace)
    first_reader = _first_readers(trace)
    forward = [op for op in trace.ops if op.phase == "forward"]
    readers = readers_of(forward)
    dropouts = {op.index for op in forward if is_dropout(op, readers)}
    by_kind: dict[str, list[Storage]] = {}
    for storage in trace.counted:
        if storage.cause == "saved":
            kind = _kind(trace, storage, forms, first_reader.get(storage.id) in dropouts)
            if kind is not None:
                by_kind.setdefault(kind, []).append(storage)
    groups = [_unread_casts(trace)]
    for kind in (kind for kind in _TEXTS if kind in by_kind):
        changed = without_saving(trace, by_kind[kind])
        if kind == "relu before dropout":
            dropouts_to_move = [trace.ops[first_reader[storage.id]] for storage in by_kind[kind]]
            changed |= _dropout_before_relu(trace, dropouts_to_move)
        groups.append(Copies(kind, tuple(by_kind[kind]), changed))
    return [finding for group in (*groups, *copies(trace, forms)) for finding in _finding(trace, group)]


def _finding(trace: Trace, group: Copies) -> list[Finding]:
    """Return a finding about tensors saved for the same reason; [] if they do not matter at the peak."""
    kind, storages = group.kind, group.storages
    size = saving(trace, group.changed, group.added)
    saving_op = {s.id: s.sharers[0].op if s.sharers else s.op or 0 for s in storages}
    rows = rows_of(trace, storages, saving_op)
    if not rows or not matters(trace, size):
        return []
    what, advice = _TEXTS[kind]
    saved = sum(row["bytes"] for row in rows)
    message = f"{what}: {format_bytes(saved)} in all, {format_bytes(size)} of it at the peak"
    details = {"kind": kind, "kept": saved, "layers": rows}
    severity = "info" if kind in _NOTES else "warning"
    return [Finding(ID, severity, rows[0]["layer"], rows[0]["where"], size, message, (advice,), details)]


def _unread_casts(trace: Trace) -> Copies:
    """Return the results of casts in the forward pass that no op reads and that outlive the beginning of their step's
    first backward pass, with lifetimes that end there."""
    read = {operand.storage for op in trace.ops for operand in op.reads}
    starts = {backward.step: backward.start for backward in reversed(trace.passes)}  # of each step's first pass
    unread: list[Storage] = []
    freed: dict[int, Storage | None] = {}
    for storage in trace.counted:
        if storage.op is None or storage.id in read:
            continue
        op = trace.ops[storage.op]
        start = starts.get(op.step, 0)
        lives_on = storage.born < start and (storage.died is None or storage.died > start)
        if op.phase == "forward" and base_name(op.name) == "_to_copy" and lives_on:
            unread.append(storage)
            freed[storage.id] = replace(storage, died=start)
    return Copies("unread casts", tuple(unread), freed)


def _dropout_before_relu(trace: Trace, dropouts: Sequence[Op]) -> dict[int, Storage | None]:
    """Map the result of each dropout to its lifetime if ReLU came after it: until the gradient of ReLU is computed,
    which then runs where that of dropout runs now."""
    ends = {op.gradient_of: op.end for op in trace.ops if op.gradient_of is not None}
    changed: dict[int, Storage | None] = {}
    for op in dropouts:
        if op.writes and op.index in ends:
            result = trace.storages[op.writes[0]]
            if result.died is not None:
                changed[result.id] = replace(result, died=max(result.died, ends[op.index] + 1))
    return changed


def _kind(trace: Trace, storage: Storage, forms: Mapping[int, Form], before_dropout: bool) -> str | None:
    """Return why a storage is saved needlessly, as a key of ``_TEXTS``; None if a gradient needs it.
    ``before_dropout``: whether the first op that reads the storage is a dropout."""
    all_sharers = sharers_by_op(storage)
    if not all_sharers:
        return None
    names = [base_name(trace.ops[sharers[0].op].name) for sharers in all_sharers]
    unread = [_never_reads(trace, sharers, forms) for sharers in all_sharers]
    if all(unread):
        return "frozen"
    shape_only = [name in _SHAPE_ALONE and all(s.role in ("self", "input") for s in sharers)
                  for name, sharers in zip(names, all_sharers, strict=True)]  # fmt: skip
    if all(a or b for a, b in zip(unread, shape_only, strict=True)):
        return "shape"
    is_relu = len(all_sharers) == 1 and names[0] in RELU and all_sharers[0][0].role == "result"
    return "relu before dropout" if is_relu and before_dropout else None


def _never_reads(trace: Trace, sharers: OpSharers, forms: Mapping[int, Form]) -> bool:
    """Return whether the gradient of an op that saves a tensor never reads it. ``sharers`` has the tensor's roles in
    the op's derivative formula; ``forms`` are the arguments of each forward op, by its index."""
    op = trace.ops[sharers[0].op]
    if not gradients_needing(trace, sharers)[1]:
        return True
    form = forms.get(op.index)
    if base_name(op.name) not in _NORMS or form is None or "weight" in op.needs_grad:
        return False
    # in evaluation the input's gradient is the outgoing one, scaled (Normalization.cpp, batch_norm_backward_cpu)
    training = form.option("training", form.option("train", base_name(op.name).endswith("update")))
    return not training and all(sharer.role == "input" for sharer in sharers)


def _first_readers(trace: Trace) -> dict[int, int]:
    """Map a storage to the index of the first op with a gradient that reads it; views and in-place ops do not count."""
    with_gradient = {op.gradient_of for op in trace.ops}
    readers: dict[int, int] = {}
    for op in trace.ops:
        if op.phase != "forward" or op.index not in with_gradient:
            continue
        for operand in op.reads:
            maker = trace.storages[operand.storage].op
            if maker is not None and op.index > maker and operand.storage not in op.writes:
                readers.setdefault(operand.storage, op.index)
    return readers
