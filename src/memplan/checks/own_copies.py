"""Activations that keep a tensor of their own, where another one or a smaller one would do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from memplan.checks.mended.savings import readers_of, without_saving
from memplan.checks.op_names import base_name
from memplan.explanation.layers import keepers_of
from memplan.trace.records import Form, Op, Storage, View
from memplan.trace.trace import Trace

RELU = frozenset({"relu", "threshold"})
_VIEWS = frozenset({"view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand",
                    "squeeze", "unsqueeze"})  # fmt: skip
_FITS_IN_PLACE = {"leaky_relu": ("negative_slope",), "elu": ("alpha", "scale", "input_scale"), "celu": ("alpha",)}
"""Activations whose formula reads the result where they overwrite their input, and what must not be negative then
(derivatives.yaml; aten/src/ATen/native/Activation.cpp)."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Storages that need not be kept, by the way in which they are, and the step's storages without that."""

    kind: str
    storages: tuple[Storage, ...]
    changed: Mapping[int, Storage | None]
    added: tuple[Storage, ...] = ()


def copies(trace: Trace, forms: Mapping[int, Form]) -> list[Copies]:
    """Return the ways in which activations of a step keep a tensor of their own."""
    seen = _Seen(trace, forms)
    return [found for found in (seen.overwritable(), *seen.results_of_relu()) if found.storages]


