"""Compute the bytes of many candidates at every position of the step, and their added seconds.

A forward pass over the ops counts the bytes of recomputed values within their slots; cumulative sums over slots give
the levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_copies import NEVER
from memplan.planning.search.batch_needs import Needs
from memplan.planning.search.candidates import Columns, Levels
from memplan.planning.search.flat_graph import FlatGraph, ForwardOp, Ints


class Batch(Needs):
    """Counts bytes and seconds of many candidates in a single pass over the graph. ``index``: of an op, a saved form or
    a return of a gradient; ``row``: of a forward value."""

    def __init__(self, flat: FlatGraph, columns: Columns) -> None:
        """Compute what each candidate needs, and begin to count its bytes and seconds."""
        super().__init__(flat, columns)
        count = self.count
        self.seconds = np.zeros(count)
        """By candidate: seconds that recomputations, encodings and copies add to the step."""
        self.slot_level = np.zeros((flat.slots, count), dtype=np.int64)
        """By slot: bytes allocated minus bytes freed so far, before its backward op."""
        self.slot_peak = np.zeros((flat.slots, count), dtype=np.int64)
        """By slot: the highest such level so far."""
        self.storing = np.zeros((len(flat.forward), count))
        """By forward op: seconds of storing saved forms after it. Read only to compute waits for host copies."""
        self.spent = np.zeros((flat.slots, count))
        """By slot: seconds of its recomputed ops and fetches. Counted only where there are host copies."""

    def run(self) -> Levels:
        """Return the bytes at every position and the added seconds."""
        flat = self.flat
        forward, boundary = self._forward()
        self._recompute()
        slots, end = self._backward(boundary)
        update = end if flat.gradients.updates else end + flat.outside_memory.update
        if self.copies is not None:
            self.seconds += self.copies.use_seconds + self.copies.waits(self.storing, self.spent)
        return Levels(forward, slots, update, self.seconds, self.needed)

    # -- forward pass

    def _forward(self) -> tuple[Ints, Ints]:
        """Return the highest level during each forward op, and the level at the end of the pass, by candidate."""
        flat = self.flat
        freed = ~self.saved_as_is & ~flat.is_output[:, None]
        net = np.repeat(flat.result_bytes[:, None], self.count, axis=1)  # by op: change of the level
        if len(flat.values):  # less the values that are freed after each op
            freed_bytes = np.where(freed, flat.bytes[:, None], 0)[flat.by_freed]
            net[flat.freed_positions] -= np.add.reduceat(freed_bytes, flat.freed_starts, axis=0)
        for index in flat.plain:
            net[flat.used_last[flat.form_rows[index]]] += self.used[index] * flat.form_bytes[index]
        after = flat.base + np.cumsum(net, axis=0)
        leaving = None
        if self.copies is not None:
            copying, leaving = self.copies.live_in_forward(len(after))
            after += copying - leaving
            net += np.diff(copying - leaving, axis=0, prepend=0)
        during = after - net + flat.forward_during[:, None]
        for index, over in flat.forward_overwrites:
            during[index] -= self._can_overwrite(over, freed) * flat.forward[index].in_place_saved
        if leaving is not None:
            np.maximum(during, after + leaving, out=during, where=leaving > 0)
        self._store(during, after, freed, leaving)
        end = after[-1] if len(after) else np.full(self.count, flat.base, dtype=np.int64)
        return during, end

    def _can_overwrite(self, rows: Sequence[int], freed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each candidate whether the memory of any of these operands (rows) is free for the op's result."""
        free = np.zeros(self.count, dtype=bool)
        for row in rows:
            here = freed[row]
            for index in self.flat.plain_forms_of.get(row, ()):  # it is encoded after the op
                here = here & ~self.used[index]
            if self.copies is not None:  # its copy to the host may not be done
                here = here & ~self.copies.uses(row)
            free |= here
        return free

    def _store(self, during: Ints, after: Ints, freed: npt.NDArray[np.bool_], leaving: Ints | None) -> None:
        """Raise the levels in ``during`` to those while encodings are stored, each after the last op that reads its
        value.

        Args:
            during: highest level during each forward op, by candidate; changed in place.
            after: level after each forward op.
            freed: whether each value is freed in the forward pass.
            leaving: bytes that each op frees because their copy to the host is done; None without copies.
        """
        flat = self.flat
        due: dict[int, list[int]] = {}  # encodings by the forward op after which they are stored
        for index in flat.plain:
            due.setdefault(int(flat.used_last[flat.form_rows[index]]), []).append(index)
        for position, forms in due.items():  # from the last store back to the first
            later = np.zeros(self.count, dtype=np.int64)
            """Change of the level between this store and the end of the position."""
            # values whose copy to the host is done, and those written into buffers, are freed after all stores
            if leaving is not None:
                later -= leaving[position]
            for row in np.flatnonzero(flat.written & (flat.freed_at == position)):
                later -= freed[row] * flat.bytes[row]
            stored_later: dict[int, Any] = {}
            """By row: which candidates store another form of the value after this form."""
            for index in sorted(forms, key=lambda number: -flat.forms[number].encoded):
                form, row, used = flat.forms[index], flat.form_rows[index], self.used[index]
                if not flat.written[row]:  # the value is freed after its last store, unless it is copied, too
                    here = freed[row] & used & ~stored_later.get(row, np.False_)
                    later -= (here if self.copies is None else here & ~self.copies.uses(row)) * flat.bytes[row]
                    stored_later[row] = stored_later.get(row, np.False_) | used
                level = after[position] - later + form.store_scratch
                np.maximum(during[position], level, out=during[position], where=used)
                later += used * flat.form_bytes[index]
                self.seconds += used * form.use_seconds
                self.storing[position] += used * form.store_seconds

    # -- recomputation

    def _recompute(self) -> None:
        """Count the bytes of all that the backward pass recomputes or decodes, and those that each slot's backward op
        frees.

        The first are counted in the slot of the op that needs them. A slot is a backward op with what runs just before
        for it.
        """
        flat = self.flat
        self.fetched = np.zeros((len(flat.plain), self.count), dtype=bool)
        self.frees = np.zeros((flat.slots, self.count), dtype=np.int64)
        """Bytes of forward values and saved forms that each slot's backward op frees."""
        if self.copies is not None:
            self.slot_level += self.copies.allocated_in_backward(flat.slots)
            np.maximum(self.slot_peak, self.slot_level, out=self.slot_peak)
        for index, op in enumerate(flat.recompute_ops):
            if any(row in self.recomputed_in for row in op.makes):
                self._recompute_op(index)
            for form, row in flat.operand_fetches_at[index]:
                if form in self.fetched_in:
                    self._fetch_with_operands(index, form, row)
        for row, forms in flat.simple_fetches_of.items():
            for index in forms:
                self._fetch(index, row, np.flatnonzero(self.used[index] & self.needed[row] & ~self.fetched[index]))
        # values that a slot's backward op, at the last position of the slot, is the last to read
        read_by_backward_op = self.last % self.slot_size == self.slot_size - 1
        rows, columns = np.nonzero(read_by_backward_op & self.needed & ~flat.is_output[:, None])
        slots = self.last[rows, columns] // self.slot_size
        self.frees += np.bincount(
            slots * self.count + columns, weights=flat.bytes[rows], minlength=self.frees.size
        ).reshape(self.frees.shape).astype(np.int64)  # fmt: skip

    def _recompute_op(self, index: int) -> None:
        """Run a forward op in every slot in which it is recomputed: in several if its results are needed in different
        slots.

        ``index``: position of the op in the forward pass.
        """
        op = self.flat.recompute_ops[index]
        slots = [(row, self.recomputed_in[row]) for row in op.makes if row in self.recomputed_in]
        for k, (_, slot) in enumerate(slots):
            here = slot < NEVER
            for _, before in slots[:k]:  # it runs there already, for an earlier result
                here &= before != slot
            columns = np.flatnonzero(here)
            if len(columns):
                wanted = [(row, other[columns] == slot[columns]) for row, other in slots]
                self._run_in_slots(index, op, slot[columns], columns, wanted)

    def _fetch_with_operands(self, index: int, form: int, row: int) -> None:
        """Decode a value from a form that needs other operands, and free the form if no op reads it later.

        Args:
            index: position in the forward pass of the op that computes the value: it is decoded in its place.
            form: index of the form.
            row: of the value.
        """
        columns = np.flatnonzero(self.fetched_in[form] < NEVER)
        slot = self.fetched_in[form][columns]
        self._run_in_slots(index, self.flat.fetch_ops[form], slot, columns, [(row, np.ones(len(columns), dtype=bool))])
        self._free_form(form, slot.astype(np.int64), columns)
        self.fetched[form][columns] = True

    def _free_form(self, index: int, slot: Ints, columns: Ints) -> None:
        """Free a saved form right after its value is decoded, unless a later op reads the form and frees it then.

        Args:
            index: of the form.
            slot: in which the value is decoded, by candidate of ``columns``.
            columns: the candidates that decode it.
        """
        freed = self.flat.form_bytes[index] * (self.last_direct[index][columns] < slot * self.slot_size)
        self.slot_level[slot, columns] -= freed

    def _run_in_slots(
        self, index: int, op: ForwardOp, slot: Ints, columns: Ints, wanted: Sequence[tuple[int, npt.NDArray[np.bool_]]]
    ) -> None:
        """Run a recomputed op or a decoding in a slot of some candidates: decode its operands first, then add its bytes
        to the slot's level and peak, and its seconds.

        Args:
            index: of the forward op in whose place it runs.
            op: the op.
            slot: the slot, by candidate.
            columns: the candidates.
            wanted: rows of the results, each with the candidates that need it.
        """
        flat = self.flat
        for row in op.reads:
            for form in flat.simple_fetches_of.get(row, ()):
                due = self.formed[form][columns] & ~self.fetched[form][columns] & (self.first[row][columns] == slot)
                self._fetch(form, row, columns[due])
        levels, peaks = self.slot_level.ravel(), self.slot_peak.ravel()
        place = slot.astype(np.int64) * self.count + columns  # index in the flattened arrays
        position = slot * self.slot_size + index
        level = levels[place]
        frees = np.zeros(len(columns), dtype=np.int64)  # bytes of operands that are read for the last time
        in_place = np.zeros(len(columns), dtype=bool)
        for row in op.reads:
            if not flat.is_output[row]:
                ends = self.last[row][columns] == position
                frees += ends * flat.bytes[row]
                if row in op.overwrites:
                    in_place |= ends
        first = op.makes[0]
        during = level + op.during
        if in_place.any():
            for row, want in wanted:
                if row == first:
                    during -= (in_place & want) * op.in_place_saved
        peaks[place] = np.maximum(peaks[place], during)
        allocated = sum((want * flat.bytes[row] for row, want in wanted), np.zeros(len(columns), dtype=np.int64))
        levels[place] = level + allocated - frees
        self.seconds[columns] += op.op.seconds
        if self.copies is not None:
            self.spent.ravel()[place] += op.op.seconds
        for parameter in op.parameters:
            for give in flat.returns_of[parameter]:
                self._return_delayed_gradient(give, parameter, position, place, columns)

    def _return_delayed_gradient(self, index: int, parameter: int, position: Ints, place: Ints, columns: Ints) -> None:
        """Return a parameter's gradient for the candidates in which this recomputed op is the last to read the
        parameter.

        Args:
            index: of the return in ``flat.gradient_returns``.
            parameter: id of the parameter.
            position: of the recomputed op in the backward pass, by candidate of ``columns``.
            place: of its slot in the flattened arrays, by candidate of ``columns``.
            columns: the candidates that recompute it.
        """
        give = self.flat.gradient_returns[index]
        here = (self.parameter_last[parameter][columns] == position) & (position > self._backward_position(index))
        levels, peaks, place = self.slot_level.ravel(), self.slot_peak.ravel(), place[here]
        levels[place] += give.copy
        peaks[place] = np.maximum(peaks[place], levels[place] + give.transient)
        levels[place] -= give.freed

    def _backward_position(self, index: int) -> int:
        """Return the position of the backward op after which gradient ``index`` is returned if nothing delays that."""
        return self.flat.gradient_returns[index].slot * self.slot_size + self.slot_size - 1

    def _fetch(self, index: int, row: int, columns: Ints) -> None:
        """Decode a value from a form that needs no other operands, just before the value is read.

        Args:
            index: of the form.
            row: of the value.
            columns: the candidates that decode it.
        """
        if not len(columns):
            return
        form, levels, peaks = self.flat.forms[index], self.slot_level.ravel(), self.slot_peak.ravel()
        slot = self.first[row][columns].astype(np.int64)
        place, size = slot * self.count + columns, int(self.flat.bytes[row])
        peaks[place] = np.maximum(peaks[place], levels[place] + size + form.fetch_scratch)
        levels[place] += size
        self._free_form(index, slot, columns)
        self.fetched[index][columns] = True
        self.seconds[columns] += form.fetch_seconds
        if self.copies is not None:
            self.spent.ravel()[place] += form.fetch_seconds

    # -- backward pass

    def _backward(self, boundary: Ints) -> tuple[Ints, Ints]:
        """Return the highest level in each slot, and the level at the end of the pass, by candidate.

        A slot is a backward op with what runs just before for it. ``boundary``: level between the passes.
        """
        flat = self.flat
        for index in flat.plain:
            direct = self.last_direct[index]
            ends = direct >= 0
            if flat.forms[index].whole:
                # If the value is decoded no later than the form's last reader, that reader frees the form.
                row = flat.form_rows[index]
                ends &= ~self.needed[row] | (direct >= self.first[row].astype(np.int64) * self.slot_size)
            columns = np.flatnonzero(ends)
            self.frees[direct[columns] // self.slot_size, columns] += flat.form_bytes[index]
        in_place = np.repeat(flat.in_place[:, None], self.count, axis=1)  # whether each slot's op runs in place
        for slot, row in flat.overwritten:  # also over a forward value that it is the last to read
            in_place[slot] |= self.last[row] == slot * self.slot_size + self.slot_size - 1
        gives_net, gives_peak = self._gradient_return_levels()
        net = self.slot_level + flat.net[:, None] - self.frees
        end = boundary + np.cumsum(net + gives_net, axis=0)
        begin = end - net - gives_net
        in_place_saved = flat.first_result[:, None] - self.direct_saved
        run = self.slot_level + flat.during[:, None] + self.slot_scratch - in_place * in_place_saved
        slots = begin + np.maximum(np.maximum(self.slot_peak, run), net + gives_peak)
        return slots, end[-1]

    def _gradient_return_levels(self) -> tuple[Ints, Ints]:
        """Return, by slot, the change of the level by returned gradients, and the highest level while they are
        returned.

        A slot is a backward op with what runs just before for it.
        """
        flat = self.flat
        if not flat.has_delayed_returns:
            return flat.returns_net[:, None], flat.returns_peak[:, None]
        net = np.zeros((flat.slots, self.count), dtype=np.int64)
        peak = np.zeros((flat.slots, self.count), dtype=np.int64)
        for index, give in enumerate(flat.gradient_returns):
            here = np.ones(self.count, dtype=bool)
            if give.parameter is not None:  # else it is returned after a recomputed op that reads the parameter
                here = self.parameter_last[give.parameter] <= self._backward_position(index)
            net[give.slot] += here * give.copy
            level = net[give.slot] + give.transient
            np.maximum(peak[give.slot], level, out=peak[give.slot], where=here)
            net[give.slot] -= here * give.freed
        return net, peak
