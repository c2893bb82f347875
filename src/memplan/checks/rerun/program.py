"""The forward ops of a recorded step, called again one after the other on fake tensors of whatever size comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.checks.fields.walk import shown
from memplan.checks.mended.changed_step import ChangeError
from memplan.checks.op_names import base_name
from memplan.checks.rerun.sizes import resized
from memplan.trace.records import Form, Op, Option, View
from memplan.trace.trace import Trace

Changes = Mapping[int, Mapping[str, Option]]
"""By the index of an op: arguments that it is to get instead of its own."""

_FIXED = ("weight", "buffer")
_VIEWS = frozenset({
    "aten.view.default", "aten.expand.default", "aten.permute.default", "aten.transpose.int", "aten.slice.Tensor",
    "aten.select.int", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.t.default",
})  # fmt: skip
"""Where a view was written to, autograd makes it anew of what it looks into."""


class Program:
    """The first step of a trace, to be run anew.

    Args:
        trace: a recorded step; its forms say how each forward op was called.
        changes: what to call differently.

    ``grown`` are the new shapes of data that was there before the step (a target) and has to grow with another tensor,
    by the view that shows it. What they are is known after a run; a run after that has them from the start.
    """

    def __init__(self, trace: Trace, changes: Changes) -> None:
        self._trace, self._changes = trace, changes
        self._forms = {form.op: form for form in trace.forms}
        self._made: dict[View, torch.Tensor] = {}
        self._last: dict[int, View] = {}
        self._overwritten: set[View] = set()
        self._clones = {form.op for form in trace.forms if self._is_autograds(form)}
        self._leaves: set[View] = set()
        self.grown: dict[View, tuple[int, ...]] = {}

    def build(self) -> Callable[[], None]:
        """Return a `build` of the step: its leaves are made by it, its ops run in it.

        Raises:
            ChangeError: an op cannot be called again from what is known of it.
        """
        for known in (self._made, self._last, self._leaves, self._overwritten):
            known.clear()
        made_by: dict[int, int] = {}
        for form in self._forms.values():
            for name, view in form.reads:
                maker = made_by.get(view.storage)
                if maker is None and shown(view) not in self._leaves:
                    self._leaf(view, self._gets_gradient(form, name, view))
            for view in form.writes:
                made_by.setdefault(view.storage, form.op)
        return self._step

    def _gets_gradient(self, form: Form, name: str, view: View) -> bool:
        several = sum(known == name for known, _ in form.reads) > 1
        wanted = name in self._trace.ops[form.op].needs_grad
        return wanted and (not several or self._trace.storages[view.storage].cause == "weight")

    def _leaf(self, view: View, gradient: bool) -> None:
        dtype = getattr(torch, self._trace.storages[view.storage].dtype)
        grown = self.grown.get(shown(view))
        made = (
            torch.empty_strided(view.shape, view.strides, dtype=dtype)
            if grown is None
            else torch.empty(grown, dtype=dtype)
        )
        self._keep(view, made.requires_grad_() if gradient else made)
        self._leaves.add(shown(view))

    def _step(self) -> None:
        for op in self._trace.ops:
            if op.step != 0:
                continue
            if op.phase == "forward":
                self._run(op)
            elif op.name == "aten.ones_like.default" and op.gradient_of is None and op.reads:
                self._made[self._last[op.reads[0].storage]].backward(retain_graph=True)  # a second one may follow

    def _run(self, op: Op) -> None:
        form = self._forms.get(op.index)
        if form is None:
            raise ChangeError(f"how {op.name} was called is not known")
        views = {shown(view) for view in form.writes}
        if op.index in self._clones or (op.name in _VIEWS and views <= self._overwritten):
            self._overwritten -= views
            return  # autograd makes it again by itself
        func = _torch.op_named(op.name)
        if func is None:
            raise ChangeError(f"there is no op {op.name} here")
        tensors = [self._read(op, name, view) for name, view in form.reads]
        given = dict(form.options) | dict(self._changes.get(op.index, {}))
        given |= resized(self._trace, form, tensors, given, self._made)
        tensors = self._fitting(form, tensors)
        result = func(**self._arguments(func, form, tensors, given))
        results = [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]
        for view, tensor in zip(form.writes, results, strict=True):
            self._keep(view, tensor)
        if _torch.is_mutable(func):
            self._overwritten |= views

    def _is_autograds(self, form: Form) -> bool:
        """Return whether an op is the clone that autograd makes before an op in place whose formula reads its input."""
        if not self._trace.ops[form.op].name.startswith("aten.clone") or form.op + 1 not in self._forms:
            return False
        after = self._forms[form.op + 1]
        reads = {view for one in self._trace.forms for _, view in one.reads}
        in_place = after.reads[:1] and after.writes[:1] == (after.reads[0][1],)
        return bool(in_place and form.reads[0][1] == after.reads[0][1] and form.writes[0] not in reads)

    def _read(self, op: Op, name: str, view: View) -> torch.Tensor:
        found = self._made.get(shown(view))
        if found is None:
            raise ChangeError(f"what {op.name} reads was made in a way that is not known")
        return found.detach() if found.requires_grad and name not in op.needs_grad else found

    def _keep(self, view: View, tensor: torch.Tensor) -> None:
        self._made[shown(view)] = tensor
        self._last[view.storage] = shown(view)

    def _fitting(self, form: Form, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Grow data of the step (a target) that had another operand's size to the new size."""
        grown = [
            view for (_, view), tensor in zip(form.reads, tensors, strict=True) if tuple(tensor.shape) != view.shape
        ]
        if not grown:
            return tensors
        new = {size: now for view in grown for size, now in zip(view.shape, self._made[shown(view)].shape, strict=True)}
        found = list[torch.Tensor]()
        for (_, view), tensor in zip(form.reads, tensors, strict=True):
            data = shown(view) in self._leaves and self._trace.storages[view.storage].cause not in _FIXED
            if data and len(view.shape) > 2 and tuple(tensor.shape) == view.shape:
                shape = (*view.shape[:1], *(new.get(size, size) for size in view.shape[1:]))
                self.grown[shown(view)] = shape
                tensor = tensor.new_empty(shape)
                self._keep(view, tensor)
            found.append(tensor)
        return found

    def _arguments(
        self, func: Any, form: Form, tensors: list[torch.Tensor], given: Mapping[str, Option]
    ) -> dict[str, Any]:
        by_name: dict[str, list[torch.Tensor]] = {}
        for (name, _), tensor in zip(form.reads, tensors, strict=True):
            by_name.setdefault(name, []).append(tensor)
        found: dict[str, Any] = {}
        for argument in _torch.arguments(func):
            kind = str(argument.type)
            if "Tensor" in kind:
                if argument.name in by_name:
                    several = kind.startswith(("List", "Optional[List"))
                    found[argument.name] = by_name[argument.name] if several else by_name[argument.name][0]
                elif argument.name in given:  # a number
                    found[argument.name] = _number(given[argument.name])
                elif kind.startswith("Optional"):
                    found[argument.name] = None
            elif argument.name in given:
                value = given[argument.name]
                plain = _number(value) if kind in ("number", "float") else value
                found[argument.name] = list(value) if isinstance(value, tuple) else plain
            elif argument.name == "memory_format":
                found["memory_format"] = _layout(form.writes[0])
            elif argument.name == "dtype" and _names_its_dtype(form, base_name(self._trace.ops[form.op].name)):
                found["dtype"] = getattr(torch, self._trace.storages[form.writes[0].storage].dtype)
            elif kind.startswith("Optional") and not argument.has_default_value():
                found[argument.name] = None
        return found


def _names_its_dtype(form: Form, name: str) -> bool:
    """Return whether an op makes another dtype than it reads: a form leaves dtypes out, which are those of the
    results."""
    return not form.reads or name == "_to_copy" or name.startswith("new_") or name.endswith("_like")


def _number(value: Option) -> Any:
    """Return a number of a form, which writes those that are not finite as text."""
    return float(value) if isinstance(value, str) else value


def _layout(view: View) -> torch.memory_format:
    """Return the memory format that makes a tensor lie as this one does; that of the tensor it is made of, if none says
    so."""
    rank = len(view.shape)
    if shown(view).strides == _strides(view.shape, range(rank)):
        return torch.contiguous_format
    wide = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank)
    if wide is not None and shown(view).strides == _strides(view.shape, (0, *range(2, rank), 1)):
        return wide
    return torch.preserve_format


def _strides(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions lie in this order; 0 for those of one element, as `shown`
    has it."""
    found, step = [0] * len(shape), 1
    for place in reversed([*order]):
        found[place] = 0 if shape[place] == 1 else step
        step *= shape[place]
    return tuple(found)