class _Seen:
    def __init__(self, trace: Trace, forms: Mapping[int, Form]) -> None:
        self._trace, self._forms = trace, forms
        self._of_views = _reading_views(trace)
        kernels = (op for op in trace.ops if base_name(op.name) not in (*_VIEWS, "_unsafe_view"))
        self._readers = readers_of(op for op in kernels if op.phase == "forward")
        self._returned = {view.storage for one in trace.returned for view in one.tensors}
        self._ends = {op.gradient_of: op.end for op in trace.ops if op.gradient_of is not None}

    def _saved(self) -> Iterator[tuple[Storage, Op, str]]:
        """Yield what a single op keeps: the storage, the op, and in which role."""
        for storage in self._trace.counted:
            keepers = keepers_of(storage) if storage.cause == "saved" else []
            if len(keepers) == 1 and len(keepers[0]) == 1:
                yield storage, self._trace.ops[keepers[0][0].op], keepers[0][0].role

    def overwritable(self) -> Copies:
        """Find inputs that an activation keeps alone, and whose result is kept, too: in place it keeps the result
        alone."""
        changed: dict[int, Storage | None] = {}
        found: list[Storage] = []
        added: list[Storage] = []
        for storage, op, role in self._saved():
            result = self._trace.storages[op.writes[0]] if op.writes else storage
            if role == "self" and result is not storage and self._can_overwrite(storage, op, result):
                changed[storage.id] = self._kept_by(op, storage, result.died)
                changed[result.id] = None
                found.append(storage)
                added += self._through_a_view(op, storage)
        return Copies("in place", tuple(found), changed, tuple(added))

    def _through_a_view(self, op: Op, storage: Storage) -> list[Storage]:
        """Return what the gradient of an op in place takes besides, where its input is a view (as an instance norm's
        result is): a gradient of the whole, and a copy of the view's part of it (CopySlices, torch/csrc/autograd)."""
        if self._forms[op.index].op not in self._of_views:
            return []
        ends = [(one.start, one.end) for one in self._trace.ops if one.gradient_of == op.index][:1]
        return [replace(storage, born=start + 1, died=end + 1) for start, end in ends for _ in range(2)]

    def _kept_by(self, op: Op, storage: Storage, died: int | None) -> Storage:
        """Return a storage that dies at a time, but not before the gradient of an op is done."""
        return replace(storage, died=None if died is None else max(died, self._ends.get(op.index, 0) + 1))

    def _can_overwrite(self, storage: Storage, op: Op, result: Storage) -> bool:
        form = self._forms.get(op.index)
        limits = _FITS_IN_PLACE.get(base_name(op.name))
        if form is None or limits is None or storage.op is None or storage.id in self._returned or not result.sharers:
            return False
        if any(float(form.option(name, 1.0)) < 0 for name in limits) or result.died is None:
            return False
        # a part of a tensor may share it with others
        whole = math.prod(form.reads[0][1].shape) == _elements(storage)
        made = self._trace.ops[storage.op].phase == "forward"
        later = any(reader.index > op.index for reader in self._readers.get(storage.id, ()))
        return whole and made and not later and storage.bytes == result.bytes

    def results_of_relu(self) -> Iterator[Copies]:
        """Find results that ReLU keeps alone: a cat of them would be kept anyway, and of others the sign is enough."""
        joined: dict[Op, list[Storage]] = {}
        alone: list[Storage] = []
        masks: list[Storage] = []
        for storage, op, role in self._saved():
            if base_name(op.name) not in RELU or role != "result" or storage.id in self._returned:
                continue
            cat = self._cat_of(storage)
            if cat is not None:
                joined.setdefault(cat, []).append(storage)
            elif not self._into_dropout(storage):
                alone.append(storage)
                masks.append(replace(storage, bytes=_elements(storage), dtype="bool", born=op.end, low=None))
        parts = [storage for storages in joined.values() for storage in storages]
        changed, added = without_saving(self._trace, parts), list[Storage]()
        for cat, storages in joined.items():
            self._with_relu_last(cat, {storage.sharers[0].op for storage in storages}, changed, added)
        yield Copies("relu before cat", tuple(parts), changed, tuple(added))
        yield Copies("relu", tuple(alone), without_saving(self._trace, alone), tuple(masks))

    def _cat_of(self, storage: Storage) -> Op | None:
        """Return the cat of such results that is all that reads a ReLU's result, where somebody keeps the cat
        anyway."""
        readers = [op for op in self._readers.get(storage.id, ()) if storage.id not in op.writes]
        if len(readers) != 1 or base_name(readers[0].name) != "cat" or not readers[0].writes:
            return None
        given = [self._trace.storages[operand.storage] for operand in readers[0].reads]
        kept = self._trace.storages[readers[0].writes[0]].sharers
        return readers[0] if kept and all(map(self._is_relus, given)) else None

    def _with_relu_last(
        self, cat: Op, relus: Set[int], changed: dict[int, Storage | None], added: list[Storage]
    ) -> None:
        """Change the backward pass: ReLU reads the cat, and makes one gradient, of the cat."""
        gradients = [op for op in self._trace.ops if op.gradient_of in relus and op.writes]
        if not gradients:
            return
        first, whole = gradients[0], self._trace.storages[cat.writes[0]]
        changed[whole.id] = self._kept_by(self._trace.ops[first.gradient_of or 0], whole, whole.died)
        made = [self._trace.storages[op.writes[0]] for op in gradients]
        changed.update((storage.id, None) for storage in made)
        ends = [storage.died for storage in made if storage.died is not None]
        added.append(replace(made[0], bytes=whole.bytes, died=max(ends, default=None)))
        for outer in (self._trace.storages[operand.storage] for operand in first.reads):
            if outer.bytes == whole.bytes and outer.id != whole.id:
                changed[outer.id] = replace(outer, died=first.end + 1)

    def _is_relus(self, storage: Storage) -> bool:
        keepers = keepers_of(storage)
        return len(keepers) == 1 and keepers[0][0].role == "result" and (
            base_name(self._trace.ops[keepers[0][0].op].name) in RELU
        )  # fmt: skip

    def _into_dropout(self, storage: Storage) -> bool:
        readers = self._readers.get(storage.id, ())
        return any(is_dropout(op, self._readers) and op.reads[0].storage == storage.id for op in readers)


def _reading_views(trace: Trace) -> set[int]:
    """Return the ops of the first step whose first operand is a view, as autograd sees it: by their index."""
    makers: dict[View, str] = {}
    found: set[int] = set()
    for form in trace.forms:
        given = [view for _, view in form.reads]
        if given and makers.get(given[0]) in _VIEWS:
            found.add(form.op)
        name = base_name(trace.ops[form.op].name)
        for view in form.writes:
            if view not in given or name in _VIEWS:  # what is changed in place stays a view
                makers[view] = name
    return found


def is_dropout(op: Op, readers: Mapping[int, Iterable[Op]]) -> bool:
    """Return whether an op scales elements by 0 or a constant at random: dropout, of single elements or whole
    channels."""
    name = base_name(op.name)
    if name == "native_dropout":
        return True
    if name != "mul" or len(op.reads) < 2:
        return False
    uses = [base_name(reader.name) for reader in readers.get(op.reads[1].storage, ())]
    return "bernoulli" in uses and set(uses) <= {"bernoulli", "div", "mul"}


def _elements(storage: Storage) -> int:
    return math.prod(storage.shape)
