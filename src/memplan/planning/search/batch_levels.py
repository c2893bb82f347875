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
    """Counts bytes and seconds of many candidates in a single pass over the graph.

    A *row* is the number of a forward value, a *form* a way to save it. A *slot* is a backward op with what is
    recomputed and fetched just before it; its level is counted from the slot's beginning. ``index``: number of an op, a
    form or the return of a gradient.
    """

    def __init__(self, flat: FlatGraph, columns: Columns) -> None:
        """Compute what each candidate needs, and begin to count its bytes and seconds."""
        super().__init__(flat, columns)
        count = self.candidate_count
        self.seconds = np.zeros(count)
        """By candidate: seconds that recomputations, encodings and copies add to the step."""
        self.slot_level = np.zeros((flat.slot_count, count), dtype=np.int64)
        """(slot, candidate): bytes that recomputations and fetches of the slot have allocated so far, less those that
        they have freed."""
        self.slot_peak = np.zeros((flat.slot_count, count), dtype=np.int64)
        """(slot, candidate): the highest such level so far, with what ops and fetches allocate while they run."""
        self.store_seconds = np.zeros((len(flat.forward_ops), count))
        """(forward op, candidate): seconds of encoding values after it. Read only to compute waits for host copies."""
        self.recompute_seconds = np.zeros((flat.slot_count, count))
        """(slot, candidate): seconds of its recomputed ops and decodings. Counted only where there are host copies."""

    def run(self) -> Levels:
        """Return the bytes at every position and the added seconds."""
        flat = self.flat
        forward, boundary = self._forward()
        self._recompute()
        slots, end = self._backward(boundary)
        update = end if flat.gradients.updates_early else end + flat.outside_memory.update_bytes
        if self.host_copies is not None:
            self.seconds += self.host_copies.added_seconds + self.host_copies.waits(
                self.store_seconds, self.recompute_seconds
            )
        return Levels(forward, slots, update, self.seconds, self.is_needed)

    # -- forward pass

    def _forward(self) -> tuple[Ints, Ints]:
        """Return the highest level during each forward op, and the level at the end of the pass, by candidate."""
        flat = self.flat
        freed = ~self.saved_as_is & ~flat.is_output[:, None]  # which values are freed in the forward pass
        net = np.repeat(flat.result_bytes[:, None], self.candidate_count, axis=1)  # by op: change of the level
        if len(flat.forward_values):  # less the values that are freed after each op
            freed_bytes = np.where(freed, flat.value_bytes[:, None], 0)[flat.rows_by_free]
            net[flat.freeing_ops] -= np.add.reduceat(freed_bytes, flat.first_freed_by_op, axis=0)
        for index in flat.encoding_indices:  # plus encodings, stored after the last op that uses the value
            stored_after = flat.last_forward_use[flat.row_of_form[index]]
            net[stored_after] += self.saves_encoding[index] * flat.encoded_bytes[index]
        after = flat.always_live_bytes + np.cumsum(net, axis=0)
        copied_bytes_freed = None
        if self.host_copies is not None:
            copied_bytes_live, copied_bytes_freed = self.host_copies.live_in_forward(len(after))
            change = copied_bytes_live - copied_bytes_freed
            after += change
            net += np.diff(change, axis=0, prepend=0)
        during = after - net + flat.forward_op_bytes[:, None]  # the level before each op, and what the op allocates
        for index, operands in flat.overwritable_by_op:
            during[index] -= self._can_overwrite(operands, freed) * flat.forward_ops[index].bytes_saved_in_place
        if copied_bytes_freed is not None:  # after an op, until the copies that end there are done
            np.maximum(during, after + copied_bytes_freed, out=during, where=copied_bytes_freed > 0)
        self._store(during, after, freed, copied_bytes_freed)
        end = after[-1] if len(after) else np.full(self.candidate_count, flat.always_live_bytes, dtype=np.int64)
        return during, end

    def _can_overwrite(self, rows: Sequence[int], freed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each candidate whether an op's result can overwrite any of these operands.

        Args:
            rows: of the operands, none of which a later op of the forward pass uses.
            freed: (row, candidate): whether the value is freed in the forward pass.
        """
        can_overwrite = np.zeros(self.candidate_count, dtype=bool)
        for row in rows:
            is_free = freed[row]
            for index in self.flat.encodings_of_row.get(row, ()):  # it is encoded after the op
                is_free = is_free & ~self.saves_encoding[index]
            if self.host_copies is not None:  # its copy to the host may not be done
                is_free = is_free & ~self.host_copies.uses(row)
            can_overwrite |= is_free
        return can_overwrite

    def _store(self, during: Ints, after: Ints, freed: npt.NDArray[np.bool_], copied_bytes_freed: Ints | None) -> None:
        """Raise the levels in ``during`` to those while encodings are stored, and count the seconds of these. An
        encoding is stored after the last op of the forward pass that uses its value.

        Args:
            during: (forward op, candidate): highest level during the op; changed in place.
            after: (forward op, candidate): level after the op, its stores and frees.
            freed: (row, candidate): whether the value is freed in the forward pass.
            copied_bytes_freed: (forward op, candidate): bytes freed after the op because their copy to the host is
                done; None without copies.
        """
        flat = self.flat
        stored_after: dict[int, list[int]] = {}  # encodings by the forward op after which they are stored
        for index in flat.encoding_indices:
            stored_after.setdefault(int(flat.last_forward_use[flat.row_of_form[index]]), []).append(index)
        for position, forms in stored_after.items():  # from the last store back to the first, as `after` is known
            later_change = np.zeros(self.candidate_count, dtype=np.int64)
            """Change of the level between this store and the end of the position."""
            # values whose copy to the host is done, and those written into buffers, are freed after all stores
            if copied_bytes_freed is not None:
                later_change -= copied_bytes_freed[position]
            for row in np.flatnonzero(flat.is_written_into_buffer & (flat.freed_after_op == position)):
                later_change -= freed[row] * flat.value_bytes[row]
            stored_later: dict[int, Any] = {}
            """By row: which candidates store another form of the value after this form."""
            for index in sorted(forms, key=lambda number: -flat.forms[number].encoded):  # the scheduler stores by id
                form, row, used = flat.forms[index], flat.row_of_form[index], self.saves_encoding[index]
                # the value is freed after its last store, unless it is copied, too
                if not flat.is_written_into_buffer[row]:
                    is_freed = freed[row] & used & ~stored_later.get(row, np.False_)
                    if self.host_copies is not None:
                        is_freed = is_freed & ~self.host_copies.uses(row)
                    later_change -= is_freed * flat.value_bytes[row]
                    stored_later[row] = stored_later.get(row, np.False_) | used
                level = after[position] - later_change + form.store_scratch
                np.maximum(during[position], level, out=during[position], where=used)
                later_change += used * flat.encoded_bytes[index]
                self.seconds += used * form.use_seconds
                self.store_seconds[position] += used * form.store_seconds

    # -- recomputation

    def _recompute(self) -> None:
        """Count what the backward pass recomputes and decodes, in the slot that needs it, and what backward ops
        free."""
        flat = self.flat
        self.is_fetched = np.zeros((len(flat.encoding_indices), self.candidate_count), dtype=bool)
        """(encoding, candidate): whether its decoding was counted already."""
        self.freed_by_slot = np.zeros((flat.slot_count, self.candidate_count), dtype=np.int64)
        """(slot, candidate): bytes of forward values and saved forms that the slot's backward op frees."""
        if self.host_copies is not None:
            self.slot_level += self.host_copies.allocated_in_backward(flat.slot_count)
            np.maximum(self.slot_peak, self.slot_level, out=self.slot_peak)
        for index, op in enumerate(flat.recompute_ops):  # within a slot, in the order of the forward pass
            if any(row in self.recompute_slots for row in op.made_rows):
                self._recompute_op(index)
            for form, row in flat.encodings_fetched_with_operands[index]:
                if form in self.fetch_slots:
                    self._fetch_with_operands(index, form, row)
        # the other values are decoded for the backward op itself
        for row, forms in flat.encodings_fetched_alone.items():
            for index in forms:
                due = self.saves_encoding[index] & self.is_needed[row] & ~self.is_fetched[index]
                self._fetch(index, row, np.flatnonzero(due))
        # values that a slot's backward op, at the last position of the slot, is the last to read
        read_by_backward_op = self.last_needed_position % self.positions_per_slot == self.positions_per_slot - 1
        rows, columns = np.nonzero(read_by_backward_op & self.is_needed & ~flat.is_output[:, None])
        slots = self.last_needed_position[rows, columns] // self.positions_per_slot
        self.freed_by_slot += np.bincount(  # sums the bytes by (slot, candidate)
            slots * self.candidate_count + columns, weights=flat.value_bytes[rows], minlength=self.freed_by_slot.size
        ).reshape(self.freed_by_slot.shape).astype(np.int64)  # fmt: skip

    def _recompute_op(self, index: int) -> None:
        """Run a forward op in every slot in which it is recomputed: in several if its results are needed in different
        slots.

        ``index``: position of the op in the forward pass.
        """
        op = self.flat.recompute_ops[index]
        slot_of_result = [(row, self.recompute_slots[row]) for row in op.made_rows if row in self.recompute_slots]
        for k, (_, slots) in enumerate(slot_of_result):  # `slots`: the slot of each candidate
            runs = slots < NEVER
            for _, earlier_slots in slot_of_result[:k]:  # it runs there already, for an earlier result
                runs &= earlier_slots != slots
            columns = np.flatnonzero(runs)
            if len(columns):
                wanted = [(row, other_slots[columns] == slots[columns]) for row, other_slots in slot_of_result]
                self._run_in_slots(index, op, slots[columns], columns, wanted)

    def _fetch_with_operands(self, index: int, form: int, row: int) -> None:
        """Decode a value from a form that needs other operands, too, and free the form if no op reads it later.

        Args:
            index: position in the forward pass of the op that computes the value: it is decoded in its place.
            form: index of the form.
            row: of the value.
        """
        columns = np.flatnonzero(self.fetch_slots[form] < NEVER)
        slot = self.fetch_slots[form][columns]
        self._run_in_slots(index, self.flat.fetch_ops[form], slot, columns, [(row, np.ones(len(columns), dtype=bool))])
        self._free_form(form, slot.astype(np.int64), columns)
        self.is_fetched[form][columns] = True

    def _free_form(self, index: int, slot: Ints, columns: Ints) -> None:
        """Free a saved form right after its value is decoded, unless a later op reads the form and frees it then.

        Args:
            index: of the form.
            slot: in which the value is decoded, by candidate of ``columns``.
            columns: the candidates that decode it.
        """
        # no op reads the form in this slot or later
        is_last_use = self.last_encoding_read[index][columns] < slot * self.positions_per_slot
        self.slot_level[slot, columns] -= self.flat.encoded_bytes[index] * is_last_use

    def _run_in_slots(
        self, index: int, op: ForwardOp, slot: Ints, columns: Ints, wanted: Sequence[tuple[int, npt.NDArray[np.bool_]]]
    ) -> None:
        """Run a recomputed op or a decoding in a slot of some candidates: decode its operands first, then add its bytes
        to the slot's level and peak, and its seconds.

        Args:
            index: of the forward op in whose place it runs.
            op: the op.
            slot: the slot, by candidate of ``columns``.
            columns: the candidates.
            wanted: rows of the results, each with the candidates that need it.
        """
        flat = self.flat
        for row in op.read_rows:
            for form in flat.encodings_fetched_alone.get(row, ()):
                is_first_read = self.first_needed_slot[row][columns] == slot
                due = self.uses_form[form][columns] & ~self.is_fetched[form][columns] & is_first_read
                self._fetch(form, row, columns[due])
        levels, peaks = self.slot_level.ravel(), self.slot_peak.ravel()  # views: changes change the arrays
        place = slot.astype(np.int64) * self.candidate_count + columns  # index in the flattened arrays
        position = slot * self.positions_per_slot + index
        level = levels[place]
        freed_bytes = np.zeros(len(columns), dtype=np.int64)  # of operands that are read for the last time
        in_place = np.zeros(len(columns), dtype=bool)
        for row in op.read_rows:
            if not flat.is_output[row]:
                is_last_read = self.last_needed_position[row][columns] == position
                freed_bytes += is_last_read * flat.value_bytes[row]
                if row in op.overwritable_rows:
                    in_place |= is_last_read
        during = level + op.bytes_during
        if in_place.any():
            for row, is_wanted in wanted:
                if row == op.made_rows[0]:  # only the first result can overwrite an operand
                    during -= (in_place & is_wanted) * op.bytes_saved_in_place
        peaks[place] = np.maximum(peaks[place], during)
        allocated = sum(
            (is_wanted * flat.value_bytes[row] for row, is_wanted in wanted), np.zeros(len(columns), dtype=np.int64)
        )
        levels[place] = level + allocated - freed_bytes
        self.seconds[columns] += op.op.seconds
        if self.host_copies is not None:
            self.recompute_seconds.ravel()[place] += op.op.seconds
        for parameter in op.changing_parameters:
            for gradient_return in flat.returns_of_parameter[parameter]:
                self._return_delayed_gradient(gradient_return, parameter, position, place, columns)

    def _return_delayed_gradient(self, index: int, parameter: int, position: Ints, place: Ints, columns: Ints) -> None:
        """Return a parameter's gradient for the candidates in which this recomputed op is the last to read the
        parameter: an optimizer that updates the parameter in the backward pass has to wait for that.

        Args:
            index: of the return in ``flat.gradient_returns``.
            parameter: id of the parameter.
            position: of the recomputed op in the backward pass, by candidate of ``columns``.
            place: of its slot in the flattened arrays, by candidate of ``columns``.
            columns: the candidates that recompute it.
        """
        gradient_return = self.flat.gradient_returns[index]
        is_last_read = self.last_parameter_read[parameter][columns] == position
        is_delayed = position > self._backward_position(index)
        levels, peaks, place = self.slot_level.ravel(), self.slot_peak.ravel(), place[is_last_read & is_delayed]
        levels[place] += gradient_return.copied_bytes
        peaks[place] = np.maximum(peaks[place], levels[place] + gradient_return.update_bytes)
        levels[place] -= gradient_return.freed_bytes

    def _backward_position(self, index: int) -> int:
        """Return the position of the backward op after which gradient ``index`` is returned if nothing delays that."""
        return self.position_of_backward_op(self.flat.gradient_returns[index].slot)

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
        slot = self.first_needed_slot[row][columns].astype(np.int64)
        place, size = slot * self.candidate_count + columns, int(self.flat.value_bytes[row])
        # the form is freed only after the value is decoded
        peaks[place] = np.maximum(peaks[place], levels[place] + size + form.fetch_scratch)
        levels[place] += size
        self._free_form(index, slot, columns)
        self.is_fetched[index][columns] = True
        self.seconds[columns] += form.fetch_seconds
        if self.host_copies is not None:
            self.recompute_seconds.ravel()[place] += form.fetch_seconds

    # -- backward pass

    def _backward(self, boundary: Ints) -> tuple[Ints, Ints]:
        """Return the highest level in each slot, and the level at the end of the pass, by candidate.

        A slot is a backward op with what is recomputed and fetched just before it. ``boundary``: level between the
        passes.
        """
        flat = self.flat
        for index in flat.encoding_indices:
            last_form_read = self.last_encoding_read[index]
            frees_form = last_form_read >= 0
            if flat.forms[index].can_restore_value:
                # If the value is decoded no later than the form's last reader, that reader frees the form.
                row = flat.row_of_form[index]
                decoded_from = self.first_needed_slot[row].astype(np.int64) * self.positions_per_slot
                frees_form &= ~self.is_needed[row] | (last_form_read >= decoded_from)
            columns = np.flatnonzero(frees_form)
            self.freed_by_slot[last_form_read[columns] // self.positions_per_slot, columns] += flat.encoded_bytes[index]
        # whether each slot's op runs in place: also over a forward value that it is the last to read
        in_place = np.repeat(flat.slot_runs_in_place[:, None], self.candidate_count, axis=1)
        for slot, row in flat.overwritable_in_slot:
            in_place[slot] |= self.last_needed_position[row] == self.position_of_backward_op(slot)
        returns_net, returns_peak = self._gradient_return_levels()
        # change of the level in each slot, without returned gradients
        net = self.slot_level + flat.slot_net_bytes[:, None] - self.freed_by_slot
        end = boundary + np.cumsum(net + returns_net, axis=0)
        begin = end - net - returns_net
        in_place_saved = flat.slot_bytes_saved_in_place[:, None] - self.encoding_reader_unsaved
        # all relative to the level at the slot's beginning
        backward_op_level = (
            self.slot_level + flat.slot_op_bytes[:, None] + self.encoding_reader_scratch - in_place * in_place_saved
        )
        slots = begin + np.maximum(np.maximum(self.slot_peak, backward_op_level), net + returns_peak)
        return slots, end[-1]

    def _gradient_return_levels(self) -> tuple[Ints, Ints]:
        """Return by how much returned gradients change the level in each slot, and the highest level while they are
        returned, relative to that before.

        Both are (slot, candidate), or (slot, 1) if they are the same for all candidates. Gradients that a recomputed op
        delays are not counted: see `_return_delayed_gradient`.
        """
        flat = self.flat
        if not flat.has_delayed_returns:
            return flat.returned_net_bytes[:, None], flat.returned_peak_bytes[:, None]
        net = np.zeros((flat.slot_count, self.candidate_count), dtype=np.int64)
        peak = np.zeros((flat.slot_count, self.candidate_count), dtype=np.int64)
        for index, gradient_return in enumerate(flat.gradient_returns):
            slot, on_time = gradient_return.slot, np.ones(self.candidate_count, dtype=bool)
            if gradient_return.changing_parameter is not None:
                on_time = self.last_parameter_read[gradient_return.changing_parameter] <= self._backward_position(index)
            net[slot] += on_time * gradient_return.copied_bytes
            np.maximum(peak[slot], net[slot] + gradient_return.update_bytes, out=peak[slot], where=on_time)
            net[slot] -= on_time * gradient_return.freed_bytes
        return net, peak
