"""A joint graph as flat lists and arrays, for the batch evaluator.

Forward values have numbers of their own ("rows"), in the order of their ids. The backward pass is a sequence of
*slots*: in slot 0 the tangents are received; slot j is the j-th backward op, with everything that is recomputed or
fetched just before it. A complete gradient is *given*: handed to autograd or to the optimizer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, SavedForm, recomputable
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import base_level
from memplan.planning.schedule.scheduler import changed_at_once, copied_gradients, frees_gradient

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GradientReturn:
    """The hand-over of a complete gradient."""

    slot: int
    """Slot after whose backward op it happens, unless a recomputed op reads the parameter later."""
    copy: int
    """Bytes of the gradient's copy that the receiver keeps."""
    transient: int
    """Bytes that the optimizer allocates during its update."""
    freed: int
    """Bytes of the gradient that are freed afterwards."""
    parameter: int | None
    """The parameter, if it may change at once: then its last read has to come before. None if it does not change."""


@dataclass(frozen=True, slots=True)
class ForwardOp:
    """A forward op, its values as rows."""

    op: GraphOp
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    """Rows of the forward values it reads, ascending."""
    parameters: tuple[int, ...]
    """Parameters that the op reads and that may change once their gradient is returned."""
    overwrites: tuple[int, ...]
    """Operands in whose memory it can compute."""
    during: int
    """Bytes of all its results and its scratch."""
    in_place_saved: int
    """Bytes less if its first result overwrites an operand."""


