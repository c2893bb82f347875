"""What a dispatch mode sees, written down: the part that predicting and measuring share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.errors import DeviceError, StepError
from memplan.trace.recording.call_forms import Forms
from memplan.trace.recording.known_indices import Positions
from memplan.trace.recording.ledger import Entry, Ledger
from memplan.trace.recording.place import Place, format_frame, user_frame
from memplan.trace.records import HOST, ON_CARD, Phase
from memplan.trace.semantics.kinds import NONE, Extra, Semantics
from memplan.trace.semantics.layout import is_dense

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
# Ops without storage, kernel or meaning for memory; left out so that a trace reads like the step.
_CLONE = "aten.clone.default"
_EQUAL = ("aten.equal.default", "aten.allclose.default")
_ONES = "aten.ones_like.default"
_ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default"})
_SOON = 3
"""Ops that may lie between zeros and what a derivative formula writes into them (the indices, say)."""
# what may read both, as CUDA allows: copies, indices on the host, counters of an optimizer
_ACROSS = ("aten.copy", "aten._to_copy", "aten.index", "aten._index", "aten.set_", "aten._foreach", "aten._fused")
_LIFT = "aten.lift_fresh.default"
_SCALAR = "aten._local_scalar_dense.default"
_SILENT = frozenset({"aten.detach.default", "aten.alias.default", "aten.is_same_size.default", _SCALAR})


@dataclass(slots=True)
class Note:
    """An op while the recording runs."""

    name: str
    phase: Phase
    step: int
    module: int
    frame: tuple[str, int] | None
    start: int
    end: int
    reads: list[tuple[str, int]]
    writes: list[int]
    needs_grad: tuple[str, ...]
    sequence: int | None
    """For a backward op, the sequence number of the node that runs it."""
    grad_enabled: bool
    stream: int = 0
    """Number of the card's stream that it runs on."""


@dataclass(slots=True)
class Marks:
    """Facts about storages that no op tells: who holds them. Entry ids; names where there are any."""

    weights: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    """Gradient -> the weight it belongs to."""
    states: set[int] = field(default_factory=set)
    found_inf: set[int] = field(default_factory=set)
    workspaces: set[int] = field(default_factory=set)


class Residence(Protocol):
    """Where storages lie, while a step for a card is recorded; `memplan.trace.fake_cuda` has it."""

    everything: bool

    @property
    def destination(self) -> str | None:
        """Device of the results of the running op, where that was said."""
        ...


class _Signature:
    """What we need of an op's schema, worked out once an op."""

    __slots__ = ("mutable", "name", "positions", "silent")

    def __init__(self, func: Any) -> None:
        self.name = str(func)
        self.positions = _torch.tensor_arguments(func)
        self.mutable = _torch.is_mutable(func)
        self.silent = self.name in _SILENT or not self.name.startswith(("aten.", "torch", "_", "mkldnn"))
        if not self.name.startswith(("aten.", "prim.", "profiler.")):
            self.silent = False  # an operator of a library or of the user's


