"""What a dispatch mode sees, written down: the part that predicting and measuring share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.errors import DeviceError, StepError
from memplan.trace.recording.call_forms import Forms
from memplan.trace.recording.engine_forms import EngineForms
from memplan.trace.recording.formula_forms import form_of
from memplan.trace.recording.held_numbers import HeldNumbers
from memplan.trace.recording.ledger import Entry, Ledger, Note
from memplan.trace.recording.marks import Marks
from memplan.trace.recording.place import Place, format_frame, user_frame
from memplan.trace.recording.sequences import Sequences
from memplan.trace.recording.values.known_indices import Positions
from memplan.trace.recording.values.ranges import ValueRanges
from memplan.trace.records import HOST, ON_CARD, Phase
from memplan.trace.semantics.kinds import NONE, Extra, Semantics

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
# Ops without storage, kernel or meaning for memory; left out so that a trace reads like the step.
_CLONE = "aten.clone.default"
_EQUAL = ("aten.equal.default", "aten.allclose.default")
_ONES = "aten.ones_like.default"
# what may read both, as CUDA allows: copies, indices and lengths on the host, counters of an optimizer
_ACROSS = (
    "aten.copy", "aten._to_copy", "aten.index", "aten._index", "aten.set_", "aten._foreach", "aten._fused",
    "aten._pack_padded_sequence", "aten._ctc_loss",
)  # fmt: skip
_LIFT = "aten.lift_fresh.default"
_NO_MEMORY = "aten._efficientzerotensor.default"  # ZeroTensorFallback.cpp: tangents that are known to be zero
_SCALAR = "aten._local_scalar_dense.default"
_EMPTY = torch.ops.aten.empty.memory_format
_SILENT = frozenset({"aten.detach.default", "aten.alias.default", "aten.is_same_size.default", _SCALAR})


_OF_TORCH = (
    "aten.",
    "prim.",
    "prims.",
    "profiler.",
    "mkldnn.",
    "memplan.",
    "_c10d",
    "c10d",
    "inductor.",
    "higher_order",
)


class Residence(Protocol):
    """Where storages lie, while a step for a card is recorded; `memplan.trace.fake_cuda` has it."""

    everything: bool

    @property
    def destination(self) -> str | None:
        """Device of the results of the running op, where that was said."""
        ...


class _Signature:
    """What we need of an op's schema, worked out once an op."""

    __slots__ = ("foreign", "mutable", "name", "positions", "silent", "writes")

    def __init__(self, func: Any) -> None:
        self.name = str(func)
        self.positions = _torch.tensor_arguments(func)
        self.mutable = _torch.is_mutable(func)
        self.writes = _torch.written_arguments(func) if self.mutable else []
        self.silent = self.name in _SILENT or not self.name.startswith(("aten.", "torch", "_", "mkldnn"))
        if not self.name.startswith(("aten.", "prim.", "profiler.")):
            self.silent = False  # an operator of a library or of the user's
        self.foreign = not self.name.startswith(_OF_TORCH)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that a call of the op writes."""
        return [args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes]


class Observer:
    """Notes every op with its place, and every storage with its birth and death."""

    def __init__(self, place: Place, *, real: bool, semantics: Semantics | None = None, on_card: bool = False) -> None:
        self.place = place
        self.ledger = Ledger(real=real, card=on_card)
        self.notes: list[Note] = []
        self.sequences = Sequences()
        self.marks = Marks(place, self.ledger, self.notes)
        self.read_equal: Callable[[], bool] | None = None
        self.read_apart: Callable[[str], None] | None = None
        """Told the op that reads a tensor of the host beside one on the card, which CUDA refuses."""
        self.taken_for_granted: Callable[[str], None] | None = None
        """Told what was assumed of an op's result."""
        self.foreign_kernel: Callable[[str], None] | None = None
        """Told an op of a library or of the user's, whose kernel nobody knows."""
        self.read_scalar: Callable[[torch.Tensor, Any], Any] | None = None
        self.fake_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Returns what stands for a tensor from outside."""
        self.card: Residence | None = None
        self.semantics = semantics or NONE
        self.forms = Forms(self.ledger)
        self.engine = EngineForms(self.ledger)
        self._values_alone = False
        self._numbers = HeldNumbers(self.ledger)
        self._positions = Positions(self.ledger)
        self.ranges = ValueRanges(self.ledger)
        self._signatures: dict[Any, _Signature] = {}
        self._after_backward = False
        place.on_module = self.leave_backward
        place.on_result = self._returned
        place.before_update = self.marks.before_update
        place.after_update = self.marks.mark_states

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run an op by ``run(func)`` and note it."""
        if self.engine.calibrating is not None:
            if func is _ADD and _torch.in_backward():
                self.engine.calibrating.append(_torch.use_counts(args[0]))
            return run(func)
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = _Signature(func)
        if signature.silent:
            if self.read_scalar is not None and signature.name == _SCALAR:
                return self.read_scalar(args[0], run)
            if args and (_torch.is_sparse(args[0]) or self._was_there_before(signature, args[0])):
                self._operands(signature, args, kwargs)
            return run(func)
        if signature.name in _EQUAL and self.read_equal is not None:
            self._note(signature, args, kwargs, None, func)
            return self.read_equal()
        alone = _torch.without_vectors(func, args) if self._values_alone else None
        if alone is not None:
            op, args = alone
            result = self._instead(op, args, kwargs, lambda op: op(*args, **kwargs))
            return result if isinstance(result, tuple) else (result, result)
        if func is _ADD and self.engine.is_in_place(args, self.notes):
            return self._instead(_ADD_IN_PLACE, args, kwargs, run)
        in_place = _torch.IN_PLACE_ON_ZEROS.get(func)
        if in_place is not None and self.engine.is_on_zeros(args[0], self.notes):
            return self._instead(in_place, args, kwargs, run)
        in_place = self.engine.in_formula(func, args, self.notes)
        if in_place is not None:
            return self._instead(in_place, args, kwargs, run)
        return self._note(signature, args, kwargs, None, func, run)

    def _instead(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run and note the form of an op that writes its first argument."""
        return self._note(self._signatures.setdefault(op, _Signature(op)), args, kwargs, None, op, run)

    def in_values_alone(self, inside: bool) -> None:
        """Note that a function begins that needs singular or eigenvalues without their vectors, or that it ends."""
        self._values_alone = inside

    def calibrate(self) -> None:
        """Learn how the engine holds a gradient that nobody else does. Call it under the mode."""
        self.engine.calibrate()
        self.sequences.restart()

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
        note = self._place_of(signature, reads, needs, index, args)
        self.notes.append(note)  # before it runs, so that what it raises can be located
        self._numbers.reached(note.sequence)
        semantics, current = self.semantics, 0
        if self.card is not None:
            # in C++ a tensor that is made from nothing is made for one on the card; in Python `destination` tells
            on_card = on_card or (not reads and (self.card.everything or not self.place.building))
            ledger.device = self.card.destination or (ON_CARD if on_card else HOST)
            current, ledger.stream = ledger.stream, self._stream_of(note)
            semantics = semantics if ledger.device == ON_CARD else NONE
        self._positions.before(signature.name, args)
        self.ranges.before(signature.written(args, kwargs))
        held = [] if ledger.real else _parts_written(signature, args)
        if signature.foreign and self.foreign_kernel is not None:
            self.foreign_kernel(signature.name)
        if run is not None:
            result = _result(semantics, signature.name, func, args, kwargs, run, self.taken_for_granted)
        if signature.mutable and signature.positions and isinstance(args[0], torch.Tensor):
            ledger.resized(args[0], index)
        corrected = semantics.results.get(signature.name)
        result = result if corrected is None else corrected(args, kwargs, result)
        form = None if ledger.real else form_of(signature.name, self.notes, self.taken_for_granted, ledger.device)
        if form is None:
            extras = semantics.extras(signature.name, args, kwargs, result, _torch.in_backward())
            extras = self._numbers.without(extras, signature.name, args, note.sequence)
        else:
            extras = tuple(map(Extra, form.beside(args, result)))
        if signature.name == _LIFT:
            ledger.lifted(args[0], result, index)
        absent = (form is not None and form.absent) or signature.name == _NO_MEMORY
        self.marks.workspaces.update(_births(result, extras, ledger, index, note, absent, semantics.order))
        held.clear()
        if self.card is None and note.grad_enabled and "self" in needs:
            self._numbers.made(signature.name, args, result, index)
        if self.card is not None:
            ledger.device, ledger.stream = ON_CARD if self.card.everything else HOST, current
        note.end = ledger.clock
        for values in (self._positions, self.ranges):
            values.after(signature.name, args, kwargs, result, signature.written(args, kwargs))
        if note.phase == "forward" and note.step == 0:
            self.forms.note(index, func, args, kwargs, result)
        if note.phase == "optimizer":
            self.marks.updating.update(note.writes)
        return result

    def random_state(self, state: torch.Tensor) -> None:
        """Note the CPU's random state, which `torch.get_rng_state` copies into a tensor without any op."""
        if self.card is None:
            signature = self._signatures.setdefault(_EMPTY, _Signature(_EMPTY))
            self._note(signature, (list(state.shape),), {"dtype": state.dtype}, state, _EMPTY)

    def _returned(self, module: int, result: Any) -> None:
        if self.place.step == 0 and not _torch.in_backward():
            self.forms.returns(module, len(self.notes), result)

    def _stream_of(self, note: Note) -> int:
        """Return an op's stream: the engine runs a derivative formula on the stream of its forward op."""
        source = self.sequences.ops.get(note.sequence) if note.sequence is not None else None
        note.stream = self.ledger.stream if source is None else self.notes[source].stream
        return note.stream

    def _operands(
        self, signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, int]], tuple[str, ...], bool]:
        """Return what an op reads, for which arguments a gradient is needed, and whether any of them lies on the
        card."""
        reads: list[tuple[str, int]] = []
        needs: list[str] = []
        on_card = on_host = False
        for position, name in signature.positions:
            value = args[position] if position < len(args) else kwargs.get(name)
            for item in (value,) if not isinstance(value, (list, tuple)) else value:
                if isinstance(item, torch.Tensor):
                    parts = self.ledger.parts(item, None)
                    if parts[-1].op is None and self._was_there_before(
                        signature, item
                    ):  # and so is all that shares its fake's storage
                        self.ledger.outside(item, self.fake_of(item))
                    reads += [(name, entry.id) for entry in parts]
                    if parts[-1].device == ON_CARD:
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
                            self.marks.add(self.marks.weights, item, "")
                            self.marks.loose.append(weakref.ref(item))
        if on_card and on_host and self.read_apart is not None and not signature.name.startswith(_ACROSS):
            self.read_apart(signature.name)
        return reads, tuple(needs), on_card

    def _was_there_before(self, signature: _Signature, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is from outside of a recording for the CPU, and not lifted into it."""
        apart = self.ledger.real or self.card or signature.name == _LIFT or not _torch.has_shape(tensor)
        return not apart and _torch.is_from_outside(tensor)

    def _place_of(
        self, signature: _Signature, reads: list[tuple[str, int]], needs: tuple[str, ...], index: int, args: Any
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
            after_clone = bool(signature.mutable and index and self.notes[-1].name == _CLONE)
            on_view = signature.mutable and bool(needs) and _torch.is_view(args[0])
            self.sequences.follow(index, after_clone=after_clone, on_view=on_view)
        clock = self.ledger.clock
        frame = user_frame() if phase != "backward" or grad_enabled else None
        return Note(
            signature.name, phase, place.step, place.module, frame, clock, clock, reads, [], needs, sequence,
            grad_enabled,
        )  # fmt: skip

    def _phase_after_backward(
        self, signature: _Signature, reads: list[tuple[str, int]], needs: tuple[str, ...], grad_enabled: bool
    ) -> Phase:
        """Between backward and the next forward, what touches gradients (clipping, a hand-written update) updates."""
        if self._after_backward and not self.marks.updating:
            self.leave_backward()
        if grad_enabled and needs:
            return "forward"
        if signature.mutable and reads and reads[0][1] in self.marks.weights:
            return "optimizer"
        return "optimizer" if any(entry in self.marks.updating for _, entry in reads) else "forward"

    def leave_backward(self) -> None:
        """Note that a backward pass may have ended: see which storages are held as gradients now."""
        if not self._after_backward or _torch.in_backward():
            return
        self.marks.mark_gradients()
        if self.place.module:
            self._after_backward = False
            self.marks.updating.clear()

    def end_step(self) -> None:
        """Note that a step is over: what do modules and gradients hold now?"""
        self.marks.mark_modules()
        self.marks.mark_gradients()
        self._after_backward = False
        self.marks.updating.clear()


def _result(
    semantics: Semantics,
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: _torch.Run,
    say: Callable[[str], None] | None,
) -> Any:
    """Return an op's result as the device gives it, or as fake tensors say. ``say`` is told what is assumed of it."""
    sparse = any(isinstance(one, torch.Tensor) and one.layout == torch.sparse_coo for one in args)
    if sparse and not _torch.runs_on_sparse(func):
        raise NotImplementedError(f"Could not run '{func.name()}' with arguments from the 'SparseCPU' backend")
    instead = semantics.instead.get(name)
    result = NotImplemented if instead is None else instead(args, kwargs)
    answered = result is not NotImplemented
    result = result if answered else run(func)
    text = semantics.assumed(name, args, result, answered)
    if text is not None and say is not None:
        say(text)
    return result


def _parts_written(signature: _Signature, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the parts of a sparse tensor that an op writes: it makes new ones before it frees these."""
    return _torch.sparse_parts(args[0]) if signature.mutable and args and _torch.is_sparse(args[0]) else []


def _made_outside(tensor: torch.Tensor) -> StepError:
    return StepError(
        f"the step uses a real parameter of shape {tuple(tensor.shape)} that was made outside of build",
        expected="a build that makes the model itself, so that recording neither allocates nor changes it",
        do="Make the model inside of build, or pass the module to memplan.explain, which copies it",
        where=format_frame(user_frame()),
    )


def _births(
    result: Any,
    extras: Sequence[Extra],
    ledger: Ledger,
    index: int,
    note: Note,
    absent: bool,
    order: Mapping[str, tuple[int, ...]],
) -> Iterator[int]:
    """Note an op's results, and what its kernel takes before, between or after them, or for as long as them.

    Yields:
        Ids of what are workspaces.
    """
    taken = [(extra, _take(extra, ledger, index)) for extra in extras if extra.first]
    if any(extra.after is not None or extra.until is not None for extra in extras):
        yield from _around_each(result, extras, taken, ledger, index, note.writes, absent)
        return
    _results(result, ledger, index, note.writes, absent, order.get(note.name))
    for extra in extras:
        if not extra.first:
            taken.append((extra, _take(extra, ledger, index)))
            _end_followed(taken, ledger)
    yield from _freed([one for one in taken if one[0].followed is None], ledger)
    yield from (entry.id for extra, entry in taken if extra.followed is not None and extra.workspace)


def _around_each(
    result: Any, extras: Sequence[Extra], taken: list[tuple[Extra, Entry]], ledger: Ledger, index: int,
    writes: list[int], absent: bool,
) -> Iterator[int]:  # fmt: skip
    """Note each result with what the kernel takes before it and frees before the next."""
    for number, part in enumerate(result if isinstance(result, (list, tuple)) else (result,)):
        yield from _freed([one for one in taken if one[0].until == number], ledger)
        _results(part, ledger, index, writes, absent)
        between = [one for one in extras if one.after == number]
        yield from _freed([(one, _take(one, ledger, index)) for one in between if one.until is None], ledger)
        taken += [(one, _take(one, ledger, index)) for one in between if one.until is not None]
    taken = [one for one in taken if one[1].died is None]
    taken += [(one, _take(one, ledger, index)) for one in extras if not one.first and one.after is None]
    yield from _freed(taken, ledger)


def _take(extra: Extra, ledger: Ledger, index: int) -> Entry:
    return ledger.hidden(extra.bytes, index, low=extra.low, owner=extra.owner, asked=extra.asked)


def _freed(taken: list[tuple[Extra, Entry]], ledger: Ledger) -> Iterator[int]:
    for extra, entry in reversed(taken):  # what was made last goes first, as locals of a C++ function do
        if not extra.held and extra.owner is None:
            ledger.end(entry)
        if extra.workspace:
            yield entry.id


def _end_followed(taken: list[tuple[Extra, Entry]], ledger: Ledger) -> None:
    """End what lives for some more allocations only, the last one made among them first."""
    for after, (extra, entry) in enumerate(reversed(taken)):
        if extra.followed == after:
            ledger.end(entry)


def _results(
    result: Any, ledger: Ledger, index: int, writes: list[int], absent: bool, order: tuple[int, ...] | None = None
) -> None:
    """Note the tensors among the results, in an order; absent ones take no memory, what it leaves out none on the
    card."""
    if isinstance(result, torch.Tensor):
        place = ledger.device
        if not ledger.real and not isinstance(result, _torch.FakeTensor):
            ledger.device = HOST  # its values are known: C++ reads them
        writes.extend(entry.id for entry in ledger.parts(result, index))
        ledger.device = place
        if absent:
            ledger.foreign(result, index)
        if result.device.type not in ("cpu", "meta") and not (ledger.card and result.is_cuda):
            raise DeviceError(
                f"a tensor on {result.device} at {format_frame(user_frame())}",
                expected="tensors on the CPU, which the step is recorded for",
                do="Let build choose the CPU, or name the card that the step is for, as in device='h100'",
            )
    elif isinstance(result, (list, tuple)):
        if order is None:
            for item in result:
                _results(item, ledger, index, writes, absent)
            return
        place, found = ledger.device, dict[int, list[int]]()
        for position in (*order, *(set(range(len(result))) - set(order))):
            ledger.device = place if position in order else HOST
            _results(result[position], ledger, index, found.setdefault(position, []), absent)
        ledger.device = place
        writes.extend(entry for _, entries in sorted(found.items()) for entry in entries)
