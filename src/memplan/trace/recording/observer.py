"""Records the ops and storages that a dispatch mode sees, for recordings and for measurements."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.errors import DeviceError, EndlessError, StepError
from memplan.trace.recording.call_forms import Forms
from memplan.trace.recording.creating_ops import CreatingOps
from memplan.trace.recording.engine_forms import EngineForms
from memplan.trace.recording.formula_forms import form_of
from memplan.trace.recording.ledger import Entry, Ledger, Note
from memplan.trace.recording.ownership import Ownership
from memplan.trace.recording.place import Place, format_frame, user_frame
from memplan.trace.recording.saved_scalars import SavedScalars
from memplan.trace.recording.values.known_indices import Positions
from memplan.trace.recording.values.ranges import ValueRanges
from memplan.trace.records import HOST, ON_CARD, Phase
from memplan.trace.semantics.kinds import NONE, Semantics, Temporary

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
_CLONE = "aten.clone.default"
_EQUAL = ("aten.equal.default", "aten.allclose.default")
_ONES = "aten.ones_like.default"
# CUDA allows these to read both devices: copies, indices and lengths on the host, step counters of optimizers,
# states in managed memory
_MAY_MIX_DEVICES = (
    "aten.copy", "aten._to_copy", "aten.index", "aten._index", "aten.set_", "aten._foreach", "aten._fused",
    "aten._pack_padded_sequence", "aten._ctc_loss", "bitsandbytes.optimizer_update",
)  # fmt: skip
_LIFT = "aten.lift_fresh.default"
_NO_MEMORY = "aten._efficientzerotensor.default"  # ZeroTensorFallback.cpp: tangents that are known to be zero
# operators of a library that allocate only their results (bitsandbytes/backends/*/ops.py), on the CPU and on cards;
# those of MADE_OF_TORCH on cards alone, since on the CPU they are decomposed
_WITHOUT_TEMPORARIES = frozenset(
    f"bitsandbytes.{name}.default"
    for name in ("dequantize_4bit", "dequantize_blockwise", "quantize_blockwise", *_torch.MADE_OF_TORCH)
)
_SCALAR = "aten._local_scalar_dense.default"
_EMPTY_STRIDED = "aten.empty_strided.default"
_EMPTY = torch.ops.aten.empty.memory_format
# ops without storage, kernel or effect on memory, which a trace leaves out
_UNRECORDED = frozenset({"aten.detach.default", "aten.alias.default", "aten.is_same_size.default", _SCALAR})
_TORCH_NAMESPACES = (
    "aten.", "prim.", "prims.", "profiler.", "mkldnn.", "memplan.", "_c10d", "c10d", "inductor.", "higher_order",
    "fsdp.",
)  # fmt: skip


class Residence(Protocol):
    """Devices of storages while a step for a card is recorded; implemented by `memplan.trace.fake_cuda`."""

    everything: bool

    @property
    def destination(self) -> str | None:
        """Device that the caller of the running op requested, or None."""
        ...


class Events(Protocol):
    """Answers scalar reads in a recording, and records the assumptions behind the answers."""

    def read_scalar(self, tensor: torch.Tensor, run: _torch.Run, observer: Observer) -> Any:
        """Return the assumed value of a scalar read."""
        ...

    def equal(self) -> bool:
        """Return the assumed result of `torch.equal`."""
        ...

    def result_assumed(self, text: str) -> None:
        """Record an assumption about an op's result."""
        ...

    def library_op(self, op: str) -> None:
        """Record an operator of a library or of the user, whose workspace is unknown."""
        ...

    def mixed_devices(self, op: str) -> None:
        """Record an op that reads tensors of both host and card, which CUDA refuses."""
        ...


