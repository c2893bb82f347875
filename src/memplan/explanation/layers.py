"""By layer: what each outputs, saves (for which gradient, by which formula, with whom), owns."""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.explanation.formulas import needing
from memplan.explanation.model import LayerRow, SavedRow
from memplan.trace.model import Op, Sharer, Storage, Trace

OUTSIDE = "(outside of layers)"

_NAMES = {"addmm": "linear", "mm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "_prelu_kernel": "prelu"}
_STATISTICS = frozenset({"mean", "rstd", "save_mean", "save_invstd", "save_var", "logsumexp", "total_weight"})
_MAIN = frozenset({"input", "self", "mat1", "query"})


def op_word(op: Op, trace: Trace) -> str:
    """The name that users know an op by: ``conv2d``, ``batch_norm``, ``linear``."""
    base = op.name.split(".")[1] if op.name.count(".") > 1 else op.name
    base = base.removesuffix("_") if base.endswith("_") and not base.startswith("__") else base
    if base == "convolution":
        shapes = [trace.storages[r.storage].shape for r in op.reads if r.name == "weight"]
        return f"conv{len(shapes[0]) - 2}d" if shapes and len(shapes[0]) > 2 else "convolution"
    if base in _NAMES:
        return _NAMES[base]
    base = base.removeprefix("_").removeprefix("native_").removesuffix("_with_indices").removesuffix("_forward")
    return base.replace("scaled_dot_product_flash_attention_for_cpu", "attention")


def saved_rows(trace: Trace, start: int, end: int) -> list[SavedRow]:
    """A row for each (storage born in a span of ticks, op that keeps it), in the order of the ops."""
    found: list[tuple[int, SavedRow]] = []
    for storage in trace.storages:
        if storage.cause != "saved" or not start < storage.born <= end:
            continue
        sharers = _by_op(storage)
        for position, sharer in enumerate(sharers):
            found.append((sharer.op, _saved_row(trace, storage, sharer, sharers, position == 0)))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def layer_rows(trace: Trace, saved: list[SavedRow], start: int, end: int) -> list[LayerRow]:
    """A row for each layer that ran an op, keeps, or owns something, in the order in which they first ran."""
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
    output_bytes: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    where: str | None = None
    saved: list[SavedRow] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.output_bytes or self.weight_bytes or self.saved)

    def row(self, name: str, kind: str) -> LayerRow:
        distinct = {(row.bytes, row.shape, row.shared_with, row.role): row for row in self.saved}
        return LayerRow(
            name,
            kind,
            self.output_bytes,
            sum(row.bytes for row in self.saved if row.counted),
            sum(row.bytes for row in self.saved),
            tuple(dict.fromkeys(other for row in self.saved for other in row.shared_with)),
            tuple(sorted({need for row in self.saved for need in row.needed_for}, reverse=True)),
            self.weight_bytes,
            self.gradient_bytes,
            tuple(dict.fromkeys(row.why for row in sorted(distinct.values(), key=lambda r: -r.bytes))),
            self.where,
        )


def _add_weights(trace: Trace, drafts: dict[str, _Draft]) -> None:
    """Weights and their gradients; a weight that several layers own counts for the first."""
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
    most: dict[str, int] = {}
    for storage in trace.storages:
        if storage.cause == "parameter_gradient" and storage.name in owner:
            most[storage.name] = max(most.get(storage.name, 0), storage.bytes)
    for name, size in most.items():
        drafts[owner[name]].gradient_bytes += size


def _by_op(storage: Storage) -> list[Sharer]:
    """One sharer for each op: an op that meets a storage as operand and result keeps it once."""
    first: dict[int, Sharer] = {}
    for sharer in storage.sharers:
        first.setdefault(sharer.op, sharer)
    return [first[op] for op in sorted(first)]


def _saved_row(trace: Trace, storage: Storage, sharer: Sharer, sharers: list[Sharer], counted: bool) -> SavedRow:
    op = trace.ops[sharer.op]
    needs = needing(op.name, sharer.role, op.needs_grad)
    needed_for = tuple(sorted({_gradient(trace, op, variable) for variable, _ in needs}, reverse=True))
    if not needs and not _has_formula(op):
        needed_for = ("input_gradient",)  # a function of the user's own: it keeps what its backward reads
    others = tuple(dict.fromkeys(_sharer_title(trace, other) for other in sharers if other.op != sharer.op))
    maker = _maker_title(trace, storage, sharers)
    others = (*others, maker) if maker and maker not in others else others
    return SavedRow(
        op.layer or OUTSIDE,
        op_word(op, trace),
        _role_words(op, sharer),
        storage.bytes,
        counted,
        storage.shape,
        storage.dtype,
        needed_for,
        others,
        _why(trace, op, sharer, needs, needed_for, others),
        op.where,
    )


def _has_formula(op: Op) -> bool:
    from memplan.explanation.formulas import formulas

    return bool(formulas(op.name))


def _gradient(trace: Trace, op: Op, variable: str) -> str:
    """Whether an argument of an op is a weight (or a copy of one in another dtype) or an activation."""
    storages = [trace.storages[operand.storage] for operand in op.reads if operand.name == variable]
    is_weight = bool(storages) and all(_is_weight(trace, storage) for storage in storages)
    return "weight_gradient" if is_weight else "input_gradient"


def _is_weight(trace: Trace, storage: Storage) -> bool:
    if storage.cause == "weight":
        return True
    if storage.op is None:
        return False
    maker = trace.ops[storage.op]
    is_copy = maker.name.split(".")[1] in ("_to_copy", "clone", "cat", "stack") and bool(maker.reads)
    return is_copy and all(_is_weight(trace, trace.storages[r.storage]) for r in maker.reads)


def _role_words(op: Op, sharer: Sharer) -> str:
    role, read_as = sharer.role, sharer.read_as
    if role == "result":
        if read_as in ("indices", "mask", "workspace"):
            return f"its {read_as}"
        return "its statistics" if read_as in _STATISTICS else "its result"
    if role == "kept":
        return "a value of its own"
    if role in _MAIN:
        return "its first operand" if op.name.split(".")[1] in ("mul", "div", "pow", "bmm", "mm") else "its input"
    return {"other": "its second operand", "mat2": "its second operand"}.get(role, f"its {role}")


def _why(
    trace: Trace,
    op: Op,
    sharer: Sharer,
    needs: list[tuple[str, str]],
    needed_for: tuple[str, ...],
    others: tuple[str, ...],
) -> str:
    what = f"{op_word(op, trace)} saves {_role_words(op, sharer)}"
    if needed_for:
        text = f"{what} for the {' and the '.join(need.replace('_', chr(39) + 's ') for need in needed_for)}"
    else:
        text = f"{what} although no gradient reads it"
    if needs:
        text += f" ({needs[0][1]})"
    if others:
        shown = ", ".join(others[:2]) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
        text += f"; shared with {shown}"
    return text


def _sharer_title(trace: Trace, sharer: Sharer) -> str:
    op = trace.ops[sharer.op]
    what = _role_words(op, sharer).removeprefix("its ").removeprefix("a ")
    return f"{op.layer or op_word(op, trace)}'s {what}"


def _maker_title(trace: Trace, storage: Storage, sharers: list[Sharer]) -> str:
    """Whose result a saved storage is, where its maker does not save it and no op overwrote it since."""
    if storage.op is None or any(s.op == storage.op or s.role == "result" for s in sharers):
        return ""
    op = trace.ops[storage.op]
    return f"{op.layer or op_word(op, trace)}'s result" if op.layer else ""
