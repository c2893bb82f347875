"""A joint graph as flat lists and arrays, for the batch evaluator.

Forward values have numbers of their own ("rows"), in the order of their ids. The backward pass is a sequence of
*slots*: in slot 0 the tangents are received; slot j is the j-th backward op, with everything that is recomputed or
fetched just before it. A complete gradient is *returned*: handed to autograd or to the optimizer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, SavedForm, recomputable_values
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import base_level
from memplan.planning.schedule.scheduler import copied_gradients, frees_gradient, may_change_after_return

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GradientReturn:
    """The hand-over of a complete gradient."""

    slot: int
    """Slot after whose backward op it happens, unless a recomputed op reads the parameter later."""
    copied_bytes: int
    """Bytes of the gradient's copy that the receiver keeps; 0 without a copy."""
    update_bytes: int
    """Bytes that an optimizer which updates the parameter at once allocates meanwhile."""
    freed_bytes: int
    """Bytes of the gradient that are freed afterwards."""
    changing_parameter: int | None
    """The parameter, if it may change at once: its last read has to come before. None if it does not change."""


@dataclass(frozen=True, slots=True)
class ForwardOp:
    """A forward op, its values as rows."""

    op: GraphOp
    made_rows: tuple[int, ...]
    """Rows of its results."""
    read_rows: tuple[int, ...]
    """Rows of the forward values it reads, ascending."""
    changing_parameters: tuple[int, ...]
    """Ids of parameters that it reads and that may change once their gradient is returned."""
    overwritable_rows: tuple[int, ...]
    """Rows of operands in whose memory its first result can lie."""
    bytes_during: int
    """Bytes of all its results and its scratch."""
    bytes_saved_in_place: int
    """Bytes of ``bytes_during`` that it does not need if its first result overwrites an operand."""