@dataclass(frozen=True, slots=True)
class _Signature:
    """The facts of an op's schema that the observer needs."""

    name: str
    positions: list[tuple[int, str]]
    """(position, name) of the arguments that can be tensors."""
    mutable: bool
    """Whether the op changes an argument."""
    writes: list[tuple[int, str]]
    """(position, name) of the arguments that it changes."""
    unrecorded: bool
    """Whether traces leave it out: it has no storage, kernel or effect on memory."""
    from_library: bool
    """Whether it is a library's op, whose temporaries are unknown."""

    @classmethod
    def of_op(cls, func: Any) -> _Signature:
        """Return the signature of an op of torch or of a library."""
        name, mutable = str(func), _torch.is_mutable(func)
        return cls(
            name,
            _torch.tensor_arguments(func),
            mutable,
            _torch.written_arguments(func) if mutable else [],
            unrecorded=name in _UNRECORDED or name.startswith(("prim.", "profiler.")),
            from_library=not name.startswith(_TORCH_NAMESPACES) and name not in _WITHOUT_TEMPORARIES,
        )

    @classmethod
    def of_kernel(cls, name: str, tensors: int) -> _Signature:
        """Return the signature of a kernel of Triton or Inductor, with this number of tensor arguments."""
        positions = [(at, f"tensor {at + 1}") for at in range(tensors)]
        return cls(name, positions, mutable=False, writes=[], unrecorded=False, from_library=False)

    def written_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the values of the arguments that a call of the op writes."""
        return [args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes]


class Observer:
    """Records every op with its phase, module and line, and every storage with its allocation and free."""

    def __init__(
        self,
        place: Place,
        *,
        real: bool,
        semantics: Semantics | None = None,
        on_card: bool = False,
        events: Events | None = None,
    ) -> None:
        """Begin with an empty ledger.

        Args:
            place: tracks which module, phase and line runs.
            real: whether tensors have memory, as in a measurement; a recording's are fake.
            semantics: results and temporaries of ops on the step's device; None: ops run as torch runs them.
            on_card: whether real tensors may be on a card.
            events: answers scalar reads and gets assumptions, in a recording; None in a measurement.
        """
        self.place = place
        self.ledger = Ledger(real=real, card=on_card)
        self.notes: list[Note] = []
        """What is known of each op so far, in order."""
        self.creating_ops = CreatingOps()
        """By autograd node: the op that created it."""
        self.ownership = Ownership(place, self.ledger, self.notes)
        self._events = events
        self._on_assumption = None if events is None else events.result_assumed
        self.fake_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Returns the fake tensor for a real tensor from outside of the recording."""
        self.needs_of_wrapped: Callable[[Any], tuple[str, ...]] = lambda func: ()
        """Returns the names of the arguments for which a wrapper subclass computes gradients by an op."""
        self.most_ops: int | None = None
        """Number of ops after which the recording is given up."""
        self.card: Residence | None = None
        """Devices of tensors in a recording for a card; else None."""
        self.semantics = semantics or NONE
        self.forms = Forms(self.ledger)
        """Calls of the forward ops."""
        self.engine = EngineForms(self.ledger)
        """Recognizes ops that run in place without a dispatch mode."""
        self._without_vectors = False
        """Whether the running function needs singular values or eigenvalues without their vectors."""
        self._scalars = SavedScalars(self.ledger)
        self._positions = Positions(self.ledger)
        self.ranges = ValueRanges(self.ledger)
        self._signature_of = functools.cache(_Signature.of_op)
        self._after_backward = False
        """Whether a backward pass of this step has begun, and no later forward pass."""
        place.on_module = self.leave_backward
        place.on_result = self._on_result
        place.before_update = self.ownership.before_update
        place.after_update = self.ownership.mark_states

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run an op by ``run(func)``, record it, and return its result. In a recording, which has no values, a scalar
        read and `torch.equal` return an assumed result."""
        if self.engine.use_counts is not None:  # within `calibrate`
            if func is _ADD and _torch.in_backward():
                self.engine.use_counts.append(_torch.use_counts(args[0]))
            return run(func)
        signature = self._signature_of(func)
        if signature.unrecorded:
            if self._events is not None and signature.name == _SCALAR:
                return self._events.read_scalar(args[0], run, self)
            if args and (_torch.is_sparse(args[0]) or self._is_outside(signature, args[0])):
                self._operands(signature, args, kwargs)  # registers the tensor
            return run(func)
        if signature.name in _EQUAL and self._events is not None:  # noted, but not run: a recording has no values
            self._run_and_note(signature, args, kwargs, result=None, func=func)
            return self._events.equal()
        # a decomposition whose vectors are not needed, as of svdvals: the real run calls an op without them
        values_only = _torch.without_vectors(func, args) if self._without_vectors else None
        if values_only is not None:
            op, args = values_only
            result = self._run_and_note_as(op, args, kwargs, lambda op: op(*args, **kwargs))
            return result if isinstance(result, tuple) else (result, result)
        # ops that a real run does in place, and out of place only under a dispatch mode
        if func is _ADD and self.engine.is_in_place(args, self.notes):
            return self._run_and_note_as(_ADD_IN_PLACE, args, kwargs, run)
        in_place = _torch.IN_PLACE_ON_ZEROS.get(func)
        if in_place is not None and self.engine.writes_fresh_zeros(args[0], self.notes):
            return self._run_and_note_as(in_place, args, kwargs, run)
        in_place = self.engine.in_place_variant(func, args, self.notes)
        if in_place is not None:
            return self._run_and_note_as(in_place, args, kwargs, run)
        return self._run_and_note(signature, args, kwargs, result=None, func=func, run=run)

    def _run_and_note_as(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: _torch.Run) -> Any:
        """Run and record ``op`` instead of the dispatched op, of which it is a variant (in place, without vectors)."""
        return self._run_and_note(self._signature_of(op), args, kwargs, result=None, func=op, run=run)

    def set_without_vectors(self, without: bool) -> None:
        """Set whether the running function needs singular values or eigenvalues without their vectors."""
        self._without_vectors = without

    def calibrate(self) -> None:
        """Determine how autograd's engine references gradients in its buffers. To be called under the dispatch mode."""
        self.engine.calibrate()
        self.creating_ops.restart()

    def _run_and_note(
        self,
        signature: _Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        func: Any,
        run: _torch.Run | None = None,
    ) -> Any:
        """Record an op with its reads, allocations and frees, and return its result.

        The op runs by ``run(func)`` with the results of the device's semantics; without ``run``, ``result`` is its
        result, and it does not run. On a card, the ledger's device and stream are set to the op's while it runs.
        """
        index = len(self.notes)
        if self.most_ops is not None and index >= self.most_ops:
            raise EndlessError(f"the step runs more than {self.most_ops:,} ops")
        ledger = self.ledger
        reads, needs, on_card = self._operands(signature, args, kwargs)
        needs = needs or self.needs_of_wrapped(func)
        if signature.name == _UNSCALE:  # its second argument is the GradScaler's flag for overflows
            self.ownership.found_inf.add(ledger.entry(args[1], op=None).id)
        note = self._begin_note(signature, reads, needs, index, args)
        self.notes.append(note)  # before it runs, so that what it raises can be located
        self._scalars.before_op(note.sequence)
        semantics, current = self.semantics, 0
        if self.card is not None:
            # factory calls in C++ are for a tensor on the card; for factory calls in Python `destination` is set
            on_card = on_card or (not reads and (self.card.everything or not self.place.building))
            ledger.device = self.card.destination or (ON_CARD if on_card else HOST)
            current, ledger.stream = ledger.stream, self._stream_of(note)
            semantics = semantics if ledger.device == ON_CARD else NONE
        self._positions.before(signature.name, args)
        self.ranges.before(signature.written_values(args, kwargs))
        # an op that writes a sparse tensor allocates new parts before it frees the old parts: keep these alive
        writes_sparse = not ledger.real and signature.mutable and args and _torch.is_sparse(args[0])
        old_parts = _torch.sparse_parts(args[0]) if writes_sparse else []
        if signature.from_library and self._events is not None:
            self._events.library_op(signature.name)
        if run is not None:
            result = _result(semantics, signature.name, func, args, kwargs, run, self._on_assumption)
        if signature.mutable and signature.positions and isinstance(args[0], torch.Tensor):
            ledger.reallocate_resized(args[0], index)
        correct = semantics.results.get(signature.name)  # sets the device's sizes and strides
        result = result if correct is None else correct(args, kwargs, result)
        self._note_allocations(signature, args, kwargs, result, note, index, semantics)
        old_parts.clear()
        if self.card is None and note.grad_enabled and "self" in needs:
            self._scalars.save(signature.name, args, result, index)
        if self.card is not None:
            ledger.device, ledger.stream = ON_CARD if self.card.everything else HOST, current
        note.end = ledger.clock
        for values in (self._positions, self.ranges):
            values.after(signature.name, args, kwargs, result, signature.written_values(args, kwargs))
        if note.phase == "forward" and note.step == 0 and func is not None:
            self.forms.note(index, func, args, kwargs, result)
        if note.phase == "optimizer":
            self.ownership.updating.update(note.writes)
        return result

    def _note_allocations(
        self,
        signature: _Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        note: Note,
        index: int,
        semantics: Semantics,
    ) -> None:
        """Record the allocations of an op that has run, and the frees of its temporaries. ``semantics``: of the op's
        device."""
        ledger = self.ledger
        form = None if ledger.real else form_of(signature.name, self.notes, self._on_assumption, ledger.device)
        if form is None:  # the op runs as its kernel does
            temporaries = semantics.temporaries(signature.name, args, kwargs, result, _torch.in_backward())
            temporaries = self._scalars.without_saved(temporaries, signature.name, args, note.sequence)
        else:
            temporaries = tuple(map(Temporary, form.temporaries(args, result)))
        if signature.name == _LIFT:
            ledger.register_lifted(args[0], result, index)
        absent = (form is not None and form.absent) or signature.name == _NO_MEMORY
        self.ownership.workspaces.update(
            _allocations(result, temporaries, ledger, index, note, absent, semantics.order)
        )

    def launched(self, kernel: str, tensors: Sequence[torch.Tensor]) -> None:
        """Record a launch of a Triton kernel or of a kernel of Inductor's generated code, whose buffers were allocated
        before. The allocation of a buffer gets the name of the first kernel that uses the buffer."""
        for tensor in tensors:
            allocating_op = self.ledger.entry(tensor, op=None).op
            if allocating_op is not None and self.notes[allocating_op].name == _EMPTY_STRIDED:
                self.notes[allocating_op].name = kernel
        if not kernel.startswith("aten."):  # torch's own kernels are dispatched as ops
            self._run_and_note(_Signature.of_kernel(kernel, len(tensors)), tuple(tensors), {}, result=None, func=None)

    def random_state(self, state: torch.Tensor) -> None:
        """Record the tensor of `torch.get_rng_state` on the CPU, which no op creates."""
        if self.card is None:  # of a card, only the card's own memory counts
            self._run_and_note(self._signature_of(_EMPTY), (list(state.shape),), {"dtype": state.dtype}, state, _EMPTY)

    def _on_result(self, module: int, result: Any) -> None:
        """Note the result of an outermost module's forward in the first step. ``module``: id() of the module."""
        if self.place.step == 0 and not _torch.in_backward():
            self.forms.returns(module, len(self.notes), result)

    def _stream_of(self, note: Note) -> int:
        """Set and return an op's stream: the engine runs a derivative formula on the stream of its forward op."""
        forward_op = self.creating_ops.by_sequence_number.get(note.sequence) if note.sequence is not None else None
        note.stream = self.ledger.stream if forward_op is None else self.notes[forward_op].stream
        return note.stream

    def _operands(
        self, signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, int]], tuple[str, ...], bool]:
        """Register an op's tensor arguments.

        Returns:
            Each storage that it reads, as (argument name, storage id); the names of arguments that require a gradient;
            whether any tensor is on the card.
        """
        reads: list[tuple[str, int]] = []
        needs: list[str] = []
        on_card = on_host = False
        for position, name in signature.positions:
            value: Any = args[position] if position < len(args) else kwargs.get(name)
            items: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
            if items and isinstance(items[0], (list, tuple)):  # of collectives, a list for each device
                items = [*itertools.chain.from_iterable(items)]
            for item in items:
                if not isinstance(item, torch.Tensor):
                    continue
                parts = self.ledger.parts(item, op=None)  # the last is the tensor itself, or the values if it is sparse
                if parts[-1].op is None and self._is_outside(signature, item):
                    self.ledger.register_outside(item, self.fake_of(item))
                reads += [(name, entry.id) for entry in parts]
                if parts[-1].device == ON_CARD:
                    on_card = True
                elif item.dim():  # scalars on the host may be read by CUDA's kernels
                    on_host = True
                if not item.requires_grad:
                    continue
                if not self.ledger.real and not isinstance(item, _torch.FakeTensor):
                    raise _outside_error(item)
                if not needs or needs[-1] != name:  # a list of tensors counts once
                    needs.append(name)
                # not while building, where a parameter may still be replaced: the reference would keep it alive
                known = self.place.building or reads[-1][1] in self.ownership.weights
                if not known and isinstance(item, nn.Parameter):
                    self.ownership.add(self.ownership.weights, item, name="")
                    self.ownership.unowned.append(weakref.ref(item))
        if on_card and on_host and self._events is not None and not signature.name.startswith(_MAY_MIX_DEVICES):
            self._events.mixed_devices(signature.name)
        return reads, tuple(needs), on_card

    def _is_outside(self, signature: _Signature, tensor: torch.Tensor) -> bool:
        """Return whether a tensor existed before a recording for the CPU, except for `aten.lift_fresh`, which takes a
        tensor with the memory of Python or numpy."""
        if self.ledger.real or self.card or signature.name == _LIFT or not _torch.has_shape(tensor):
            return False
        return _torch.is_from_outside(tensor)

    def _begin_note(
        self, signature: _Signature, reads: list[tuple[str, int]], needs: tuple[str, ...], index: int, args: Any
    ) -> Note:
        """Return the note of an op that is about to run: its phase, module, line and autograd node."""
        place = self.place
        phase = place.phase()
        grad_enabled = torch.is_grad_enabled()
        sequence = None  # of the autograd node whose derivative formula runs
        if phase == "backward":
            self._after_backward = True
            node = _torch.backward_node()
            sequence = _torch.node_sequence(node) if node is not None else None
        elif signature.name == _ONES and _torch.called_for_the_loss():
            phase = "backward"  # the gradient of the loss itself, allocated before the engine starts
        elif self._after_backward and phase == "forward":
            phase = self._phase_after_backward(signature, reads, needs, grad_enabled)
        if grad_enabled:
            after_clone = bool(signature.mutable and index and self.notes[-1].name == _CLONE)
            on_view = signature.mutable and bool(needs) and _torch.is_view(args[0])
            self.creating_ops.follow(index, after_clone=after_clone, on_view=on_view)
        clock = self.ledger.clock
        frame = user_frame() if phase != "backward" or grad_enabled else None
        return Note(
            name=signature.name, phase=phase, step=place.step, module=place.module, frame=frame, start=clock, end=clock,
            reads=reads, writes=[], needs_grad=needs, sequence=sequence, grad_enabled=grad_enabled,
        )  # fmt: skip

    def _phase_after_backward(
        self, signature: _Signature, reads: list[tuple[str, int]], needs: tuple[str, ...], grad_enabled: bool
    ) -> Phase:
        """Return "optimizer" for ops on weights and gradients (clipping, a hand-written update), else "forward"."""
        if self._after_backward and not self.ownership.updating:
            self.leave_backward()
        if grad_enabled and needs:
            return "forward"
        if signature.mutable and reads and reads[0][1] in self.ownership.weights:
            return "optimizer"
        return "optimizer" if any(entry in self.ownership.updating for _, entry in reads) else "forward"

    def leave_backward(self) -> None:
        """If a backward pass has ended, register the gradients of parameters."""
        if not self._after_backward or _torch.in_backward():
            return
        self.ownership.mark_gradients()
        if self.place.module:  # a module runs: the next forward pass has begun
            self._after_backward = False
            self.ownership.updating.clear()

    def end_step(self) -> None:
        """End a step: register the parameters, buffers and gradients that exist."""
        self.ownership.mark_modules()
        self.ownership.mark_gradients()
        self._after_backward = False
        self.ownership.updating.clear()


