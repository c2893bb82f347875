"""Lower bounds of the peak, and of the seconds that a schedule within a budget adds.

Both follow from properties of every schedule. Take a position of the backward pass, the run of op j.

- Memory that does not depend on the choices is live: resident values, the outputs, gradients that are made and not yet
  given, the op's own results and scratch (less its first result, if that can overwrite an operand).
- A forward value that the backward pass reads at or before j and at or after j is live: it is recomputed at most once,
  and lives until its last use. A value that cannot be recomputed and is read at or after j is live, too; if it can be
  kept in another form, at least that form is (a form in host memory takes no bytes on the device).

These two, and the live ranges of the forward pass (a value lives from its op to the last op that reads it), give
`lower_bound`.

For the seconds, take variables for every forward value v and op o, and for some positions j: whether the value is live
at j (``there[v, j]``), whether the op runs again after j (``again[o, j]``), whether a saved form is live at j
(``form[v, j]``) and whether the value is kept as a copy in host memory (``copy[v]``). Every schedule has

    there[v, j] + again[op of v, j] + form[v, j] + copy[v] >= 1             for v read by the backward pass after j
    there[u, j] + again[op of u, j] + form[u, j] + copy[u] >= again[o, j]   for u read by an op o
    sum over v of bytes[v] * there[v, j] + (the same for saved forms) <= budget - (other live bytes at j)
    again[o] >= again[o, j]
    wait + seconds of a pass, with those it adds >= sum of the seconds of all copies of the pass

and adds at least the seconds of all o with ``again[o]``, and the waits of both passes. With all of them in [0, 1]
instead of {0, 1}, the smallest sum is the optimum of a linear program, and so a lower bound of the seconds that any
schedule within the budget adds (`Relaxation`). It holds for any set of positions; fewer positions make it lower. Values
of few bytes are assumed to be live at all positions, at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.schedule.host_copies import copy_seconds_of
from memplan.planning.search.flat_graph import FlatGraph, Ints

Floats = npt.NDArray[np.float64]


def lower_bound(
    graph: JointGraph, outside_memory: OutsideMemory | None = None, *, gradients: GradientUse = KEPT_UNTIL_UPDATE
) -> int:
    """Return a lower bound in bytes of the peak of every schedule of the graph."""
    outside_memory = OutsideMemory() if outside_memory is None else outside_memory
    return Unavoidable(FlatGraph(graph, outside_memory, gradients)).peak


@dataclass(frozen=True, slots=True)
class Fractions:
    """A solution of the relaxed problem."""

    seconds: float
    """Seconds added: no schedule within the budget adds fewer."""
    live_share: Floats
    """By forward value: the share in [0, 1] of it that is live between the forward and the backward pass."""
    live_share_of_form: Floats
    """By saved form: the share in [0, 1] of it that is live then."""


class Unavoidable:
    """Bytes that are live at every position whatever the choices are.

    Positions are the forward ops and the slots of the backward pass: a slot is a backward op with what is recomputed
    and fetched just before it. A value's forms are the ways to save it: as it is, encoded, or as a copy in host memory,
    which takes no bytes on the device. Arrays by value are in the order of ``flat.forward_values``.
    """

    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        recomputable_rows = set(flat.recomputable_rows.tolist())
        self.not_recomputable = np.array(
            [row not in recomputable_rows for row in range(len(flat.forward_values))], dtype=bool
        )
        """By value: whether it cannot be recomputed."""
        self.smallest_form_bytes = flat.value_bytes.copy()
        """By value: bytes of its smallest form, itself included."""
        for row, size in zip(flat.row_of_form, flat.encoded_bytes, strict=True):
            self.smallest_form_bytes[row] = min(self.smallest_form_bytes[row], size)
        self._collect_reads()  # sets the attributes on when the backward pass reads each value
        self.forward_levels = self._forward_levels()
        """Bytes during each forward op."""
        self.slot_levels, self.end_level = self._slot_levels()
        """Bytes in each slot of the backward pass, and at the end of the step."""

    @property
    def peak(self) -> int:
        """Return the highest level of all positions."""
        return int(max(self.forward_levels.max(initial=0), self.slot_levels.max(), self.end_level))

    def _collect_reads(self) -> None:
        """Set when the backward pass reads each value."""
        flat = self.flat
        reading_slots = [list(slots) for slots in flat.reading_slots]  # of ops that have to read the value itself
        self.is_read = np.array([bool(slots) for slots in reading_slots], dtype=bool)
        """By value: whether any backward op has to read the value itself."""
        self.first_reading_slot = np.array([slots[0] if slots else 0 for slots in reading_slots], dtype=np.int64)
        self.last_reading_slot = np.array([slots[-1] if slots else -1 for slots in reading_slots], dtype=np.int64)
        """By value: first and last slot in which an op has to read the value itself; 0 and -1 if none has."""
        self.slots_reading_any_form: list[list[int]] = [[] for _ in reading_slots]
        """By value: slots of the ops that read either the value or a saved form of it."""
        for slot, readable in flat.form_readers:
            for _, row in readable:
                self.slots_reading_any_form[row].append(slot)
        all_slots = zip(reading_slots, self.slots_reading_any_form, strict=True)
        latest = [max([*slots, *either], default=-1) for slots, either in all_slots]
        self.last_read_in_any_form = np.array(latest, dtype=np.int64)
        """By value: last slot in which the value or a saved form of it is read; -1 where none is."""

    def bytes_already_counted(self, row: int, slot: int, forward_op: int | None) -> int:
        """Return the bytes that the level of a position already counts for a value that need not be live there: those
        of its smallest form, or 0.

        Args:
            row: of the forward value.
            slot: the position, if ``forward_op`` is None.
            forward_op: the position, if it is a forward op: its index. None for a slot.
        """
        if forward_op is not None:
            is_counted = self.not_recomputable[row] and self.last_read_in_any_form[row] >= 0  # it has to be saved
        else:
            is_saved_for_later = (
                self.not_recomputable[row] and self.is_read[row] and slot < self.first_reading_slot[row]
            )
            is_counted = is_saved_for_later or slot in self.slots_reading_any_form[row]
        return int(self.smallest_form_bytes[row]) if is_counted else 0

    def _forward_levels(self) -> Ints:
        """Return, for each forward op, the bytes that are live during it in every schedule.

        After its last reader in the forward pass an output stays live, and of a value that is read in the backward
        pass and cannot be recomputed at least the smallest form.
        """
        flat = self.flat
        is_saved = self.not_recomputable & (self.last_read_in_any_form >= 0) & ~flat.is_output
        bytes_saved = np.where(is_saved, self.smallest_form_bytes, 0)
        bytes_staying = np.where(flat.is_output, flat.value_bytes, bytes_saved)
        level, levels = flat.always_live_bytes, np.zeros(len(flat.forward_ops), dtype=np.int64)
        last_used_by: list[list[int]] = [[] for _ in flat.forward_ops]
        for row, index in enumerate(flat.freed_after_op):
            last_used_by[index].append(row)
        for index, op in enumerate(flat.forward_ops):
            in_place_saved = max(0, op.bytes_saved_in_place) if op.overwritable_rows and op.made_rows else 0
            levels[index] = level + op.bytes_during - in_place_saved
            level += sum(int(flat.value_bytes[row]) for row in op.made_rows)
            level -= sum(int(flat.value_bytes[row] - bytes_staying[row]) for row in last_used_by[index])
        return levels

    def _slot_levels(self) -> tuple[Ints, int]:
        """Return the bytes that are live in every slot whatever the choices are, and those at the end of the step: at
        the end of the backward pass, or during the optimizer's update."""
        flat = self.flat
        level = np.zeros(flat.slot_count + 1, dtype=np.int64)  # gradients and tangents, before each slot and at the end
        level[1:] = np.cumsum(flat.slot_net_bytes)
        for returned in flat.gradient_returns:
            # Where the graph does not support batches or a recomputed op may read the parameter, the copy may be made
            # later: only at the end it is live for certain.
            copied_in_slot = flat.supports_batches and returned.changing_parameter is None
            level[returned.slot + 1 if copied_in_slot else -1 :] += returned.copied_bytes
            level[returned.slot + 1 :] -= returned.freed_bytes
        values_live = np.zeros(flat.slot_count + 1, dtype=np.int64)
        """Bytes of forward values: differences between slots, then levels."""
        for row in np.flatnonzero(~flat.is_output):
            first, last = int(self.first_reading_slot[row]), int(self.last_reading_slot[row])
            if self.is_read[row]:
                if self.not_recomputable[row]:  # in its smallest form until the first read
                    values_live[0] += self.smallest_form_bytes[row]
                    values_live[first] -= self.smallest_form_bytes[row]
                values_live[first] += flat.value_bytes[row]  # itself between the first and the last read
                values_live[last + 1] -= flat.value_bytes[row]
        values_live = np.cumsum(values_live)[:-1]
        for row in np.flatnonzero(~flat.is_output):
            first, last = self.first_reading_slot[row], self.last_reading_slot[row]
            for slot in set(self.slots_reading_any_form[row]):  # at least the value's smallest form is live
                is_itself_live = self.is_read[row] and first <= slot <= last
                is_saved_for_later = self.is_read[row] and self.not_recomputable[row] and slot < first
                if not is_itself_live and not is_saved_for_later:
                    values_live[slot] += self.smallest_form_bytes[row]
        outputs = int(flat.value_bytes[flat.is_output].sum())
        without_values = flat.always_live_bytes + outputs + level[:-1] + self._fewest_op_bytes()
        # an update in the backward pass is part of its slots
        update_bytes = 0 if flat.gradients.updates_early else flat.outside_memory.update_bytes
        at_end = flat.always_live_bytes + outputs + int(level[-1]) + update_bytes
        return without_values + values_live, at_end

    def _fewest_op_bytes(self) -> Ints:
        """Return the fewest bytes of results and scratch of the backward op of each slot: in place, and with an
        encoding as operand, if these are possible."""
        flat = self.flat
        in_place = flat.slot_runs_in_place.copy()
        in_place[[slot for slot, _ in flat.overwritable_in_slot]] = True
        fewest = flat.slot_op_bytes - np.where(in_place, np.maximum(flat.slot_bytes_saved_in_place, 0), 0)
        for slot, readable in flat.form_readers:
            op = flat.graph.backward_ops[slot - 1]  # slot 0 has no backward op
            form_scratch = min(flat.forms[index].direct_reader_scratch for index, _ in readable)
            # an op that reads an encoding saves the memory of its result in place, but no scratch
            saved = flat.slot_bytes_saved_in_place[slot] - op.scratch_saved if in_place[slot] else 0
            fewest[slot] = min(fewest[slot], flat.slot_op_bytes[slot] - op.scratch + form_scratch - saved)
        return fewest


