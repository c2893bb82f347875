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
    sum over v of bytes[v] * there[v, j] + (the same of saved forms) <= budget - (other live bytes at j)
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
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.schedule.host_copies import seconds_of
from memplan.planning.search.flat_graph import FlatGraph, Ints

Floats = npt.NDArray[np.float64]


def lower_bound(
    graph: JointGraph, outside_memory: OutsideMemory | None = None, *, gradients: GradientUse = STAYS
) -> int:
    """Return a lower bound in bytes of the peak of every schedule of the graph."""
    outside_memory = OutsideMemory() if outside_memory is None else outside_memory
    return Unavoidable(FlatGraph(graph, outside_memory, gradients)).peak


@dataclass(frozen=True, slots=True)
class Fractions:
    """A solution of the relaxed problem."""

    seconds: float
    keep: Floats
    """By forward value: the share in [0, 1] of it that is live between the forward and the backward pass."""
    forms: Floats
    """By saved form: the share of it that is live then."""


class Unavoidable:
    """Bytes that are live at every position whatever the choices are."""

    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        may_drop = set(flat.drop_rows.tolist())
        self.not_recomputable = np.array([row not in may_drop for row in range(len(flat.values))], dtype=bool)
        """Values that cannot be recomputed."""
        self.smallest = flat.bytes.copy()
        """Bytes of each value's smallest form, itself included."""
        for row, size in zip(flat.form_rows, flat.form_bytes, strict=True):
            self.smallest[row] = min(self.smallest[row], size)
        self._collect_reads()
        self.forward = self._forward_levels()
        """Bytes during each forward op."""
        self.slots, self.end = self._slot_levels()
        """Bytes in each slot of the backward pass, and at the end of the step."""

    @property
    def peak(self) -> int:
        """Return the highest level of all positions."""
        return int(max(self.forward.max(initial=0), self.slots.max(), self.end))

    def _collect_reads(self) -> None:
        """Set the first and last slot in which each value is read, itself or in any form; 0 and -1 if no op reads
        it."""
        flat = self.flat
        readers = [list(slots) for slots in flat.readers]
        self.read = np.array([bool(slots) for slots in readers], dtype=bool)
        self.first = np.array([slots[0] if slots else 0 for slots in readers], dtype=np.int64)
        self.last = np.array([slots[-1] if slots else -1 for slots in readers], dtype=np.int64)
        self.direct: list[list[int]] = [[] for _ in readers]
        """Slots of the ops that read a value or a saved form of it."""
        for slot, candidates in flat.direct:
            for _, row in candidates:
                self.direct[row].append(slot)
        latest = (max([*slots, *direct], default=-1) for slots, direct in zip(readers, self.direct, strict=True))
        self.last_read_in_any_form = np.array(list(latest), dtype=np.int64)
        """Last slot in which each value or a saved form of it is read; -1 where none is."""

    def bytes_already_counted(self, row: int, slot: int, forward: int | None) -> int:
        """Return the bytes that the level of a position already counts for a value that need not be live there: those
        of its smallest form, or 0.

        Args:
            row: of the forward value.
            slot: the position, if ``forward`` is None.
            forward: index of a forward op; None for a slot.
        """
        if forward is not None:
            is_counted = self.not_recomputable[row] and self.last_read_in_any_form[row] >= 0  # it has to be saved
        else:
            waits = self.not_recomputable[row] and self.read[row] and slot < self.first[row]
            is_counted = waits or slot in self.direct[row]
        return int(self.smallest[row]) if is_counted else 0

    def _forward_levels(self) -> Ints:
        """Return, for each forward op, the bytes that are live during it in every schedule.

        After its last reader in the forward pass an output stays live, and of a value that is read in the backward
        pass and cannot be recomputed at least the smallest form.
        """
        flat = self.flat
        is_saved = self.not_recomputable & (self.last_read_in_any_form >= 0) & ~flat.is_output
        still_live = np.where(flat.is_output, flat.bytes, np.where(is_saved, self.smallest, 0))
        level, levels = flat.base, np.zeros(len(flat.forward), dtype=np.int64)
        frees: list[list[int]] = [[] for _ in flat.forward]
        for row, index in enumerate(flat.freed_at):
            frees[index].append(row)
        for index, op in enumerate(flat.forward):
            in_place_saved = max(0, op.in_place_saved) if op.overwrites and op.makes else 0
            levels[index] = level + op.during - in_place_saved
            level += sum(int(flat.bytes[row]) for row in op.makes)
            level -= sum(int(flat.bytes[row] - still_live[row]) for row in frees[index])
        return levels

    def _slot_levels(self) -> tuple[Ints, int]:
        """Return the bytes that are live in every slot whatever the choices are, and those at the end of the step.

        A slot is a backward op with what is recomputed just before for it. The end is that of the backward pass, or the
        optimizer's update.
        """
        flat = self.flat
        level = np.zeros(flat.slots + 1, dtype=np.int64)  # gradients and tangents, before each slot and at the end
        level[1:] = np.cumsum(flat.net)
        for give in flat.gradient_returns:
            # Where the graph is not regular or a recomputed op may read the parameter, the copy may be made later: only
            # at the end it is live for certain.
            level[give.slot + 1 if flat.regular and give.parameter is None else -1 :] += give.copy
            level[give.slot + 1 :] -= give.freed
        values_live = np.zeros(flat.slots + 1, dtype=np.int64)
        """Bytes of forward values: differences between slots, then levels."""
        for row in np.flatnonzero(~flat.is_output):
            first, last = int(self.first[row]), int(self.last[row])
            if self.read[row]:
                if self.not_recomputable[row]:  # in its smallest form until the first read
                    values_live[0] += self.smallest[row]
                    values_live[first] -= self.smallest[row]
                values_live[first] += flat.bytes[row]  # itself between the first and the last read
                values_live[last + 1] -= flat.bytes[row]
        values_live = np.cumsum(values_live)[:-1]
        for row in np.flatnonzero(~flat.is_output):
            for slot in set(self.direct[row]):  # it is read there in any form
                is_counted = self.read[row] and self.first[row] <= slot <= self.last[row]
                waits = self.read[row] and self.not_recomputable[row] and slot < self.first[row]
                if not is_counted and not waits:
                    values_live[slot] += self.smallest[row]
        outputs = int(flat.bytes[flat.is_output].sum())
        self.fixed = flat.base + outputs + level[:-1] + self._fewest_op_bytes()
        end = flat.base + outputs + int(level[-1]) + (0 if flat.gradients.updates else flat.outside_memory.update)
        return self.fixed + values_live, end

    def _fewest_op_bytes(self) -> Ints:
        """Return the fewest bytes of each backward op: in place, and with an encoding as operand, if these are
        possible."""
        flat = self.flat
        in_place = flat.in_place.copy()
        in_place[[slot for slot, _ in flat.overwritten]] = True
        during = flat.during - np.where(in_place, np.maximum(flat.first_result, 0), 0)
        for slot, candidates in flat.direct:
            op = flat.graph.backward_ops[slot - 1]
            scratch = min(flat.forms[index].direct_scratch for index, _ in candidates)
            saved = flat.first_result[slot] - op.scratch_saved if in_place[slot] else 0
            during[slot] = min(during[slot], flat.during[slot] - op.scratch + scratch - saved)
        return during