def _result(
    semantics: Semantics,
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: _torch.Run,
    report: Callable[[str], None] | None,
) -> Any:
    """Return an op's result: by the device's semantics, or else by ``run(func)``.

    ``name``: the op's overload name. ``report``: called with the assumption behind the result, if any. Raises
    NotImplementedError if the op has no kernel for sparse tensors.
    """
    is_sparse = any(isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo for value in args)
    if is_sparse and not _torch.runs_on_sparse(func):
        raise NotImplementedError(f"Could not run '{func.name()}' with arguments from the 'SparseCPU' backend")
    replacement = semantics.instead.get(name)
    result = NotImplemented if replacement is None else replacement(args, kwargs)
    replaced = result is not NotImplemented
    if not replaced:
        result = run(func)
    assumption = semantics.assumed(name, args, result, replaced)
    if assumption is not None and report is not None:
        report(assumption)
    return result


def _outside_error(tensor: torch.Tensor) -> StepError:
    """Return the error for a step that uses a real parameter from outside of ``build``."""
    return StepError(
        f"the step uses a real parameter of shape {tuple(tensor.shape)} that was made outside of build",
        expected="a build that makes the model itself, so that recording neither allocates nor changes it",
        do="Make the model inside of build, or pass the module to memplan.explain, which copies it",
        where=format_frame(user_frame()),
    )


