"""Explain memory by layer: its outputs, its weights, what it saves for which gradient, and shared storages."""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.explanation.formulas import formulas, gradients_reading
from memplan.explanation.model import LayerRow, SavedRow
from memplan.simulation.simulate import live_at
from memplan.trace.live_bytes import live_bytes
from memplan.trace.records import Op, Sharer, Storage
from memplan.trace.trace import Trace

OUTSIDE = "(outside of layers)"

_NAMES = {
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_prelu_kernel": "prelu",
    "mkldnn_rnn_layer": "lstm",
}
_STATISTICS = frozenset({"mean", "rstd", "save_mean", "save_invstd", "save_var", "logsumexp", "total_weight"})
_PRODUCTS = frozenset({"mul", "div", "pow", "bmm", "mm"})
_ROLES = {
    "other": "its second operand",
    "mat2": "its second operand",
    "hx_": "its hidden state",
    "cx_": "its cell state",
}
_MAIN = frozenset({"input", "self", "mat1", "query"})


def op_word(op: Op, trace: Trace) -> str:
    """Return the name by which users know an op: ``conv2d``, ``batch_norm``, ``linear``."""
    base = op.name.split(".")[1] if op.name.count(".") > 1 else op.name
    base = base.removesuffix("_") if base.endswith("_") and not base.startswith("__") else base
    if base == "convolution":
        shapes = [trace.storages[read.storage].shape for read in op.reads if read.name == "weight"]
        return f"conv{len(shapes[0]) - 2}d" if shapes and len(shapes[0]) > 2 else "convolution"
    if base in _NAMES:
        return _NAMES[base]
    base = base.removeprefix("_").removeprefix("native_").removesuffix("_with_indices").removesuffix("_forward")
    return base.replace("scaled_dot_product_flash_attention_for_cpu", "attention")


def origin_word(op: Op, trace: Trace) -> str:
    """Return `op_word` of an op; for a backward op, ``X's gradient`` with the forward op X."""
    if op.gradient_of is None:
        return op_word(op, trace)
    return op_word(trace.ops[op.gradient_of], trace) + "'s gradient"


def tick_of_most_saved(trace: Trace, start: int, end: int) -> int:
    """Return the first tick within a span at which the most bytes are saved."""
    saved = [storage for storage in trace.counted if storage.cause == "saved"]
    levels = [(tick, level) for tick, level in live_bytes(saved) if start < tick <= end]
    return max(levels, key=lambda pair: pair[1], default=(start, 0))[0]