class Relaxation:
    """The linear program of a graph, for any budget."""

    def __init__(self, flat: FlatGraph, *, small_bytes: int = 0, variable_limit: int = 8_000) -> None:
        """Values of at most ``small_bytes`` bytes are left out. ``variable_limit`` roughly bounds the number of
        variables.

        In the program, variables are known by their indices.
        """
        self.flat, self.unavoidable, self.small_bytes = flat, Unavoidable(flat), small_bytes
        self.program = Program()
        self.first_op_variable = self.program.variables(op.op.seconds for op in flat.recompute_ops)
        """The first of the variables that say which forward ops run again, in the order of ``flat.recompute_ops``."""
        self.first_form_variable = self.program.variables(self._cost_of_form(index) for index in range(len(flat.forms)))
        """The first of the variables that say which forms are used, in the order of ``flat.forms``."""
        self._add_waits_for_copies()
        self.op_of_row = {row: index for index, op in enumerate(flat.forward_ops) for row in op.made_rows}
        """Row of a value -> position of the forward op that makes it."""
        self.recomputable_rows = set(flat.recomputable_rows.tolist())
        """Rows of the values that may be recomputed."""
        variables_of_position = len(flat.forward_values) + len(flat.forward_ops)
        positions = max(1, variable_limit // max(1, variables_of_position))
        self.live_variables: dict[int, int] = {}
        """Row -> the variable that says whether the value is live between the passes."""
        self.form_variables: dict[int, int] = {}
        """Form -> the variable that says whether the form is live then."""
        # each adds its variables and conditions to the program
        for slot in self._slots_to_constrain(count=min(positions, 16)):
            _Position(self, slot, forward_op=None)
        for index in self._forward_ops_to_constrain(count=min(positions // 4, 4)):
            _Position(self, slot=0, forward_op=index)

    def seconds(self, budget: int) -> Fractions | None:
        """Solve for the fewest seconds that schedules within ``budget`` bytes add; None if there is no solution."""
        if budget < self.unavoidable.peak:
            return None
        solution = self.program.solve(budget)
        if solution is None:
            return None
        seconds, value_of = solution  # the value of each variable
        live_shares = np.ones(len(self.flat.forward_values))  # values without a variable are live at all positions
        form_shares = np.zeros(len(self.flat.forms))
        for row, variable in self.live_variables.items():
            live_shares[row] = value_of[variable]
        for index in self.flat.host_copy_indices:
            form_shares[index] = value_of[self.first_form_variable + index]
        for index, variable in self.form_variables.items():
            form_shares[index] = value_of[variable]
        return Fractions(max(seconds, 0.0), live_shares, form_shares)

    def _add_waits_for_copies(self) -> None:
        """Add the condition that the step waits for copies that are not done by the end of their pass.

        For each pass: wait + seconds of the pass, with those that recomputations and encodings add, >= seconds of all
        copies. The variable is the wait as a share of the seconds of all copies, as variables are in [0, 1].
        """
        flat = self.flat
        copy_seconds = [copy_seconds_of(flat.forms[index]) for index in flat.host_copy_indices]
        total = sum(copy_seconds)
        if not total:
            return
        first_op, first_form = self.first_op_variable, self.first_form_variable
        seconds_by_copy = zip(flat.host_copy_indices, copy_seconds, strict=True)
        copies = [(first_form + index, -seconds) for index, seconds in seconds_by_copy]
        stores = [(first_form + index, flat.forms[index].store_seconds) for index in flat.encoding_indices]
        fetches = [(first_form + index, flat.forms[index].fetch_seconds) for index in flat.encoding_indices]
        recomputed = [(first_op + index, op.op.seconds) for index, op in enumerate(flat.recompute_ops)]
        passes = ((flat.graph.forward_ops, stores), (flat.graph.backward_ops, [*fetches, *recomputed]))
        for ops, added in passes:
            wait = (self.program.variable(cost=total), total)
            self.program.at_least([wait, *copies, *added], -sum(op.seconds for op in ops))

    def _cost_of_form(self, index: int) -> float:
        """Return the seconds that a form adds if it is used: its store, its readers, and its fetch if any op needs the
        value."""
        form = self.flat.forms[index]
        fetched = (
            form.can_restore_value and not form.is_copied and self.unavoidable.is_read[self.flat.row_of_form[index]]
        )
        return form.use_seconds + (form.fetch_seconds if fetched else 0.0)

    def _slots_to_constrain(self, count: int) -> list[int]:
        """Return the first slot, and the slots with the highest levels if all values are saved: at most ``count``."""
        flat, unavoidable = self.flat, self.unavoidable
        change = np.zeros(flat.slot_count + 1, dtype=np.int64)
        for row in np.flatnonzero(unavoidable.is_read & ~unavoidable.not_recomputable & ~flat.is_output):
            change[0] += flat.value_bytes[row]  # saved until the first read, from where `unavoidable` counts it
            change[unavoidable.first_reading_slot[row]] -= flat.value_bytes[row]
        return sorted({0} | _highest(unavoidable.slot_levels + np.cumsum(change)[:-1], count - 1))

    def _forward_ops_to_constrain(self, count: int) -> list[int]:
        """Return the forward ops with the highest levels if all values are saved: at most ``count``."""
        flat, unavoidable = self.flat, self.unavoidable
        change = np.zeros(len(flat.forward_ops) + 1, dtype=np.int64)
        for row in np.flatnonzero(unavoidable.is_read & ~unavoidable.not_recomputable & ~flat.is_output):
            # saved, after `unavoidable` counts it no more
            change[flat.freed_after_op[row] + 1] += flat.value_bytes[row]
        return sorted(_highest(unavoidable.forward_levels + np.cumsum(change)[:-1], count))


class _Position:
    """The variables and conditions of a position of the step: a slot of the backward pass, or a forward op.

    A slot is a backward op with what is recomputed and fetched just before it; a row is the number of a forward value.
    """

    def __init__(self, relaxation: Relaxation, slot: int, forward_op: int | None) -> None:
        """Add the variables and conditions to the program.

        Args:
            relaxation: of the linear program.
            slot: the slot; 0 for a forward op.
            forward_op: index of the forward op; None for a slot.
        """
        self.relaxation, self.slot, self.forward_op = relaxation, slot, forward_op
        self.is_between_passes = forward_op is None and slot == 0
        """Whether this is the position between the passes."""
        self.live_variables: dict[int, int] = {}
        """Row -> variable: the value is live here."""
        self.form_variables: dict[int, int] = {}
        """Form -> variable: the form is live here."""
        self.recompute_variables: dict[int, int] = {}
        """Op -> variable: the op is recomputed after this position."""
        self.forms_with_operands = set[int]()
        """Forms for whose other operands there are conditions."""
        self.variable_bytes: list[tuple[int, int]] = []
        """(variable, bytes that it adds to the level)."""
        flat, unavoidable = relaxation.flat, relaxation.unavoidable
        needed_rows, seen_ops = list[int](), set[int]()
        # what backward ops read after this position must be live, kept in a form, or recomputed
        for row in range(len(flat.forward_values)):
            if self._is_unconditional(row):
                continue
            if unavoidable.is_read[row] and unavoidable.last_reading_slot[row] > slot:
                self._require(row, user=None, whole=True)
                needed_rows.append(row)
            if unavoidable.slots_reading_any_form[row] and max(unavoidable.slots_reading_any_form[row]) > slot:
                self._require(row, user=None, whole=False)
                needed_rows.append(row)
        # so must the operands of each op that recomputes or fetches these, if it does, and so on
        while needed_rows:
            row = needed_rows.pop()
            needed_rows += self._require_operands_of_forms(row)
            op = relaxation.op_of_row[row]
            if op in seen_ops or row not in relaxation.recomputable_rows:
                continue
            seen_ops.add(op)
            for operand in flat.recompute_ops[op].read_rows:
                if not self._is_unconditional(operand):
                    self._require(operand, user=self._recompute_variable(op), whole=True)
                    needed_rows.append(operand)
        # what is live here, with the bytes that are live in any case, fits in the budget
        level = int(unavoidable.slot_levels[slot] if forward_op is None else unavoidable.forward_levels[forward_op])
        relaxation.program.limit(self.variable_bytes, level)
        if self.is_between_passes:
            relaxation.live_variables, relaxation.form_variables = self.live_variables, self.form_variables

    def _is_unconditional(self, row: int) -> bool:
        """Return whether a value needs no condition: it is live here whatever the choices are, or assumed to be."""
        flat, unavoidable = self.relaxation.flat, self.relaxation.unavoidable
        if flat.is_output[row] or flat.value_bytes[row] <= self.relaxation.small_bytes:
            return True
        if self.forward_op is not None:
            return bool(flat.freed_after_op[row] >= self.forward_op)
        return bool(
            unavoidable.is_read[row]
            and unavoidable.first_reading_slot[row] <= self.slot <= unavoidable.last_reading_slot[row]
        )

    def _require(self, row: int, user: int | None, *, whole: bool) -> None:
        """Add the condition that a value is live, saved in a form, or recomputed: the sum of these variables is 1 or
        more.

        Args:
            row: of the value.
            user: variable of the op or form that needs the value: the condition holds only if it is 1. None: always.
            whole: whether the value itself is needed, not an encoding that it cannot be decoded from.
        """
        relaxation, flat = self.relaxation, self.relaxation.flat
        variables = [self._live_variable(row)]
        if row in relaxation.recomputable_rows:
            variables.append(self._recompute_variable(relaxation.op_of_row[row]))
        encodings = (
            index for index in flat.encodings_of_row.get(row, ()) if flat.forms[index].can_restore_value or not whole
        )
        variables += [self._form_variable(index, row) for index in encodings]
        variables += [
            relaxation.first_form_variable + index
            for index in flat.fetchable_forms_of_row.get(row, ())
            if index in flat.host_copy_indices
        ]
        terms = [(variable, 1.0) for variable in variables]
        if user is None:
            relaxation.program.at_least(terms, 1.0)
        else:
            relaxation.program.at_least([*terms, (user, -1.0)], 0.0)

    def _require_operands_of_forms(self, row: int) -> list[int]:
        """Add the conditions for the other operands that decode a value, and return the rows of these operands."""
        flat, operand_rows = self.relaxation.flat, list[int]()
        for index in flat.encodings_of_row.get(row, ()):
            form = flat.forms[index]
            if index not in self.form_variables or index in self.forms_with_operands:
                continue
            if not form.can_restore_value or form.direct_readers:
                continue  # a form with direct readers may be kept for them alone
            self.forms_with_operands.add(index)
            for operand in flat.fetch_ops[index].read_rows:
                if not self._is_unconditional(operand):
                    self._require(operand, user=self.form_variables[index], whole=True)
                    operand_rows.append(operand)
        return operand_rows

    def _live_variable(self, row: int) -> int:
        """Return the variable that says whether a value is live at this position; it is added when first needed."""
        if row not in self.live_variables:
            variable = self.live_variables[row] = self.relaxation.program.variable(cost=0.0)
            self._add_bytes(variable, row, int(self.relaxation.flat.value_bytes[row]))
        return self.live_variables[row]

    def _recompute_variable(self, op: int) -> int:
        """Return the variable that says whether an op is recomputed after this position; it is added when first
        needed, with the condition that the op's seconds count then."""
        recomputed_at_all = self.relaxation.first_op_variable + op
        if self.is_between_passes:  # all recomputations come after it
            return recomputed_at_all
        if op not in self.recompute_variables:
            variable = self.recompute_variables[op] = self.relaxation.program.variable(cost=0.0)
            self.relaxation.program.at_least([(recomputed_at_all, 1.0), (variable, -1.0)], 0.0)
        return self.recompute_variables[op]

    def _form_variable(self, index: int, row: int) -> int:
        """Return the variable that says whether an encoding of a value is live at this position.

        It is added when first needed, with the condition that the encoding's seconds count then. ``index``: of the
        form; ``row``: of the value.
        """
        if index not in self.form_variables:
            variable = self.form_variables[index] = self.relaxation.program.variable(cost=0.0)
            used_at_all = self.relaxation.first_form_variable + index
            self.relaxation.program.at_least([(used_at_all, 1.0), (variable, -1.0)], 0.0)
            self._add_bytes(variable, row, int(self.relaxation.unavoidable.smallest_form_bytes[row]))
        return self.form_variables[index]

    def _add_bytes(self, variable: int, row: int, size: int) -> None:
        """Count ``size`` bytes for a variable of a value, less those that the level of this position has already."""
        counted = self.relaxation.unavoidable.bytes_already_counted(row, self.slot, self.forward_op)
        self.variable_bytes.append((variable, size - counted))


class Program:
    """A linear program over variables in [0, 1], built condition by condition."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        """By variable: the coefficient in the sum that is minimized."""
        self.conditions: list[tuple[list[tuple[int, float]], float]] = []
        """Conditions of `at_least`: terms (variable, coefficient), and the least value of their sum."""
        self.budget_conditions: list[tuple[list[tuple[int, int]], int]] = []
        """Conditions of `limit`: terms (variable, bytes), and the other live bytes."""

    def variable(self, cost: float) -> int:
        """Add a variable and return its index."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def variables(self, costs: Iterable[float]) -> int:
        """Add a variable for each cost and return the index of the first."""
        first = len(self.costs)
        self.costs += costs
        return first

    def at_least(self, terms: list[tuple[int, float]], value: float) -> None:
        """Add a condition: the sum of ``terms``, each (variable, coefficient), is at least ``value``."""
        self.conditions.append((terms, value))

    def limit(self, terms: list[tuple[int, int]], level: int) -> None:
        """Add a condition: the bytes of ``terms``, each (variable, bytes), plus ``level`` are within the budget."""
        self.budget_conditions.append((terms, level))

    def solve(self, budget: int) -> tuple[float, Floats] | None:
        """Minimize the cost under a budget. Return the cost and the values of the variables; None if there is no
        solution."""
        from scipy import sparse
        from scipy.optimize import linprog

        if any(level > budget for _, level in self.budget_conditions):
            return None
        demand_matrix, demand_bounds, limit_matrix, unit = self._matrices
        limit_bounds = np.array([(budget - level) / unit for _, level in self.budget_conditions])
        solution = linprog(
            self.costs,
            A_ub=sparse.vstack([demand_matrix, limit_matrix]),
            b_ub=np.concatenate([demand_bounds, limit_bounds]),
            bounds=(0, 1),
            method="highs",
        )
        solved = solution.status == 0
        return (float(solution.fun), np.asarray(solution.x)) if solved else None

    @cached_property
    def _matrices(self) -> tuple[Any, Floats, Any, float]:
        """Both kinds of conditions as `<=`: coefficients and right sides of `at_least`, coefficients of `limit`, and
        their unit.

        Bytes are in units of the largest value, for the solver's numerical stability.
        """
        unit = float(max((size for terms, _ in self.budget_conditions for _, size in terms), default=1) or 1)
        demand_matrix = _sparse(
            [[(column, -entry) for column, entry in terms] for terms, _ in self.conditions], len(self.costs)
        )
        limit_matrix = _sparse(
            [[(c, size / unit) for c, size in terms] for terms, _ in self.budget_conditions], len(self.costs)
        )
        return demand_matrix, np.array([-value for _, value in self.conditions]), limit_matrix, unit


def _sparse(rows: list[list[tuple[int, float]]], columns: int) -> Any:
    """Return the terms (column, entry) of each row as a sparse matrix with this number of columns."""
    from scipy import sparse

    row_indices = [row for row, terms in enumerate(rows) for _ in terms]
    all_terms = [term for terms in rows for term in terms]
    column_indices, entries = [column for column, _ in all_terms], [entry for _, entry in all_terms]
    return sparse.csr_matrix((entries, (row_indices, column_indices)), shape=(len(rows), columns))


def _highest(levels: Ints, count: int) -> set[int]:
    """Split the levels into ``count`` parts and return the index of the highest level in each."""
    if not len(levels) or count < 1:
        return set()
    parts = np.array_split(np.arange(len(levels)), min(count, len(levels)))
    return {int(part[np.argmax(levels[part])]) for part in parts}