def _allocations(
    result: Any,
    temporaries: Sequence[Temporary],
    ledger: Ledger,
    index: int,
    note: Note,
    absent: bool,
    order: Mapping[str, tuple[int, ...]],
) -> Iterator[int]:
    """Allocate an op's results and temporaries in the kernel's order, and free the temporaries that end with it.

    Args:
        temporaries: of the op, in the order of their allocation: each before the results (``first``), after them, or
            between two (``after`` and ``until``, numbers of results). One with ``followed`` is freed once so many
            further temporaries are allocated, others when the op returns.
        absent: whether the results take no memory.
        order: op name -> positions of the results in the order of their allocation, if not in sequence.

    Yields:
        Ids of the entries that are workspaces.
    """
    allocated = [(temporary, _allocate(temporary, ledger, index)) for temporary in temporaries if temporary.first]
    if any(temporary.after is not None or temporary.until is not None for temporary in temporaries):
        yield from _allocate_between_results(result, temporaries, allocated, ledger, index, note.writes, absent)
        return
    _allocate_results(result, ledger, index, note.writes, absent, order.get(note.name))
    for temporary in temporaries:
        if not temporary.first:
            allocated.append((temporary, _allocate(temporary, ledger, index)))
            # free earlier temporaries of which this is the last allocation that they outlive (`Temporary.followed`)
            for allocations_since, (earlier, entry) in enumerate(reversed(allocated)):
                if earlier.followed == allocations_since:
                    ledger.free(entry)
    yield from _free([(temporary, entry) for temporary, entry in allocated if temporary.followed is None], ledger)
    yield from (entry.id for temporary, entry in allocated if temporary.followed is not None and temporary.workspace)