class Observer:
    """Notes every op with its place, and every storage with its birth and death."""

    def __init__(self, place: Place, *, real: bool, semantics: Semantics | None = None) -> None:
        self.place = place
        self.ledger = Ledger(real=real)
        self.marks = Marks()
        self.notes: list[Note] = []
        self.by_sequence: dict[int, int] = {}
        self.read_equal: Callable[[], bool] | None = None
        self.read_apart: Callable[[str], None] | None = None
        """Told the op that reads a tensor of the host beside one on the card, which CUDA refuses."""
        self.read_scalar: Callable[[torch.Tensor, Any], Any] | None = None
        self.card: Residence | None = None
        self.semantics = semantics or NONE
        self.forms = Forms(self.ledger)
        self._positions = Positions(self.ledger)
        self._signatures: dict[Any, _Signature] = {}
        self._sequence = _torch.sequence_number()
        self._updating: set[int] = set()
        self._loose: list[weakref.ref[nn.Parameter]] = []
        """Parameters met in an op before any module or optimizer named them."""
        self._after_backward = False
        self._last_reference: tuple[int, int] | None = None
        self._calibrating: list[tuple[int, int]] | None = None
        place.on_module = self.leave_backward
        place.on_result = self._returned
        place.before_update = self._before_update
        place.after_update = self._mark_states

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run an op by ``run(func)`` and note it."""
        if self._calibrating is not None:
            if func is _ADD and _torch.in_backward():
                self._calibrating.append(_torch.use_counts(args[0]))
            return run(func)
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = _Signature(func)
        if signature.silent:
            if self.read_scalar is not None and signature.name == _SCALAR:
                return self.read_scalar(args[0], run)
            return run(func)
        if signature.name in _EQUAL and self.read_equal is not None:
            return self.read_equal()
        if func is _ADD and self._is_engine_sum(args):
            return self._instead(_ADD_IN_PLACE, args, kwargs, run)
        in_place = _torch.IN_PLACE_ON_ZEROS.get(func)
        if in_place is not None and self._is_on_zeros(args[0]):
            return self._instead(in_place, args, kwargs, run)
        return self._note(signature, args, kwargs, None, func, run)

    def _instead(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run and note the form of an op that writes its first argument."""
        run(op)
        return self._note(self._signatures.setdefault(op, _Signature(op)), args, kwargs, args[0])

    def _is_on_zeros(self, target: Any) -> bool:
        """Whether a derivative formula writes into zeros that it has just made.

        Without a dispatch mode it does so in place; under one it takes the functional form, which makes another tensor
        (torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`).
        """
        if not _torch.in_backward() or torch.is_grad_enabled() or not self.notes:
            return False
        entry = self.ledger.find(target)
        if entry is None or entry.op is None or self.notes[entry.op].name not in _ZEROS:
            return False
        since = self.notes[entry.op + 1 :]
        if len(since) > _SOON or any(entry.id == read for note in since for _, read in note.reads):
            return False
        return _torch.called_by_engine()

    def calibrate(self) -> None:
        """Learn how often a tensor is referenced that only the engine's buffer holds. Call it under the mode."""
        self._calibrating = []
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        (y.sigmoid() + y.tanh()).sum().backward()
        self._last_reference = self._calibrating[0] if self._calibrating else None
        self._calibrating = None
        self._sequence = _torch.sequence_number()

    def _is_engine_sum(self, args: tuple[Any, ...]) -> bool:
        """Whether the engine adds a second gradient to one that nobody else holds.

        Without a dispatch mode it does so in place (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`);
        under one it cannot, so we do, lest every sum of two gradients count a storage too many.
        """
        if self._last_reference is None or not _torch.in_backward() or torch.is_grad_enabled():
            return False
        held, other = args[0], args[1]
        if not isinstance(other, torch.Tensor) or held.shape != other.shape or held.dtype != other.dtype:
            return False
        if _torch.use_counts(held) != self._last_reference or not is_dense(held):
            return False
        return _torch.called_by_engine()

    def _note(
        self,
        signature: _Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        func: Any = None,
        run: _torch.Run | None = None,
    ) -> Any:
        index = len(self.notes)
        ledger = self.ledger
        reads, needs, on_card = self._operands(signature, args, kwargs)
        if signature.name == _UNSCALE:
            self.marks.found_inf.add(ledger.entry(args[1], None).id)
        note = self._place_of(signature, reads, needs, index)
        self.notes.append(note)  # before it runs, so that what it raises can be located
        semantics, current = self.semantics, 0
        if self.card is not None:
            # in C++ a tensor that is made from nothing is made for one on the card; in Python `destination` tells
            on_card = on_card or self.card.everything or (not reads and not self.place.building)
            ledger.device = self.card.destination or (ON_CARD if on_card else HOST)
            current, ledger.stream = ledger.stream, self._stream_of(note)
            semantics = semantics if ledger.device == ON_CARD else NONE
        self._positions.before(signature.name, args)
        if run is not None:
            instead = semantics.instead.get(signature.name)
            result = NotImplemented if instead is None else instead(args, kwargs)
            result = run(func) if result is NotImplemented else result
        if signature.mutable:
            for _, name in signature.positions[:1]:
                if isinstance(args[0], torch.Tensor) and name:
                    ledger.resized(args[0], index)
        corrected = semantics.results.get(signature.name)
        result = result if corrected is None else corrected(args, kwargs, result)
        extras = semantics.extras(signature.name, args, kwargs, result, _torch.in_backward())
        if signature.name == _LIFT and not args[0].untyped_storage().resizable():
            ledger.foreign(result, index)  # torch.from_numpy: the memory is numpy's
        taken = [self._take(extra, index) for extra in extras if extra.first]
        _results(result, ledger, index, note.writes)
        taken += [self._take(extra, index) for extra in extras if not extra.first]
        for extra, entry in reversed(taken):  # what was made last goes first, as locals of a C++ function do
            if not extra.held and extra.owner is None:
                ledger.end(entry)
        if self.card is not None:
            ledger.device, ledger.stream = ON_CARD if self.card.everything else HOST, current
        note.end = ledger.clock
        self._positions.after(signature.name, args, kwargs, result, written=signature.mutable)
        if note.phase == "forward" and note.step == 0:
            self.forms.note(index, func, args, kwargs, result)
        if note.phase == "optimizer":
            self._updating.update(note.writes)
        return result

    def _returned(self, module: int, result: Any) -> None:
        if self.place.step == 0 and not _torch.in_backward():
            self.forms.returns(module, len(self.notes), result)

    def _stream_of(self, note: Note) -> int:
        """The engine runs a derivative formula on the stream that its forward op ran on."""
        source = self.by_sequence.get(note.sequence) if note.sequence is not None else None
        note.stream = self.ledger.stream if source is None else self.notes[source].stream
        return note.stream

    def _operands(
        self, signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, int]], tuple[str, ...], bool]:
        """What an op reads, for which arguments a gradient is needed, and whether any of them lies on the card."""
        reads: list[tuple[str, int]] = []
        needs: list[str] = []
        on_card = on_host = False
        for position, name in signature.positions:
            value = args[position] if position < len(args) else kwargs.get(name)
            for item in (value,) if not isinstance(value, (list, tuple)) else value:
                if isinstance(item, torch.Tensor):
                    entry = self.ledger.entry(item, None)
                    reads.append((name, entry.id))
                    if entry.device == ON_CARD:
                        on_card = True
                    elif item.dim():
                        on_host = True
                    if item.requires_grad:
                        if not self.ledger.real and not isinstance(item, _torch.FakeTensor):
                            raise _made_outside(item)
                        if not needs or needs[-1] != name:
                            needs.append(name)
                        # not while building, where a parameter may still be replaced: we would hold it alive
                        known = self.place.building or reads[-1][1] in self.marks.weights
                        if not known and isinstance(item, nn.Parameter):
                            self._mark(self.marks.weights, item, "")
                            self._loose.append(weakref.ref(item))
        if on_card and on_host and self.read_apart is not None and not signature.name.startswith(_ACROSS):
            self.read_apart(signature.name)
        return reads, tuple(needs), on_card

    def _take(self, extra: Extra, index: int) -> tuple[Extra, Entry]:
        """What a kernel allocates for itself."""
        entry = self.ledger.hidden(extra.bytes, index, low=extra.low, owner=extra.owner)
        if extra.workspace:
            self.marks.workspaces.add(entry.id)
        return extra, entry

    def _place_of(
        self, signature: _Signature, reads: list[tuple[str, int]], needs: tuple[str, ...], index: int
    ) -> Note:
        place = self.place
        phase = place.phase()
        grad_enabled = torch.is_grad_enabled()
        sequence = None
        if phase == "backward":
            self._after_backward = True
            node = _torch.backward_node()
            sequence = _torch.node_sequence(node) if node is not None else None
        elif signature.name == _ONES and _torch.called_for_the_loss():
            phase = "backward"  # the gradient of the loss itself, made before the engine starts
        elif self._after_backward and phase == "forward":
            phase = self._phase_after_backward(signature, reads, needs, grad_enabled)
        if grad_enabled:
            made = _torch.sequence_number()
            if signature.mutable and index and self.notes[-1].name == _CLONE:
                for number in (made - 1, made):  # an op in place whose formula needs its input clones that first
                    if self.by_sequence.get(number) == index - 1:
                        self.by_sequence[number] = index
            for number in range(self._sequence + 1, made + 1):
                self.by_sequence[number] = index
            self._sequence = max(made, self._sequence)
        clock = self.ledger.clock
        frame = user_frame() if phase != "backward" or grad_enabled else None
        return Note(
            signature.name,
            phase,
            place.step,
            place.module,
            frame,
            clock,
            clock,
            reads,
            [],
            needs,
            sequence,
            grad_enabled,
        )

    def _phase_after_backward(
        self, signature: _Signature, reads: list[tuple[str, int]], needs: tuple[str, ...], grad_enabled: bool
    ) -> Phase:
        """Between backward and the next forward, what touches gradients (clipping, a hand-written update) updates."""
        if self._after_backward and not self._updating:
            self.leave_backward()
        if grad_enabled and needs:
            return "forward"
        if signature.mutable and reads and reads[0][1] in self.marks.weights:
            return "optimizer"
        return "optimizer" if any(entry in self._updating for _, entry in reads) else "forward"

    def leave_backward(self) -> None:
        """A backward pass may have ended: see which storages are held as gradients now."""
        if not self._after_backward or _torch.in_backward():
            return
        self.mark_gradients()
        if self.place.module:
            self._after_backward = False
            self._updating.clear()

    def end_step(self) -> None:
        """A step is over: what do modules and gradients hold now?"""
        self.mark_modules()
        self.mark_gradients()
        self._after_backward = False
        self._updating.clear()

    def mark_gradients(self) -> None:
        """Look up every parameter's gradient."""
        for reference in self._loose:
            self._mark_gradient(reference())
        for module in self.place.live_modules():
            for parameter in module.parameters(recurse=False):
                self._mark_gradient(parameter)
        for optimizer in self.place.live_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._mark_gradient(parameter)

    def mark_modules(self) -> None:
        """Look up the storages of every module's parameters and buffers, as they are now."""
        for module in self.place.live_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                for inner in _torch.inner_tensors(parameter).values():
                    self._mark(self.marks.weights, inner, name)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                self._mark(self.marks.buffers, buffer, name)

    def _mark(self, names: dict[int, str], tensor: torch.Tensor | None, name: str) -> None:
        if tensor is not None:
            names.setdefault(self.ledger.entry(tensor, None).id, name)

    def _mark_gradient(self, parameter: torch.Tensor | None) -> None:
        if parameter is None or not parameter.is_leaf or parameter.grad is None:
            return
        gradient, weight = self.ledger.find(parameter.grad), self.ledger.find(parameter)
        if gradient is not None and weight is not None:
            self.marks.gradients[gradient.id] = weight.id
            self._updating.add(gradient.id)

    def _before_update(self) -> None:
        for optimizer in self.place.live_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._mark(self.marks.weights, parameter, "")
        self.mark_gradients()

    def _mark_states(self) -> None:
        for optimizer in self.place.live_optimizers():
            for state in optimizer.state.values():
                for tensor in _torch.tree_leaves(state):
                    if isinstance(tensor, torch.Tensor):
                        entry = self.ledger.find(tensor)
                        if entry is not None:
                            self.marks.states.add(entry.id)


def _made_outside(tensor: torch.Tensor) -> StepError:
    return StepError(
        f"the step uses a real parameter of shape {tuple(tensor.shape)} that was made outside of build",
        expected="a build that makes the model itself, so that recording neither allocates nor changes it",
        do="Make the model inside of build, or pass the module to memplan.explain, which copies it",
        where=format_frame(user_frame()),
    )


def _results(result: Any, ledger: Ledger, index: int, writes: list[int]) -> None:
    if isinstance(result, torch.Tensor):
        writes.append(ledger.entry(result, index).id)
        if result.device.type not in ("cpu", "meta"):
            raise DeviceError(
                f"a tensor on {result.device} at {format_frame(user_frame())}",
                expected="tensors on the CPU, which the step is recorded for",
                do="Let build choose the CPU, or name the card that the step is for, as in device='h100'",
            )
    elif isinstance(result, (list, tuple)):
        for item in result:
            _results(item, ledger, index, writes)
