"""Find activations that save a tensor for backward where a neighbour's saved tensor, or a smaller tensor, would do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from memplan.checks.mended.savings import readers_of, without_saving
from memplan.checks.op_names import base_name
from memplan.explanation.layers import sharers_by_op
from memplan.trace.records import Form, Op, Storage, View
from memplan.trace.trace import Trace

RELU = frozenset({"relu", "threshold"})
_VIEWS = frozenset({"view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand",
                    "squeeze", "unsqueeze"})  # fmt: skip
_FITS_IN_PLACE = {"leaky_relu": ("negative_slope",), "elu": ("alpha", "scale", "input_scale"), "celu": ("alpha",)}
"""Activations whose in-place gradient formula reads the result, and the arguments that must not be negative for it
(derivatives.yaml; aten/src/ATen/native/Activation.cpp)."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Storages that need not be saved, and the storages of a step that does not save them.

    ``changed`` maps a storage to its replacement, or to None where it is not allocated; ``added`` are new ones.
    """

    kind: str
    storages: tuple[Storage, ...]
    changed: Mapping[int, Storage | None]
    added: tuple[Storage, ...] = ()


def copies(trace: Trace, forms: Mapping[int, Form]) -> list[Copies]:
    """Return the saved tensors of a step that activations could do without, by kind. ``forms`` has the arguments of
    each forward op, by its index."""
    search = _ActivationCopies(trace, forms)
    return [group for group in (search.overwritable(), *search.results_of_relu()) if group.storages]


class _ActivationCopies:
    """Finds saved tensors of activations that are needless, and what a step without them would allocate instead."""

    def __init__(self, trace: Trace, forms: Mapping[int, Form]) -> None:
        self._trace, self._forms = trace, forms
        """By forward op of any step: its call in the first step, whose index there is ``Form.op``."""
        self._reads_view = _ops_on_views(trace)
        """Indices of the first step's ops that read a view."""
        kernels = (op for op in trace.ops if base_name(op.name) not in (*_VIEWS, "_unsafe_view"))
        self._readers = readers_of(op for op in kernels if op.phase == "forward")
        """By storage: the forward ops, other than views, that read it."""
        self._returned = {view.storage for returned in trace.returned for view in returned.tensors}
        """Storages that called modules return."""
        self._gradient_ends = {op.gradient_of: op.end for op in trace.ops if op.gradient_of is not None}
        """By forward op: the tick at which the last op of its derivative ends."""

    def _saved(self) -> Iterator[tuple[Storage, Op, str]]:
        """Yield each tensor that a single op saves, with the op and the tensor's role in its derivative formula, such
        as "result"."""
        for storage in self._trace.counted:
            if storage.cause == "saved" and len(storage.sharers) == 1:
                (sharer,) = storage.sharers
                yield storage, self._trace.ops[sharer.op], sharer.role

    def overwritable(self) -> Copies:
        """Return inputs that only an activation saves, where another op saves its result: in place, that is enough."""
        changed: dict[int, Storage | None] = {}
        inputs: list[Storage] = []
        added: list[Storage] = []
        for storage, op, role in self._saved():
            result = self._trace.storages[op.writes[0]] if op.writes else storage
            if role == "self" and result is not storage and self._can_overwrite(storage, op, result):
                changed[storage.id] = self._alive_until(op, storage, result.died)
                changed[result.id] = None
                inputs.append(storage)
                added += self._view_gradients(op, storage)
        return Copies("in place", tuple(inputs), changed, tuple(added))

    def _view_gradients(self, op: Op, storage: Storage) -> list[Storage]:
        """Return what the backward pass allocates in addition if an activation runs in place on a view (such as the
        result of an instance norm); [] if its input is no view.

        That is a gradient of the view's base, and a copy of the view's part of it (CopySlices, torch/csrc/autograd).
        """
        op_of_first_step = self._forms[op.index].op
        if op_of_first_step not in self._reads_view:
            return []
        gradient = next((other for other in self._trace.ops if other.gradient_of == op.index), None)
        return [] if gradient is None else [replace(storage, born=gradient.start + 1, died=gradient.end + 1)] * 2

    def _alive_until(self, op: Op, storage: Storage, died: int | None) -> Storage:
        """Return the storage, freed at tick ``died`` (None: never), but not before the gradient of ``op``."""
        return replace(storage, died=None if died is None else max(died, self._gradient_ends.get(op.index, 0) + 1))

    def _can_overwrite(self, storage: Storage, op: Op, result: Storage) -> bool:
        """Return whether an activation may overwrite its input: its gradient can be computed from the result, which is
        saved, and nothing reads the input later."""
        form = self._forms.get(op.index)
        nonnegative = _FITS_IN_PLACE.get(base_name(op.name))
        if form is None or nonnegative is None or storage.op is None or storage.id in self._returned:
            return False
        if not result.sharers or result.died is None or any(float(form.option(name, 1.0)) < 0 for name in nonnegative):
            return False
        _, operand = form.reads[0]
        is_whole = math.prod(operand.shape) == math.prod(storage.shape)  # another tensor may use the rest of a storage
        from_forward = self._trace.ops[storage.op].phase == "forward"
        read_later = any(reader.index > op.index for reader in self._readers.get(storage.id, ()))
        return is_whole and from_forward and not read_later and storage.bytes == result.bytes

    def results_of_relu(self) -> Iterator[Copies]:
        """Yield the results that only ReLU saves: first those that are concatenated (the result of cat is saved as
        well), then others, of which the signs are enough."""
        by_cat: dict[Op, list[Storage]] = {}
        results: list[Storage] = []
        masks: list[Storage] = []
        for storage, op, role in self._saved():
            if base_name(op.name) not in RELU or role != "result" or storage.id in self._returned:
                continue
            cat = self._cat_of(storage)
            if cat is not None:
                by_cat.setdefault(cat, []).append(storage)
            elif not self._is_read_by_dropout(storage):  # `kept_for_nothing` reports those
                results.append(storage)
                masks.append(replace(storage, bytes=math.prod(storage.shape), dtype="bool", born=op.end, low=None))
        parts = [storage for storages in by_cat.values() for storage in storages]
        changed, added = without_saving(self._trace, parts), list[Storage]()
        for cat, storages in by_cat.items():
            self._swap_relu_and_cat(cat, {storage.sharers[0].op for storage in storages}, changed, added)
        yield Copies("relu before cat", tuple(parts), changed, tuple(added))
        yield Copies("relu", tuple(results), without_saving(self._trace, results), tuple(masks))

    def _cat_of(self, storage: Storage) -> Op | None:
        """Return the cat that is the only reader of a ReLU's result. None if there is none, if it also joins other
        tensors than results of ReLUs, or if its own result is not saved."""
        readers = [op for op in self._readers.get(storage.id, ()) if storage.id not in op.writes]
        if len(readers) != 1 or base_name(readers[0].name) != "cat" or not readers[0].writes:
            return None
        cat = readers[0]
        parts = [self._trace.storages[operand.storage] for operand in cat.reads]
        is_saved = self._trace.storages[cat.writes[0]].sharers
        return cat if is_saved and all(map(self._is_saved_by_relu, parts)) else None

    def _swap_relu_and_cat(
        self, cat: Op, relus: Set[int], changed: dict[int, Storage | None], added: list[Storage]
    ) -> None:
        """Add to ``changed`` and ``added`` what the backward pass allocates if a ReLU follows the cat: a single
        gradient of the whole instead of gradients of the parts.

        ``relus`` are the indices of the ReLUs before the cat.
        """
        gradients = [op for op in self._trace.ops if op.gradient_of in relus and op.writes]
        if not gradients:
            return
        first, whole = gradients[0], self._trace.storages[cat.writes[0]]
        changed[whole.id] = self._alive_until(self._trace.ops[first.gradient_of or 0], whole, whole.died)
        parts = [self._trace.storages[op.writes[0]] for op in gradients]
        changed.update((part.id, None) for part in parts)
        ends = [part.died for part in parts if part.died is not None]
        added.append(replace(parts[0], bytes=whole.bytes, died=max(ends, default=None)))
        for outer in (self._trace.storages[operand.storage] for operand in first.reads):
            if outer.bytes == whole.bytes and outer.id != whole.id:
                changed[outer.id] = replace(outer, died=first.end + 1)

    def _is_saved_by_relu(self, storage: Storage) -> bool:
        """Return whether this is a ReLU's result that the ReLU's gradient, and no other, needs."""
        all_sharers = sharers_by_op(storage)
        if len(all_sharers) != 1 or all_sharers[0][0].role != "result":
            return False
        return base_name(self._trace.ops[all_sharers[0][0].op].name) in RELU

    def _is_read_by_dropout(self, storage: Storage) -> bool:
        readers = self._readers.get(storage.id, ())
        return any(is_dropout(op, self._readers) and op.reads[0].storage == storage.id for op in readers)


def _ops_on_views(trace: Trace) -> set[int]:
    """Return the indices of the first step's ops whose first operand is a view to autograd."""
    maker: dict[View, str] = {}  # tensor -> name of the op that returned it
    on_views: set[int] = set()
    for form in trace.forms:
        operands = [tensor for _, tensor in form.reads]
        if operands and maker.get(operands[0]) in _VIEWS:
            on_views.add(form.op)
        name = base_name(trace.ops[form.op].name)
        for tensor in form.writes:
            if tensor not in operands or name in _VIEWS:  # a view that is changed in place stays a view
                maker[tensor] = name
    return on_views


def is_dropout(op: Op, readers: Mapping[int, Iterable[Op]]) -> bool:
    """Return whether an op is a dropout of elements or channels: it multiplies by 0 or a constant, at random.

    ``readers`` maps a storage to the ops that read it.
    """
    name = base_name(op.name)
    if name == "native_dropout":
        return True
    if name != "mul" or len(op.reads) < 2:
        return False
    mask_ops = [base_name(reader.name) for reader in readers.get(op.reads[1].storage, ())]
    return "bernoulli" in mask_ops and set(mask_ops) <= {"bernoulli", "div", "mul"}