def _allocate_between_results(
    result: Any, temporaries: Sequence[Temporary], allocated: list[tuple[Temporary, Entry]], ledger: Ledger, index: int,
    writes: list[int], absent: bool,
) -> Iterator[int]:  # fmt: skip
    """Allocate an op's results and free its temporaries, of which some live between two results (`Temporary.after`,
    ``until``). The parameters are those of `_allocations`, and these:

    ``allocated``: the temporaries before the first result, with their entries. ``writes``: gets the results' entries.
    """
    for number, part in enumerate(result if isinstance(result, (list, tuple)) else (result,)):
        yield from _free([(temporary, entry) for temporary, entry in allocated if temporary.until == number], ledger)
        _allocate_results(part, ledger, index, writes, absent)
        between = [temporary for temporary in temporaries if temporary.after == number]
        until_next = [temporary for temporary in between if temporary.until is None]
        until_later = [temporary for temporary in between if temporary.until is not None]
        yield from _free([(temporary, _allocate(temporary, ledger, index)) for temporary in until_next], ledger)
        allocated += [(temporary, _allocate(temporary, ledger, index)) for temporary in until_later]
    live = [(temporary, entry) for temporary, entry in allocated if entry.died is None]
    last = [temporary for temporary in temporaries if not temporary.first and temporary.after is None]
    yield from _free(live + [(temporary, _allocate(temporary, ledger, index)) for temporary in last], ledger)