class FlatGraph:
    """The graph with a fixed use of its gradients, as arrays."""

    def __init__(self, graph: JointGraph, outside_memory: OutsideMemory, gradients: GradientUse = STAYS) -> None:
        self.graph, self.outside_memory, self.gradients = graph, outside_memory, gradients
        self.base = base_level(graph, Choices(gradients=gradients), outside_memory)
        """Bytes that are live during the whole step."""
        self.outputs = {graph.base(value) for value in graph.outputs}
        """Values that own the memory of the step's outputs."""
        self.resident = {value.id for value in graph.values if value.kind in RESIDENT}
        """Values of parameters, buffers, inputs and constants."""
        self.tangents = {value.id for value in graph.values if value.kind == "tangent"}
        """Gradients of the outputs."""
        # forward values, and which of them may be recomputed
        self.values = sorted(value for op in graph.forward_ops for value in op.makes)
        """By row: the forward value."""
        self.row = {value: row for row, value in enumerate(self.values)}
        """By forward value: its row."""
        self.bytes = np.array([graph.values[value].bytes for value in self.values], dtype=np.int64)
        """By row."""
        self.is_output = np.array([value in self.outputs for value in self.values], dtype=bool)
        """By row."""
        can_rerun = recomputable(graph)
        self.droppable = tuple(value for value in self.values if value in can_rerun)
        """Forward values that may be recomputed."""
        self.drop_rows = np.array([self.row[value] for value in self.droppable], dtype=np.int64)
        """Their rows."""
        # forms in which they may be saved
        self.forms = tuple(form for form in graph.ranked_forms if form.value not in self.outputs)
        """Saved forms by rank: copies last."""
        self.form_rows = [self.row[form.value] for form in self.forms]
        """By form: the row of its value."""
        self.form_bytes = [graph.values[form.encoded].bytes for form in self.forms]
        """By form: bytes of the encoding."""
        self.copied = range(sum(not form.is_copied for form in self.forms), len(self.forms))
        """Indices of the forms that are copies to host memory."""
        self.plain = range(self.copied.start)
        """Indices of the other forms."""
        self.plain_forms_of: dict[int, list[int]] = defaultdict(list)
        """By row: its plain forms."""
        self.fetchable_forms_of: dict[int, list[int]] = defaultdict(list)
        """By row, ascending: the forms, copies included, that the value can be fetched from. The first chosen form is
        used."""
        for index, row in sorted(enumerate(self.form_rows), key=lambda item: (item[1], item[0])):
            if index in self.plain:
                self.plain_forms_of[row].append(index)
            if self.forms[index].whole:
                self.fetchable_forms_of[row].append(index)
        # ops, and when they read and write which values
        self.gradient_returns: tuple[GradientReturn, ...] = ()
        self.has_delayed_returns = False
        """Whether any give waits for the last read of its parameter."""
        self._compute_backward_constants()
        self._build_forward_ops()
        self._compute_last_uses()
        self._collect_readers()
        self.maker = np.array([0] * len(self.values), dtype=np.int64)
        """By row: the forward op that makes the value."""
        for index, op in enumerate(self.forward):
            self.maker[list(op.makes)] = index
        self._compute_shared_arrays()
        self.regular = self._is_regular()
        """Whether candidates can be evaluated in batches; see `_is_regular`."""

    # -- backward

    def _compute_backward_constants(self) -> None:
        """Set the bytes of gradients, tangents and the results of backward ops by slot, which do not depend on the
        choices.

        A slot is a backward op with what is recomputed just before for it; slot 0 receives the tangents.
        """
        graph = self.graph
        self.slots = len(graph.backward_ops) + 1
        last = dict.fromkeys(self.tangents, 0)  # by value: the slot of its last use
        for slot, op in enumerate(graph.backward_ops, 1):
            last.update((value, slot) for value in (*op.reads, *op.makes))
        staying = self._compute_gradient_returns(last)
        gradients = {graph.base(gradient) for _, gradient in graph.gradients}
        self.during = np.zeros(self.slots, dtype=np.int64)
        self.net = np.zeros(self.slots, dtype=np.int64)
        self.first_result = np.zeros(self.slots, dtype=np.int64)
        self.in_place = np.zeros(self.slots, dtype=bool)
        """Whether the slot's op overwrites an operand that is no forward value."""
        self.during[0] = self.net[0] = sum(graph.values[value].bytes for value in self.tangents)
        self.during[0] += self.outside_memory.loss_bytes
        fixed = self.resident | self.outputs | staying | gradients | {v for v in self.tangents if graph.values[v].held}
        for value, slot in last.items():
            if value not in fixed and value not in self.row:
                self.net[slot] -= graph.values[value].bytes
        self.overwritten: list[tuple[int, int]] = []
        """(slot, row) of forward values that a backward op can overwrite with its result."""
        for slot, op in enumerate(graph.backward_ops, 1):
            result_bytes = sum(graph.values[value].bytes for value in op.makes)
            self.during[slot] = result_bytes + op.discarded + op.scratch
            self.net[slot] += result_bytes
            if op.makes:
                self.first_result[slot] = graph.values[op.makes[0]].bytes + op.scratch_saved
                candidates = [v for v in op.overwrites if v not in fixed and v not in self.tangents]
                self.in_place[slot] = any(last[v] == slot for v in candidates if v not in self.row)
                self.overwritten += [(slot, self.row[v]) for v in candidates if v in self.row]

    def _compute_gradient_returns(self, last: dict[int, int]) -> set[int]:
        """Set ``gradient_returns``, and return the bases of the gradients that autograd keeps.

        ``last``: by value, the slot of its last use in the backward pass.
        """
        graph, choices = self.graph, Choices(gradients=self.gradients)
        users = Counter(graph.base(gradient) for _, gradient in graph.gradients)
        copies = copied_gradients(graph, choices)
        returns, bases, staying = list[GradientReturn](), list[int](), set[int]()
        for of, gradient in graph.gradients:
            base, copied_bytes = graph.base(gradient), graph.values[of].own_bytes if of in copies else 0
            changed, freed = changed_at_once(graph, choices, of), frees_gradient(graph, choices, of)
            slot = max(last.get(base, 0), last.get(graph.base(of), 0) if changed else 0)
            if of not in copies and not freed:
                staying.add(base)
            updated = self.gradients.updates and graph.values[of].kind == "parameter"
            transient = self.outside_memory.update_by_parameter.get(of, 0) + copied_bytes if updated else 0
            kept_copy, parameter = 0 if freed else copied_bytes, graph.base(of) if changed else None
            returns.append(GradientReturn(slot, kept_copy, transient, freed=0, parameter=parameter))
            bases.append(base)
        # memory that several gradients share is freed with the last return
        final = {bases[k]: k for k in sorted(range(len(returns)), key=lambda k: (returns[k].slot, k))}
        for base in final.keys() - (self.resident | self.outputs | staying):
            returns[final[base]] = replace(returns[final[base]], freed=graph.values[base].bytes)
        self.gradient_returns = tuple(returns)
        delayed = [base for base, give in zip(bases, returns, strict=True) if give.parameter is not None]
        self.has_delayed_returns = bool(delayed)
        self.has_shared_delayed_returns = any(users[base] > 1 for base in delayed)
        return staying

    # -- forward

    def _build_forward_ops(self) -> None:
        """Set the forward ops, the ops that recompute their results and the decodings of encodings, with values as
        rows."""
        graph = self.graph
        updated = {give.parameter for give in self.gradient_returns if give.parameter is not None}
        size = {row: int(b) for row, b in enumerate(self.bytes)}

        def flat(op: GraphOp) -> ForwardOp:
            """Return an op with its forward values as rows."""
            makes = tuple(self.row[value] for value in op.makes)
            free_operands = (value for value in op.overwrites if value not in self.outputs)
            return ForwardOp(
                op,
                makes,
                reads=tuple(sorted(self.row[value] for value in op.reads if value in self.row)),
                parameters=tuple(value for value in op.reads if value in updated),
                overwrites=tuple(self.row[value] for value in free_operands if value in self.row),
                during=sum(size[row] for row in makes) + op.discarded + op.scratch,
                in_place_saved=size[makes[0]] + op.scratch_saved if makes else 0,
            )

        self.forward = tuple(flat(op) for op in graph.forward_ops)
        self.recompute_ops = tuple(
            op if op.op.cheaper_recompute is None else flat(op.op.cheaper_recompute) for op in self.forward
        )
        """By forward op: the op that recomputes its results."""
        self.fetch_ops = [flat(self._fetch_op(self.forms[index])) for index in self.plain]
        """By plain form: its fetch as an op."""
        self.operand_fetches_at: list[list[tuple[int, int]]] = []
        """By forward op: (form, row) of those forms of its results whose fetch needs other operands."""
        for op in self.forward:
            forms = [(form, row) for row in op.makes for form in self.plain_forms_of.get(row, ())]
            self.operand_fetches_at.append([(form, row) for form, row in forms if self.forms[form].also_reads])
        self.simple_fetches_of: dict[int, list[int]] = {}
        """By row, ascending: the plain forms whose fetch needs no other operands."""
        for row, fetchable in self.fetchable_forms_of.items():
            simple = [index for index in fetchable if index in self.plain and not self.forms[index].also_reads]
            if simple:
                self.simple_fetches_of[row] = simple
        self.returns_of = defaultdict[int, list[int]](list)
        """Parameter -> indices of its gives."""
        for index, give in enumerate(self.gradient_returns):
            if give.parameter is not None:
                self.returns_of[give.parameter].append(index)

    def _fetch_op(self, form: SavedForm) -> GraphOp:
        """Return the decoding of a value from a saved form as an op, to be treated like its recomputation."""
        scratch, maker = form.fetch_scratch, self.graph.maker[form.value]
        return replace(
            maker, reads=form.also_reads, makes=(form.value,), discarded=0, scratch=scratch, overwrites=(),
            scratch_into=None, seconds=form.fetch_seconds,
        )  # fmt: skip

    def _compute_last_uses(self) -> None:
        """Set the forward op that uses each value last, and the op after which it is freed: writes into buffers come
        later."""
        position = {op.op.index: index for index, op in enumerate(self.forward)}
        last = {value: op.op.index for op in self.forward for value in (*op.op.reads, *op.op.makes)}
        self.used_last = np.array([position[last[value]] for value in self.values], dtype=np.int64)
        self.freed_at = self.used_last.copy()
        self.written = np.zeros(len(self.values), dtype=bool)
        for target, source in self.graph.mutations:
            base = self.graph.base(source)
            if base in self.row:
                row = self.row[base]
                after = max(last.get(target, -1), last[base])
                self.freed_at[row] = max(self.freed_at[row], position[after])
                self.written[row] = True

    def _collect_readers(self) -> None:
        """List the backward ops that read each forward value, and ops that can read an encoding of it instead."""
        readers_of_form: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in self.plain:
            for op in self.forms[index].direct:
                readers_of_form[op, self.form_rows[index]].append(index)
        self.readers: list[list[int]] = [[] for _ in self.values]
        self.direct: list[tuple[int, list[tuple[int, int]]]] = []
        """(slot, [(form, row), ...] in the order of the op's reads)."""
        for slot, op in enumerate(self.graph.backward_ops, 1):
            rows = [self.row[value] for value in op.reads if value in self.row]
            direct = [(index, row) for row in rows for index in readers_of_form.get((op.index, row), ())]
            if direct:
                self.direct.append((slot, direct))
            for row in rows:
                if (op.index, row) not in readers_of_form:
                    self.readers[row].append(slot)

    def _compute_shared_arrays(self) -> None:
        """Compute the arrays that all candidates share."""
        none = np.iinfo(np.int32).max
        self.first_read = np.array([slots[0] if slots else none for slots in self.readers], dtype=np.int32)
        self.last_read = np.array([slots[-1] if slots else -1 for slots in self.readers], dtype=np.int32)
        """By row: first and last slot whose backward op reads the value."""
        result_bytes = [sum(int(self.bytes[row]) for row in op.makes) for op in self.forward]
        self.result_bytes = np.array(result_bytes, dtype=np.int64)
        """By forward op."""
        self.forward_during = np.array([op.during for op in self.forward], dtype=np.int64)
        self.forward_overwrites: list[tuple[int, list[int]]] = []
        """(forward op, rows of the operands that its first result can overwrite, if a candidate frees them there)."""
        for index, op in enumerate(self.forward):
            rows = [row for row in op.overwrites if self.freed_at[row] == index and not self.written[row]]
            if op.makes and rows:
                self.forward_overwrites.append((index, rows))
        self.by_freed = np.argsort(self.freed_at, kind="stable")
        """Rows in the order in which the values are freed in the forward pass."""
        self.freed_positions, self.freed_starts = np.unique(self.freed_at[self.by_freed], return_index=True)
        """Forward ops after which values are freed, and where those of each begin in ``by_freed``."""
        self.returns_net = np.zeros(self.slots, dtype=np.int64)
        """Change of the level by the gradients that are returned in each slot."""
        self.returns_peak = np.zeros(self.slots, dtype=np.int64)
        """Highest level while these are returned, by slot."""
        for give in self.gradient_returns:
            self.returns_net[give.slot] += give.copy
            level = self.returns_net[give.slot] + give.transient
            self.returns_peak[give.slot] = max(self.returns_peak[give.slot], level)
            self.returns_net[give.slot] -= give.freed

    def _is_regular(self) -> bool:
        """Return whether the batch evaluator supports the graph.

        It does not support a gradient that is a forward value or an input, delayed gradients that share memory, and
        writes into buffers after backward ops.
        """
        bases = {self.graph.base(gradient) for _, gradient in self.graph.gradients}
        sources = {self.graph.base(source) for _, source in self.graph.mutations}
        has_foreign_gradient = any(value in self.row or value in self.resident for value in bases)
        has_late_write = any(value not in self.row and value not in self.resident for value in sources)
        return not (has_foreign_gradient or has_late_write or self.has_shared_delayed_returns)