def saved_rows(trace: Trace, tick: int) -> list[SavedRow]:
    """Return a row for each storage saved at a tick and each op that saves it, in the order of the ops."""
    rows: list[tuple[int, SavedRow]] = []
    drawing = [op for op in trace.ops if op.name.startswith("aten.bernoulli_")]  # masks of dropout
    masks = {storage for op in drawing for storage in op.writes}
    in_place = _in_place_ops(trace)
    for storage in live_at(trace, tick):
        all_sharers = sharers_by_op(storage)
        if storage.cause != "saved" or not all_sharers:  # none in a file that was edited
            continue
        producer = _producer_title(trace, storage, in_place)
        for index, sharers in enumerate(all_sharers):  # the bytes count for the first op that saves the storage
            row = _saved_row(
                trace, storage, sharers, all_sharers, producer, counted=index == 0, is_mask=storage.id in masks
            )
            rows.append((sharers[0].op, row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def layer_rows(trace: Trace, saved: list[SavedRow], start: int, end: int) -> list[LayerRow]:
    """Return a row for each layer that ran an op, saves a storage or owns a weight, in the order of their first ops."""
    drafts: dict[str, _Draft] = {}
    for op in trace.ops:
        if start <= op.start and op.end <= end and op.phase == "forward":
            draft = drafts.setdefault(op.layer or OUTSIDE, _Draft())
            draft.where = draft.where or op.where
            if op.writes:
                draft.output_bytes = sum(trace.storages[storage].bytes for storage in set(op.writes))
    for row in saved:
        draft = drafts.setdefault(row.layer, _Draft())
        draft.saved.append(row)
        draft.where = draft.where or row.where
    _add_weights(trace, drafts)
    kinds = {layer.name: layer.kind for layer in trace.layers}
    return [
        draft.row(name, kinds.get(name, "")) for name, draft in drafts.items() if name != OUTSIDE or not draft.is_empty
    ]


@dataclass(slots=True)
class _Draft:
    """The row of a layer while its bytes are added up."""

    output_bytes: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    where: str | None = None
    saved: list[SavedRow] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.output_bytes or self.weight_bytes or self.saved)

    def row(self, name: str, kind: str) -> LayerRow:
        """Return the finished row; reasons of equal storages are listed once, the largest first."""
        distinct = {(row.bytes, row.shape, row.shared_with, row.role): row for row in self.saved}
        largest_first = sorted(distinct.values(), key=lambda row: -row.bytes)
        return LayerRow(
            name=name,
            kind=kind,
            output_bytes=self.output_bytes,
            saved_bytes=sum(row.bytes for row in self.saved if row.counted),
            kept_bytes=sum(row.bytes for row in self.saved),
            shared_with=tuple(dict.fromkeys(other for row in self.saved for other in row.shared_with)),
            needed_for=tuple(sorted({need for row in self.saved for need in row.needed_for}, reverse=True)),
            weight_bytes=self.weight_bytes,
            gradient_bytes=self.gradient_bytes,
            why=tuple(dict.fromkeys(row.why for row in largest_first)),
            where=self.where,
        )


def _add_weights(trace: Trace, drafts: dict[str, _Draft]) -> None:
    """Add the bytes of weights and of their gradients (with the indices of sparse gradients) to the layers' ``drafts``.

    A weight that several layers share counts for the first of them.
    """
    owner: dict[str, str] = {}
    seen: set[int] = set()
    for layer in trace.layers:
        for weight in layer.weights:
            if weight in seen:
                continue
            seen.add(weight)
            storage = trace.storages[weight]
            owner[storage.name] = layer.name
            drafts.setdefault(layer.name, _Draft()).weight_bytes += storage.bytes
    largest: dict[tuple[str, str], int] = {}  # values and indices of a sparse gradient differ in dtype
    for storage in trace.storages:
        if storage.cause == "parameter_gradient" and storage.name in owner:
            part = storage.name, storage.dtype
            largest[part] = max(largest.get(part, 0), storage.bytes)
    for (name, _), size in largest.items():
        drafts[owner[name]].gradient_bytes += size


OpSharers = list[Sharer]
"""The sharers of a storage that are of one op, which saves it: a sharer for each role in which the op does."""


def sharers_by_op(storage: Storage) -> list[OpSharers]:
    """Group the sharers of a storage by op, in the order of the ops. An op can save it in several roles: packed q, k
    and v."""
    by_op: dict[int, OpSharers] = {}
    for sharer in storage.sharers:
        by_op.setdefault(sharer.op, []).append(sharer)
    return [by_op[op] for op in sorted(by_op)]


def _saved_row(
    trace: Trace, storage: Storage, sharers: OpSharers, all_sharers: list[OpSharers], producer: str, counted: bool,
    is_mask: bool,
) -> SavedRow:  # fmt: skip
    """Return the row of a storage and an op that saves it.

    Args:
        sharers: those of the storage that are of this op.
        all_sharers: the storage's sharers by op.
        producer: name of the op whose result the storage is; "" if that op saves it, too.
        counted: whether the storage counts for this row: it does for the first op that saves it.
        is_mask: whether the storage is the random mask of a dropout, which the op multiplies by.
    """
    op = trace.ops[sharers[0].op]
    needs, needed_for = gradients_needing(trace, sharers)
    titles = (_saving_op_title(trace, other, is_mask) for other in all_sharers if other is not sharers)
    others = tuple(dict.fromkeys(titles))
    if producer and producer not in others:
        others = (*others, producer)
    word = "dropout" if is_mask else op_word(op, trace)
    role = _roles_text(op, sharers, is_mask)
    return SavedRow(
        layer=op.layer or OUTSIDE,
        op=word,
        role=role,
        bytes=storage.bytes,
        counted=counted,
        shape=storage.shape,
        dtype=storage.dtype,
        needed_for=needed_for,
        shared_with=others,
        why=_why_text(f"{word} saves {role}", needs, needed_for, others),
        where=op.where,
    )


def gradients_needing(trace: Trace, sharers: OpSharers) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Return the gradients for which an op saves a storage. ``sharers``: the sharers of the storage that are this op.

    Returns:
        (argument, name of the function that computes its gradient) for each, and which of ``weight_gradient`` and
        ``input_gradient`` these are; the latter is () if no gradient reads the storage.
    """
    op = trace.ops[sharers[0].op]
    needs = [need for sharer in sharers for need in gradients_reading(op.name, sharer.role, op.needs_grad)]
    needed_for = tuple(sorted({_gradient_kind(trace, op, variable) for variable, _ in needs}, reverse=True))
    reads = any(formula.reads(sharer.role) for formula in formulas(op.name) for sharer in sharers)
    if not needs and not reads:
        needed_for = ("input_gradient",)  # a custom autograd function, or an op without a formula in torch's table
    return needs, needed_for


def _gradient_kind(trace: Trace, op: Op, variable: str) -> str:
    """Return ``weight_gradient`` if an argument is a weight or a copy of weights, else ``input_gradient``."""
    storages = [trace.storages[operand.storage] for operand in op.reads if operand.name == variable]
    is_weight = bool(storages) and all(_is_weight(trace, storage) for storage in storages)
    return "weight_gradient" if is_weight else "input_gradient"


def _is_weight(trace: Trace, storage: Storage) -> bool:
    """Return whether a storage is a weight, or a copy, cast or concatenation of weights."""
    if storage.cause == "weight":
        return True
    if storage.op is None:
        return False
    op = trace.ops[storage.op]
    is_copy = op.name.split(".")[1] in ("_to_copy", "clone", "cat", "stack") and bool(op.reads)
    return is_copy and all(_is_weight(trace, trace.storages[read.storage]) for read in op.reads)


def _roles_text(op: Op, sharers: OpSharers, is_mask: bool) -> str:
    """Return the roles of a saved storage for an op, in words: "its input and result". ``sharers``: the sharers of the
    storage that are this op."""
    if is_mask:
        return "its mask"
    words = list(dict.fromkeys(_role_text(op, sharer) for sharer in sharers))
    if len(words) == 1:
        return words[0]
    return ", ".join(words[:-1]) + " and " + words[-1].removeprefix("its ")


def _role_text(op: Op, sharer: Sharer) -> str:
    """Return the role of a saved storage for an op, in words: "its input", "its statistics"."""
    role, read_as = sharer.role, sharer.read_as
    if role == "result":
        if read_as in ("indices", "mask", "workspace"):
            return f"its {read_as}"
        return "its statistics" if read_as in _STATISTICS else "its result"
    if role == "kept":
        return "a value of its own"
    if role in _MAIN:
        return "its first operand" if op.name.split(".")[1] in _PRODUCTS else "its input"
    return _ROLES.get(role, f"its {role}")


def _why_text(what: str, needs: list[tuple[str, str]], needed_for: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Return the sentence on why a storage is saved: for which gradients, by which function, shared with whom.

    Args:
        what: beginning of the sentence: "linear saves its input".
        needs: (argument, name of the function that computes its gradient) for each gradient that reads the storage.
        needed_for: which of ``weight_gradient`` and ``input_gradient`` these are.
        others: names of the storage at other ops.
    """
    if needed_for:
        gradients = [need.replace("_", "'s ") for need in needed_for]  # "weight's gradient"
        text = f"{what} for the {' and the '.join(gradients)}"
    else:
        text = f"{what} although no gradient reads it"
    if needs:
        text += f" ({needs[0][1]})"
    if others:
        shown = ", ".join(others[:2]) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
        text += f"; shared with {shown}"
    return text


def _saving_op_title(trace: Trace, sharers: OpSharers, is_mask: bool) -> str:
    """Return a name of a shared storage, by an op that saves it: "layer1.conv's input". ``sharers``: the sharers of the
    storage that are this op."""
    op = trace.ops[sharers[0].op]
    what = _roles_text(op, sharers, is_mask).removeprefix("its ").removeprefix("a ")
    return f"{op.layer or op_word(op, trace)}'s {what}"


def _producer_title(trace: Trace, storage: Storage, in_place: dict[int, list[Op]]) -> str:
    """Return a name of a saved storage by the op that computed it ("layer1.relu's result"); "" if that op saves it.

    ``in_place``: storage -> the forward ops that changed it in place.
    """
    first = min(sharer.op for sharer in storage.sharers)
    computing = [] if storage.op is None else [trace.ops[storage.op]]
    computing += [op for op in in_place.get(storage.id, ()) if op.index < first]
    if not computing:
        return ""
    producer = computing[-1]
    if any(sharer.op == producer.index or sharer.role == "result" for sharer in storage.sharers):
        return ""
    own_copy = producer.name == "aten.clone.default" and producer.layer == trace.ops[first].layer
    return f"{producer.layer}'s result" if producer.layer and not own_copy else ""


def _in_place_ops(trace: Trace) -> dict[int, list[Op]]:
    """Return storage -> the forward ops that changed it in place, in order."""
    by_storage: dict[int, list[Op]] = {}
    for op in trace.ops:
        if op.phase == "forward" and op.name.split(".")[1].endswith("_"):
            for storage in op.writes[:1]:
                by_storage.setdefault(storage, []).append(op)
    return by_storage