class Relaxation:
    """The linear program of a graph, for any budget."""

    def __init__(self, flat: FlatGraph, *, small: int = 0, size: int = 8_000) -> None:
        """Values of at most ``small`` bytes are left out. ``size`` roughly bounds the number of variables."""
        self.flat, self.unavoidable, self.small = flat, Unavoidable(flat), small
        self.program = Program()
        self.ops = self.program.variables(op.op.seconds for op in flat.recompute_ops)
        """The first of the variables that say which forward ops run again, in the order of ``flat.recompute_ops``."""
        self.forms = self.program.variables(self._cost_of_form(index) for index in range(len(flat.forms)))
        """The first of the variables that say which forms are used, in the order of ``flat.forms``."""
        self._add_waits_for_copies()
        self.maker = {row: index for index, op in enumerate(flat.forward) for row in op.makes}
        """Row -> index of the forward op that makes the value."""
        self.recomputable = set(flat.drop_rows.tolist())
        """Rows of the values that may be recomputed."""
        room = max(1, size // max(1, len(flat.values) + len(flat.forward)))
        self.keep_variables: dict[int, int] = {}
        """Row -> the variable that says whether the value is live between the passes."""
        self.form_variables: dict[int, int] = {}
        """Form -> the variable that says whether the form is live then."""
        # each adds its variables and conditions to the program
        for slot in self._slots_to_constrain(min(room, 16)):
            _Position(self, slot, forward=None)
        for index in self._forward_ops_to_constrain(min(room // 4, 4)):
            _Position(self, slot=0, forward=index)

    def seconds(self, budget: int) -> Fractions | None:
        """Solve for the fewest seconds that schedules within ``budget`` bytes add; None if there is no solution."""
        if budget < self.unavoidable.peak:
            return None
        solution = self.program.solve(budget)
        if solution is None:
            return None
        seconds, x = solution
        keep = np.ones(len(self.flat.values))
        forms = np.zeros(len(self.flat.forms))
        for row, variable in self.keep_variables.items():
            keep[row] = x[variable]
        for index in self.flat.copied:
            forms[index] = x[self.forms + index]
        for index, variable in self.form_variables.items():
            forms[index] = x[variable]
        return Fractions(max(seconds, 0.0), keep, forms)

    def _add_waits_for_copies(self) -> None:
        """Add the condition that the step waits for copies that are not done by the end of their pass.

        The variable is the wait as a share of the seconds of all copies, as variables are in [0, 1].
        """
        flat = self.flat
        seconds = [seconds_of(flat.forms[index]) for index in flat.copied]
        whole = sum(seconds)
        if not whole:
            return
        copies = [(self.forms + index, -duration) for index, duration in zip(flat.copied, seconds, strict=True)]
        stores = [(self.forms + index, flat.forms[index].store_seconds) for index in flat.plain]
        fetches = [(self.forms + index, flat.forms[index].fetch_seconds) for index in flat.plain]
        again = [(self.ops + index, op.op.seconds) for index, op in enumerate(flat.recompute_ops)]
        passes = ((flat.graph.forward_ops, stores), (flat.graph.backward_ops, [*fetches, *again]))
        for ops, added in passes:
            wait = (self.program.variable(whole), whole)
            self.program.at_least([wait, *copies, *added], -sum(op.seconds for op in ops))

    def _cost_of_form(self, index: int) -> float:
        """Return the seconds that a form adds if it is used: its store, its readers, and its fetch if any op needs the
        value."""
        form = self.flat.forms[index]
        fetched = form.whole and not form.is_copied and self.unavoidable.read[self.flat.form_rows[index]]
        return form.use_seconds + (form.fetch_seconds if fetched else 0.0)

    def _slots_to_constrain(self, count: int) -> list[int]:
        """Return the first slot, and the slots with the highest levels if all values are kept: at most ``count``."""
        flat, unavoidable = self.flat, self.unavoidable
        change = np.zeros(flat.slots + 1, dtype=np.int64)
        for row in np.flatnonzero(unavoidable.read & ~unavoidable.not_recomputable & ~flat.is_output):
            change[0] += flat.bytes[row]
            change[unavoidable.first[row]] -= flat.bytes[row]
        return sorted({0} | _highest(unavoidable.slots + np.cumsum(change)[:-1], count - 1))

    def _forward_ops_to_constrain(self, count: int) -> list[int]:
        """Return the forward ops with the highest levels if all values are kept: at most ``count``."""
        flat, unavoidable = self.flat, self.unavoidable
        change = np.zeros(len(flat.forward) + 1, dtype=np.int64)
        for row in np.flatnonzero(unavoidable.read & ~unavoidable.not_recomputable & ~flat.is_output):
            change[flat.freed_at[row] + 1] += flat.bytes[row]
        return sorted(_highest(unavoidable.forward + np.cumsum(change)[:-1], count))


class _Position:
    """The variables and conditions of a position: a slot, or a forward op."""

    def __init__(self, relaxation: Relaxation, slot: int, forward: int | None) -> None:
        """Add the variables and conditions to the program.

        Args:
            relaxation: of the linear program.
            slot: the slot; 0 for a forward op.
            forward: index of the forward op; None for a slot.
        """
        self.relaxation, self.slot, self.forward = relaxation, slot, forward
        self.main = forward is None and slot == 0
        """Whether this is the position between the passes."""
        self.live: dict[int, int] = {}
        """Row -> variable: the value is live here."""
        self.forms: dict[int, int] = {}
        """Form -> variable: the form is live here."""
        self.recompute_variables: dict[int, int] = {}
        """Op -> variable: the op is recomputed after this position."""
        self.required_operands = set[int]()
        """Forms whose other operands already have conditions."""
        self.sizes: list[tuple[int, int]] = []
        """(variable, bytes that it adds to the level)."""
        flat, unavoidable = relaxation.flat, relaxation.unavoidable
        stack, seen = list[int](), set[int]()
        # what backward ops read after this position must be live, kept in a form, or recomputed
        for row in range(len(flat.values)):
            if self._is_unconditional(row):
                continue
            if unavoidable.read[row] and unavoidable.last[row] > slot:
                self._require(row, user=None, whole=True)
                stack.append(row)
            if unavoidable.direct[row] and max(unavoidable.direct[row]) > slot:
                self._require(row, user=None, whole=False)
                stack.append(row)
        # so must the operands of each op that recomputes or fetches these, if it does, and so on
        while stack:
            row = stack.pop()
            stack += self._require_operands_of_forms(row)
            op = relaxation.maker[row]
            if op in seen or row not in relaxation.recomputable:
                continue
            seen.add(op)
            for read in flat.recompute_ops[op].reads:
                if not self._is_unconditional(read):
                    self._require(read, self._recompute_variable(op), whole=True)
                    stack.append(read)
        # what is live here, with the bytes that are live in any case, fits in the budget
        level = int(unavoidable.slots[slot] if forward is None else unavoidable.forward[forward])
        relaxation.program.limit(self.sizes, level)
        if self.main:
            relaxation.keep_variables, relaxation.form_variables = self.live, self.forms

    def _is_unconditional(self, row: int) -> bool:
        """Return whether a value needs no condition: it is live here whatever the choices are, or assumed to be."""
        flat, unavoidable = self.relaxation.flat, self.relaxation.unavoidable
        if flat.is_output[row] or flat.bytes[row] <= self.relaxation.small:
            return True
        if self.forward is not None:
            return bool(flat.freed_at[row] >= self.forward)
        return bool(unavoidable.read[row] and unavoidable.first[row] <= self.slot <= unavoidable.last[row])

    def _require(self, row: int, user: int | None, *, whole: bool) -> None:
        """Add the condition that a value is live, kept in a form, or recomputed.

        Args:
            row: of the value.
            user: variable of the op or form that needs the value: the condition holds only if it is 1. None: always.
            whole: whether the value itself is needed, not an encoding that it cannot be decoded from.
        """
        relaxation = self.relaxation
        terms = [(self._live_variable(row), 1.0)]
        if row in relaxation.recomputable:
            terms.append((self._recompute_variable(relaxation.maker[row]), 1.0))
        flat = relaxation.flat
        terms += [
            (self._form_variable(index, row), 1.0)
            for index in flat.plain_forms_of.get(row, ())
            if flat.forms[index].whole or not whole
        ]
        terms += [
            (relaxation.forms + index, 1.0) for index in flat.fetchable_forms_of.get(row, ()) if index in flat.copied
        ]
        if user is not None:
            terms.append((user, -1.0))
        relaxation.program.at_least(terms, 1.0 if user is None else 0.0)

    def _require_operands_of_forms(self, row: int) -> list[int]:
        """Add the conditions for the other operands that decode a value, and return the rows of these operands."""
        flat, rows = self.relaxation.flat, list[int]()
        for index in flat.plain_forms_of.get(row, ()):
            form = flat.forms[index]
            if index not in self.forms or index in self.required_operands or not form.whole or form.direct:
                continue  # a form with direct readers may be kept for them alone
            self.required_operands.add(index)
            for read in flat.fetch_ops[index].reads:
                if not self._is_unconditional(read):
                    self._require(read, self.forms[index], whole=True)
                    rows.append(read)
        return rows

    def _live_variable(self, row: int) -> int:
        """Return the variable that says whether a value is live at this position; it is added when first needed."""
        if row not in self.live:
            self.live[row] = self.relaxation.program.variable(cost=0.0)
            bytes_already_counted = self.relaxation.unavoidable.bytes_already_counted(row, self.slot, self.forward)
            self.sizes.append((self.live[row], int(self.relaxation.flat.bytes[row]) - bytes_already_counted))
        return self.live[row]

    def _recompute_variable(self, op: int) -> int:
        """Return the variable that says whether an op is recomputed after this position; it is added when first
        needed, with the condition that the op's seconds count then."""
        if self.main:
            return self.relaxation.ops + op
        if op not in self.recompute_variables:
            self.recompute_variables[op] = self.relaxation.program.variable(cost=0.0)
            self.relaxation.program.at_least(
                [(self.relaxation.ops + op, 1.0), (self.recompute_variables[op], -1.0)], 0.0
            )
        return self.recompute_variables[op]

    def _form_variable(self, index: int, row: int) -> int:
        """Return the variable that says whether an encoding of a value is live at this position.

        It is added when first needed, with the condition that the encoding's seconds count then. ``index``: of the
        form; ``row``: of the value.
        """
        if index not in self.forms:
            self.forms[index] = self.relaxation.program.variable(cost=0.0)
            self.relaxation.program.at_least([(self.relaxation.forms + index, 1.0), (self.forms[index], -1.0)], 0.0)
            bytes_already_counted = self.relaxation.unavoidable.bytes_already_counted(row, self.slot, self.forward)
            self.sizes.append(
                (self.forms[index], int(self.relaxation.unavoidable.smallest[row]) - bytes_already_counted)
            )
        return self.forms[index]


class Program:
    """A linear program over variables in [0, 1], built condition by condition."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        """By variable."""
        self.rows: list[tuple[list[tuple[int, float]], float]] = []
        """Terms (variable, coefficient), and the least value of their sum."""
        self.limits: list[tuple[list[tuple[int, int]], int]] = []
        """Terms (variable, bytes), and the other live bytes."""

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
        self.rows.append((terms, value))

    def limit(self, terms: list[tuple[int, int]], level: int) -> None:
        """Add a condition: the bytes of ``terms``, each (variable, bytes), plus ``level`` are within the budget."""
        self.limits.append((terms, level))

    def solve(self, budget: int) -> tuple[float, Floats] | None:
        """Minimize the cost under a budget. Return the cost and the values of the variables; None if there is no
        solution."""
        from scipy import sparse
        from scipy.optimize import linprog

        if any(level > budget for _, level in self.limits):
            return None
        demands, lower, limits, unit = self._matrices
        right = np.array([(budget - level) / unit for _, level in self.limits])
        solution = linprog(
            self.costs,
            A_ub=sparse.vstack([demands, limits]),
            b_ub=np.concatenate([lower, right]),
            bounds=(0, 1),
            method="highs",
        )
        return (float(solution.fun), np.asarray(solution.x)) if solution.status == 0 else None

    @cached_property
    def _matrices(self) -> tuple[Any, Floats, Any, float]:
        """Both kinds of conditions as `<=`: coefficients and right sides of `at_least`, coefficients of `limit`, and
        their unit.

        Bytes are in units of the largest value, for the solver's numerical stability.
        """
        unit = float(max((size for terms, _ in self.limits for _, size in terms), default=1) or 1)
        demands = _sparse([[(column, -entry) for column, entry in terms] for terms, _ in self.rows], len(self.costs))
        limits = _sparse([[(c, size / unit) for c, size in terms] for terms, _ in self.limits], len(self.costs))
        return demands, np.array([-value for _, value in self.rows]), limits, unit


def _sparse(rows: list[list[tuple[int, float]]], columns: int) -> Any:
    """Return the terms (column, entry) of each row as a sparse matrix."""
    from scipy import sparse

    index = [row for row, terms in enumerate(rows) for _ in terms]
    flat = [term for terms in rows for term in terms]
    entries = ([entry for _, entry in flat], (index, [column for column, _ in flat]))
    return sparse.csr_matrix(entries, shape=(len(rows), columns))


def _highest(levels: Ints, count: int) -> set[int]:
    """Split the levels into ``count`` parts and return the index of the highest level in each."""
    if not len(levels) or count < 1:
        return set()
    parts = np.array_split(np.arange(len(levels)), min(count, len(levels)))
    return {int(part[np.argmax(levels[part])]) for part in parts}