def _allocate(temporary: Temporary, ledger: Ledger, index: int) -> Entry:
    return ledger.allocate_hidden(
        temporary.bytes, index, low=temporary.low, owner=temporary.owner, query=temporary.query
    )


def _free(allocated: list[tuple[Temporary, Entry]], ledger: Ledger) -> Iterator[int]:
    """Free temporaries in reverse order, like the locals of a C++ function, except those that are freed with a result
    or never. Yields the ids of the entries that are workspaces of a library."""
    for temporary, entry in reversed(allocated):
        if not temporary.permanent and temporary.owner is None:
            ledger.free(entry)
        if temporary.workspace:
            yield entry.id


def _allocate_results(
    result: Any, ledger: Ledger, index: int, writes: list[int], absent: bool, order: tuple[int, ...] | None = None
) -> None:
    """Allocate the tensors among an op's results and append their entries to ``writes``.

    ``absent`` results take no memory. ``order`` lists the positions of results in the order of their allocation;
    positions that it leaves out are on the host.
    """
    if isinstance(result, torch.Tensor):
        device = ledger.device
        if not ledger.real and not isinstance(result, _torch.FakeTensor):
            ledger.device = HOST  # a real tensor, whose values C++ reads
        writes.extend(entry.id for entry in ledger.parts(result, index))
        ledger.device = device
        if absent:
            ledger.register_foreign(result, index)
        if result.device.type not in ("cpu", "meta") and not (ledger.card and result.is_cuda):
            raise DeviceError(
                f"a tensor on {result.device} at {format_frame(user_frame())}",
                expected="tensors on the CPU, which the step is recorded for",
                do="Let build choose the CPU, or name the card that the step is for, as in device='h100'",
            )
    elif isinstance(result, (list, tuple)):
        if order is None:
            for item in result:
                _allocate_results(item, ledger, index, writes, absent)
            return
        device, written = ledger.device, [list[int]() for _ in result]
        for position in (*order, *(set(range(len(result))) - set(order))):
            ledger.device = device if position in order else HOST
            _allocate_results(result[position], ledger, index, written[position], absent)
        ledger.device = device
        writes.extend(itertools.chain(*written))  # in the order of the results
