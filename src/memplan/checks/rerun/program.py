"""Replay the forward ops of a recorded step on fake tensors, whose sizes may differ from the recorded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.checks.fields.walk import canonical
from memplan.checks.mended.changed_step import ChangeError
from memplan.checks.op_names import base_name
from memplan.checks.rerun.sizes import resized
from memplan.trace.records import Form, Op, Option, View
from memplan.trace.trace import Trace

Changes = Mapping[int, Mapping[str, Option]]
"""Index of an op -> arguments that replace the recorded arguments."""

_FIXED = ("weight", "buffer")
_VIEWS = frozenset({
    "aten.view.default", "aten.expand.default", "aten.permute.default", "aten.transpose.int", "aten.slice.Tensor",
    "aten.select.int", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.t.default",
})  # fmt: skip
"""View ops. If their base is written to in place, autograd recreates the views by itself."""


class Program:
    """The first step of a trace, to be replayed.

    Args:
        trace: a recorded step; its forms say how each forward op was called.
        changes: arguments to replace.

    ``grown`` maps the view of data from before the step (a target) to its new shape, if it has to grow to match another
    tensor. It is known after a replay; the next replay creates such data with that shape.
    """

    def __init__(self, trace: Trace, changes: Changes) -> None:
        """``changes``: by index of an op, the arguments to replace in its recorded call."""
        self._trace, self._changes = trace, changes
        self._forms = {form.op: form for form in trace.forms}
        """By index of an op."""
        self._tensors: dict[View, torch.Tensor] = {}
        """By canonical view of the recording: the replay's tensor."""
        self._last_view: dict[int, View] = {}
        """Storage -> the view that was written last."""
        self._overwritten: set[View] = set()
        """Results of in-place ops, until autograd has made the next view of them by itself."""
        self._clones = {form.op for form in trace.forms if self._is_autograd_clone(form)}
        """Indices of the clones that autograd makes by itself before in-place ops."""
        self._leaves: set[View] = set()
        """Views of tensors from before the step."""
        self.grown: dict[View, tuple[int, ...]] = {}
        """By canonical view of data from before the step that must grow to match another tensor: its new shape."""

    def build(self) -> Callable[[], None]:
        """Create the tensors that exist before the step, and return the function that replays its ops. Raises
        ChangeError if an op cannot be called again from what its form says."""
        for state in (self._tensors, self._last_view, self._leaves, self._overwritten):
            state.clear()
        computed: set[int] = set()  # storages that ops before the current one write to
        for form in self._forms.values():
            for name, view in form.reads:
                if view.storage not in computed and canonical(view) not in self._leaves:
                    self._add_leaf(view, self._needs_gradient(form, name, view))
            computed.update(view.storage for view in form.writes)
        return self._step

    def _needs_gradient(self, form: Form, name: str, view: View) -> bool:
        """Return whether a tensor from before the step requires a gradient: its first reader, at argument ``name``,
        computes one for it."""
        in_list = sum(argument == name for argument, _ in form.reads) > 1  # a gradient of one tensor of it, or more
        needed = name in self._trace.ops[form.op].needs_grad
        return needed and (not in_list or self._trace.storages[view.storage].cause == "weight")

    def _add_leaf(self, view: View, requires_grad: bool) -> None:
        """Create an uninitialized tensor that exists before the step, with the recorded strides, or in its grown
        shape."""
        dtype = getattr(torch, self._trace.storages[view.storage].dtype)
        grown = self.grown.get(canonical(view))
        if grown is None:
            leaf = torch.empty_strided(view.shape, view.strides, dtype=dtype)
        else:
            leaf = torch.empty(grown, dtype=dtype)
        self._store(view, leaf.requires_grad_(requires_grad))
        self._leaves.add(canonical(view))

    def _step(self) -> None:
        """Run the forward ops of the first step, and autograd where the trace has the first op of a backward pass."""
        for op in self._trace.ops:
            if op.step != 0:
                continue
            if op.phase == "forward":
                self._run(op)
            elif op.name == "aten.ones_like.default" and op.gradient_of is None and op.reads:  # the loss's gradient
                loss = self._tensors[self._last_view[op.reads[0].storage]]
                loss.backward(retain_graph=True)  # a second backward pass may follow

    def _run(self, op: Op) -> None:
        """Call a recorded op on the replay's tensors, with changed arguments, and sizes that fit its new inputs. Raises
        ChangeError if it cannot be called so."""
        form = self._forms.get(op.index)
        if form is None:
            raise ChangeError(f"how {op.name} was called is not known")
        views = {canonical(view) for view in form.writes}
        if op.index in self._clones or (op.name in _VIEWS and views <= self._overwritten):
            self._overwritten -= views
            return  # autograd runs this op by itself
        func = _torch.op_named(op.name)
        if func is None:
            raise ChangeError(f"there is no op {op.name} here")
        tensors = [self._read(op, name, view) for name, view in form.reads]
        options = dict(form.options) | dict(self._changes.get(op.index, {}))
        options |= resized(self._trace, form, tensors, options, self._tensors)
        tensors = self._grow_data(form, tensors)
        result = func(**self._arguments(func, form, tensors, options))
        results = [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]
        for view, tensor in zip(form.writes, results, strict=True):
            self._store(view, tensor)
        if _torch.is_mutable(func):
            self._overwritten |= views

    def _is_autograd_clone(self, form: Form) -> bool:
        """Return whether an op is the clone that autograd makes before an in-place op whose formula reads its input. No
        forward op reads such a clone."""
        following = self._forms.get(form.op + 1)
        if not self._trace.ops[form.op].name.startswith("aten.clone") or following is None or not following.reads:
            return False
        _, operand = following.reads[0]
        in_place = following.writes[:1] == (operand,)
        all_reads = {view for other in self._trace.forms for _, view in other.reads}
        return in_place and form.reads[0][1] == operand and form.writes[0] not in all_reads

    def _read(self, op: Op, name: str, view: View) -> torch.Tensor:
        """Return the replay's tensor for argument ``name``, detached if the recorded op had no gradient for it."""
        tensor = self._tensors.get(canonical(view))
        if tensor is None:
            raise ChangeError(f"what {op.name} reads was made in a way that is not known")
        return tensor.detach() if tensor.requires_grad and name not in op.needs_grad else tensor

    def _store(self, view: View, tensor: torch.Tensor) -> None:
        self._tensors[canonical(view)] = tensor
        self._last_view[view.storage] = canonical(view)

    def _grow_data(self, form: Form, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return an op's operands, with data from before the step (a target) grown to the new size of other operands.

        ``form`` has the recorded operands, ``tensors`` are those of the replay. A size of the data becomes what the
        same size of another operand has become.
        """
        new_size: dict[int, int] = {}  # recorded size -> size in the replay
        for (_, view), tensor in zip(form.reads, tensors, strict=True):
            if tuple(tensor.shape) != view.shape:
                new_size.update(zip(view.shape, tensor.shape, strict=True))
        if not new_size:
            return tensors
        operands = list[torch.Tensor]()
        for (_, view), tensor in zip(form.reads, tensors, strict=True):
            is_data = canonical(view) in self._leaves and self._trace.storages[view.storage].cause not in _FIXED
            # only dimensions after the batch grow, in tensors that have spatial dimensions
            if is_data and len(view.shape) > 2 and tuple(tensor.shape) == view.shape:
                shape = (view.shape[0], *(new_size.get(size, size) for size in view.shape[1:]))
                self.grown[canonical(view)] = shape
                tensor = tensor.new_empty(shape)
                self._store(view, tensor)
            operands.append(tensor)
        return operands

    def _arguments(
        self, func: Any, form: Form, tensors: list[torch.Tensor], options: Mapping[str, Option]
    ) -> dict[str, Any]:
        """Return the keyword arguments of a call of ``func``, as its schema requires them. ``tensors`` are the operands
        of ``form``, in order; ``options`` are the other arguments by name."""
        operands: dict[str, list[torch.Tensor]] = {}
        for (name, _), tensor in zip(form.reads, tensors, strict=True):
            operands.setdefault(name, []).append(tensor)
        op = base_name(self._trace.ops[form.op].name)
        # a recorded call has no dtype: these ops get that of their result
        takes_dtype = not form.reads or op == "_to_copy" or op.startswith("new_") or op.endswith("_like")
        arguments: dict[str, Any] = {}
        for argument in _torch.arguments(func):
            name, kind = argument.name, str(argument.type)
            if "Tensor" in kind:
                if name in operands:
                    is_list = kind.startswith(("List", "Optional[List"))
                    arguments[name] = operands[name] if is_list else operands[name][0]
                elif name in options:  # a number
                    arguments[name] = _number(options[name])
                elif kind.startswith("Optional"):
                    arguments[name] = None
            elif name in options:
                value = options[name]
                scalar = _number(value) if kind in ("number", "float") else value
                arguments[name] = list(value) if isinstance(value, tuple) else scalar
            elif name == "memory_format":
                arguments[name] = _memory_format(form.writes[0])
            elif name == "dtype" and takes_dtype:
                arguments[name] = getattr(torch, self._trace.storages[form.writes[0].storage].dtype)
            elif kind.startswith("Optional") and not argument.has_default_value():
                arguments[name] = None
        return arguments


def _number(value: Option) -> Any:
    """Return an argument of a recorded call as a number; infinities and NaN are strings there."""
    return float(value) if isinstance(value, str) else value


def _memory_format(view: View) -> torch.memory_format:
    """Return the memory format that gives a tensor the strides of ``view``; `torch.preserve_format` if none does."""
    rank = len(view.shape)
    if canonical(view).strides == _strides(view.shape, range(rank)):
        return torch.contiguous_format
    wide = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank)
    if wide is not None and canonical(view).strides == _strides(view.shape, (0, *range(2, rank), 1)):
        return wide
    return torch.preserve_format


def _strides(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with its dimensions in this order, outermost first; 0 for dimensions of size
    1, as in `canonical`."""
    strides, elements = [0] * len(shape), 1
    for dim in reversed([*order]):
        strides[dim] = 0 if shape[dim] == 1 else elements
        elements *= shape[dim]
    return tuple(strides)