class FlatGraph:
    """The graph with a fixed use of its gradients, as arrays."""

    def __init__(
        self, graph: JointGraph, outside_memory: OutsideMemory, gradients: GradientUse = KEPT_UNTIL_UPDATE
    ) -> None:
        self.graph, self.outside_memory, self.gradients = graph, outside_memory, gradients
        self.always_live_bytes = base_level(graph, Choices(gradients=gradients), outside_memory)
        """Bytes that are live during the whole step."""
        self.output_bases = {graph.base(value) for value in graph.outputs}
        """Values that own the memory of the step's outputs."""
        self.resident_values = {value.id for value in graph.values if value.kind in RESIDENT}
        """Values of parameters, buffers, inputs and constants."""
        self.tangents = {value.id for value in graph.values if value.kind == "tangent"}
        """Gradients of the outputs."""
        # forward values, and which of them may be recomputed
        self.forward_values = sorted(value for op in graph.forward_ops for value in op.makes)
        """By row: the forward value."""
        self.row_of_value = {value: row for row, value in enumerate(self.forward_values)}
        """By forward value: its row."""
        self.value_bytes = np.array([graph.values[value].bytes for value in self.forward_values], dtype=np.int64)
        """By row: bytes of the value."""
        self.is_output = np.array([value in self.output_bases for value in self.forward_values], dtype=bool)
        """By row: whether the value has the memory of an output of the step."""
        can_rerun = recomputable_values(graph)
        self.recomputable_values = tuple(value for value in self.forward_values if value in can_rerun)
        """Forward values that may be recomputed."""
        self.recomputable_rows = np.array(
            [self.row_of_value[value] for value in self.recomputable_values], dtype=np.int64
        )
        """Their rows."""
        # forms in which they may be saved
        self.forms = tuple(form for form in graph.ranked_forms if form.value not in self.output_bases)
        """Saved forms by rank: copies last."""
        self.row_of_form = [self.row_of_value[form.value] for form in self.forms]
        """By form: the row of its value."""
        self.encoded_bytes = [graph.values[form.encoded].bytes for form in self.forms]
        """By form: bytes of the encoding."""
        self.host_copy_indices = range(sum(not form.is_copied for form in self.forms), len(self.forms))
        """Indices of the forms that are copies to host memory."""
        self.encoding_indices = range(self.host_copy_indices.start)
        """Indices of the other forms: encodings on the device."""
        self.encodings_of_row: dict[int, list[int]] = defaultdict(list)
        """By row: indices of the value's encodings."""
        self.fetchable_forms_of_row: dict[int, list[int]] = defaultdict(list)
        """By row, ascending: the forms, copies included, that the value can be fetched from. The first chosen form is
        used."""
        for index, row in sorted(enumerate(self.row_of_form), key=lambda item: (item[1], item[0])):
            if index in self.encoding_indices:
                self.encodings_of_row[row].append(index)
            if self.forms[index].can_restore_value:
                self.fetchable_forms_of_row[row].append(index)
        # ops, and when they read and write which values
        self.gradient_returns: tuple[GradientReturn, ...] = ()
        self.has_delayed_returns = False
        """Whether the return of any gradient waits for the last read of its parameter."""
        self._compute_backward_constants()
        self._build_forward_ops()
        self._compute_last_uses()
        self._collect_readers()
        self.op_of_row = np.array([0] * len(self.forward_values), dtype=np.int64)
        """By row: position of the forward op that makes the value."""
        for index, op in enumerate(self.forward_ops):
            self.op_of_row[list(op.made_rows)] = index
        self._compute_shared_arrays()
        self.supports_batches = self._supports_batches()
        """Whether candidates can be evaluated in batches; see `_supports_batches`."""

    # -- backward

    def _compute_backward_constants(self) -> None:
        """Set what does not depend on the choices: by slot, the bytes of gradients, tangents and the results of
        backward ops."""
        graph = self.graph
        self.slot_count = len(graph.backward_ops) + 1
        """Number of slots."""
        last_slot = dict.fromkeys(self.tangents, 0)  # by value: the slot of its last use
        for slot, op in enumerate(graph.backward_ops, 1):
            last_slot.update((value, slot) for value in (*op.reads, *op.makes))
        kept_by_autograd = self._compute_gradient_returns(last_slot)
        gradients = {graph.base(gradient) for _, gradient in graph.gradients}
        self.slot_op_bytes = np.zeros(self.slot_count, dtype=np.int64)
        """Bytes that the slot's op allocates: its results and scratch."""
        self.slot_net_bytes = np.zeros(self.slot_count, dtype=np.int64)
        """Change of the level by the slot's op: its results, less gradients and tangents that are freed after it."""
        self.slot_bytes_saved_in_place = np.zeros(self.slot_count, dtype=np.int64)
        """Bytes of ``slot_op_bytes`` that the op does not need if its first result overwrites an operand."""
        self.slot_runs_in_place = np.zeros(self.slot_count, dtype=bool)
        """Whether the slot's op overwrites an operand that is no forward value."""
        self.slot_op_bytes[0] = self.slot_net_bytes[0] = sum(graph.values[value].bytes for value in self.tangents)
        self.slot_op_bytes[0] += self.outside_memory.loss_bytes
        held_tangents = {value for value in self.tangents if graph.values[value].kept_by_backward}
        # not freed by ops
        fixed = self.resident_values | self.output_bases | kept_by_autograd | gradients | held_tangents
        for value, slot in last_slot.items():
            if value not in fixed and value not in self.row_of_value:
                self.slot_net_bytes[slot] -= graph.values[value].bytes
        self.overwritable_in_slot: list[tuple[int, int]] = []
        """(slot, row) of forward values that a backward op can overwrite with its result."""
        for slot, op in enumerate(graph.backward_ops, 1):
            result_bytes = sum(graph.values[value].bytes for value in op.makes)
            self.slot_op_bytes[slot] = result_bytes + op.discarded + op.scratch
            self.slot_net_bytes[slot] += result_bytes
            if op.makes:
                self.slot_bytes_saved_in_place[slot] = graph.values[op.makes[0]].bytes + op.scratch_saved
                candidates = [v for v in op.overwrites if v not in fixed and v not in self.tangents]
                self.slot_runs_in_place[slot] = any(
                    last_slot[v] == slot for v in candidates if v not in self.row_of_value
                )
                self.overwritable_in_slot += [
                    (slot, self.row_of_value[v]) for v in candidates if v in self.row_of_value
                ]

    def _compute_gradient_returns(self, last_slot: dict[int, int]) -> set[int]:
        """Set ``gradient_returns``, and return the bases of the gradients that autograd keeps as they are.

        ``last_slot``: by value, the slot of its last use in the backward pass.
        """
        graph, choices = self.graph, Choices(gradients=self.gradients)
        gradients_in_base = Counter(graph.base(gradient) for _, gradient in graph.gradients)
        copied_values = copied_gradients(graph, choices)
        returns, bases, kept_by_autograd = list[GradientReturn](), list[int](), set[int]()
        for value, gradient in graph.gradients:
            base, copied_bytes = (
                graph.base(gradient),
                graph.values[value].contiguous_bytes if value in copied_values else 0,
            )
            changed, freed = may_change_after_return(graph, choices, value), frees_gradient(graph, choices, value)
            slot = max(last_slot.get(base, 0), last_slot.get(graph.base(value), 0) if changed else 0)
            if value not in copied_values and not freed:
                kept_by_autograd.add(base)
            updated = self.gradients.updates_early and graph.values[value].kind == "parameter"
            update_bytes = self.outside_memory.update_by_parameter.get(value, 0) + copied_bytes if updated else 0
            kept_copy, parameter = 0 if freed else copied_bytes, graph.base(value) if changed else None
            returns.append(GradientReturn(slot, kept_copy, update_bytes, freed_bytes=0, changing_parameter=parameter))
            bases.append(base)
        # memory that several gradients share is freed with the last return
        last_return = {bases[k]: k for k in sorted(range(len(returns)), key=lambda k: (returns[k].slot, k))}
        for base in last_return.keys() - (self.resident_values | self.output_bases | kept_by_autograd):
            returns[last_return[base]] = replace(returns[last_return[base]], freed_bytes=graph.values[base].bytes)
        self.gradient_returns = tuple(returns)
        delayed = [
            base for base, returned in zip(bases, returns, strict=True) if returned.changing_parameter is not None
        ]
        self.has_delayed_returns = bool(delayed)
        self.has_shared_delayed_returns = any(gradients_in_base[base] > 1 for base in delayed)
        return kept_by_autograd

    # -- forward

    def _build_forward_ops(self) -> None:
        """Set the forward ops, the ops that recompute their results and the decodings of encodings, with values as
        rows."""
        graph = self.graph
        updated = {
            returned.changing_parameter for returned in self.gradient_returns if returned.changing_parameter is not None
        }
        size = {row: int(b) for row, b in enumerate(self.value_bytes)}

        def flat(op: GraphOp) -> ForwardOp:
            """Return an op with its forward values as rows."""
            makes = tuple(self.row_of_value[value] for value in op.makes)
            free_operands = (value for value in op.overwrites if value not in self.output_bases)
            return ForwardOp(
                op,
                makes,
                read_rows=tuple(sorted(self.row_of_value[value] for value in op.reads if value in self.row_of_value)),
                changing_parameters=tuple(value for value in op.reads if value in updated),
                overwritable_rows=tuple(
                    self.row_of_value[value] for value in free_operands if value in self.row_of_value
                ),
                bytes_during=sum(size[row] for row in makes) + op.discarded + op.scratch,
                bytes_saved_in_place=size[makes[0]] + op.scratch_saved if makes else 0,
            )

        self.forward_ops = tuple(flat(op) for op in graph.forward_ops)
        self.recompute_ops = tuple(
            op if op.op.cheaper_recompute is None else flat(op.op.cheaper_recompute) for op in self.forward_ops
        )
        """By forward op: the op that recomputes its results."""
        self.fetch_ops = [flat(self._fetch_op(self.forms[index])) for index in self.encoding_indices]
        """By encoding: its decoding as an op."""
        self.encodings_fetched_with_operands: list[list[tuple[int, int]]] = []
        """By forward op: (form, row) of those encodings of its results whose decoding needs other operands."""
        for op in self.forward_ops:
            forms = [(form, row) for row in op.made_rows for form in self.encodings_of_row.get(row, ())]
            with_operands = [(form, row) for form, row in forms if self.forms[form].fetch_operands]
            self.encodings_fetched_with_operands.append(with_operands)
        self.encodings_fetched_alone: dict[int, list[int]] = {}
        """By row, ascending: the encodings whose decoding needs no other operands."""
        for row, fetchable in self.fetchable_forms_of_row.items():
            encodings = (index for index in fetchable if index in self.encoding_indices)
            fetched_alone = [index for index in encodings if not self.forms[index].fetch_operands]
            if fetched_alone:
                self.encodings_fetched_alone[row] = fetched_alone
        self.returns_of_parameter = defaultdict[int, list[int]](list)
        """Parameter that may change at once -> indices in ``gradient_returns``."""
        for index, returned in enumerate(self.gradient_returns):
            if returned.changing_parameter is not None:
                self.returns_of_parameter[returned.changing_parameter].append(index)

    def _fetch_op(self, form: SavedForm) -> GraphOp:
        """Return the decoding of a value from a saved form as an op, to be treated like its recomputation."""
        return replace(
            self.graph.maker[form.value], reads=form.fetch_operands, makes=(form.value,), discarded=0,
            scratch=form.fetch_scratch, overwrites=(), in_place_scratch=None, seconds=form.fetch_seconds,
        )  # fmt: skip

    def _compute_last_uses(self) -> None:
        """Set the forward op that uses each value last, and the op after which it is freed: later for the new value of
        a buffer, which is written only after the last op that reads the buffer."""
        position = {op.op.index: index for index, op in enumerate(self.forward_ops)}
        last_op = {value: op.op.index for op in self.forward_ops for value in (*op.op.reads, *op.op.makes)}
        self.last_forward_use = np.array([position[last_op[value]] for value in self.forward_values], dtype=np.int64)
        """By row: position of the forward op that uses the value last."""
        self.freed_after_op = self.last_forward_use.copy()
        """By row: position of the forward op after which the value is freed."""
        self.is_written_into_buffer = np.zeros(len(self.forward_values), dtype=bool)
        """By row: whether the value is written into a buffer."""
        for buffer, source in self.graph.mutations:
            base = self.graph.base(source)
            if base in self.row_of_value:
                row = self.row_of_value[base]
                written_after = max(last_op.get(buffer, -1), last_op[base])
                self.freed_after_op[row] = max(self.freed_after_op[row], position[written_after])
                self.is_written_into_buffer[row] = True

    def _collect_readers(self) -> None:
        """List the backward ops that read each forward value, and those that can read an encoding of it instead."""
        readable_forms: dict[tuple[int, int], list[int]] = defaultdict(list)
        """By (op, row): the encodings of the value that the op can read in its place."""
        for index in self.encoding_indices:
            for op in self.forms[index].direct_readers:
                readable_forms[op, self.row_of_form[index]].append(index)
        self.reading_slots: list[list[int]] = [[] for _ in self.forward_values]
        """By row: slots whose backward op has to read the value itself."""
        self.form_readers: list[tuple[int, list[tuple[int, int]]]] = []
        """(slot, [(form, row), ...]) of the encodings that the slot's backward op can read, in the order of its
        reads."""
        for slot, op in enumerate(self.graph.backward_ops, 1):
            rows = [self.row_of_value[value] for value in op.reads if value in self.row_of_value]
            readable = [(index, row) for row in rows for index in readable_forms.get((op.index, row), ())]
            if readable:
                self.form_readers.append((slot, readable))
            for row in rows:
                if (op.index, row) not in readable_forms:
                    self.reading_slots[row].append(slot)

    def _compute_shared_arrays(self) -> None:
        """Compute the arrays that all candidates share."""
        never = np.iinfo(np.int32).max
        self.first_reading_slot = np.array(
            [slots[0] if slots else never for slots in self.reading_slots], dtype=np.int32
        )
        self.last_reading_slot = np.array([slots[-1] if slots else -1 for slots in self.reading_slots], dtype=np.int32)
        """By row: first and last slot whose backward op has to read the value itself; the largest int32 and -1 if none
        has."""
        result_bytes = [sum(int(self.value_bytes[row]) for row in op.made_rows) for op in self.forward_ops]
        self.result_bytes = np.array(result_bytes, dtype=np.int64)
        """By forward op: bytes of all results."""
        self.forward_op_bytes = np.array([op.bytes_during for op in self.forward_ops], dtype=np.int64)
        """By forward op: bytes of all results and scratch."""
        self.overwritable_by_op: list[tuple[int, list[int]]] = []
        """(forward op, rows of the operands that its first result can overwrite, if a candidate frees them there)."""
        for index, op in enumerate(self.forward_ops):
            last_used = [row for row in op.overwritable_rows if self.freed_after_op[row] == index]
            rows = [row for row in last_used if not self.is_written_into_buffer[row]]
            if op.made_rows and rows:
                self.overwritable_by_op.append((index, rows))
        self.rows_by_free = np.argsort(self.freed_after_op, kind="stable")
        """Rows in the order in which the values are freed in the forward pass."""
        self.freeing_ops, self.first_freed_by_op = np.unique(self.freed_after_op[self.rows_by_free], return_index=True)
        """Forward ops after which values are freed, and where those of each begin in ``rows_by_free``."""
        self.returned_net_bytes = np.zeros(self.slot_count, dtype=np.int64)
        """Change of the level by the gradients that are returned in each slot."""
        self.returned_peak_bytes = np.zeros(self.slot_count, dtype=np.int64)
        """Highest level while these are returned, by slot, relative to that before."""
        for returned in self.gradient_returns:
            self.returned_net_bytes[returned.slot] += returned.copied_bytes
            level = self.returned_net_bytes[returned.slot] + returned.update_bytes
            self.returned_peak_bytes[returned.slot] = max(self.returned_peak_bytes[returned.slot], level)
            self.returned_net_bytes[returned.slot] -= returned.freed_bytes

    def _supports_batches(self) -> bool:
        """Return whether the batch evaluator supports the graph.

        It does not support a gradient that is a forward value or an input, delayed gradients that share memory, and
        writes into buffers after backward ops.
        """
        bases = {self.graph.base(gradient) for _, gradient in self.graph.gradients}
        sources = {self.graph.base(source) for _, source in self.graph.mutations}
        has_foreign_gradient = any(value in self.row_of_value or value in self.resident_values for value in bases)
        has_late_write = any(value not in self.row_of_value and value not in self.resident_values for value in sources)
        return not (has_foreign_gradient or has_late_write or self.has_shared_delayed_returns)
