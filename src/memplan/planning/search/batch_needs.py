"""Compute in which slots of the backward pass many candidates need each forward value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_copies import NEVER, Copies
from memplan.planning.search.candidates import Columns
from memplan.planning.search.flat_graph import FlatGraph, ForwardOp, Ints


class Needs:
    """By candidate: in which slots the backward pass needs each forward value, and in which forms it is saved."""

    def __init__(self, flat: FlatGraph, columns: Columns) -> None:
        """Compute all attributes, arrays with a column for each candidate.

        A *row* is the number of a forward value, a *slot* a backward op with what is recomputed and fetched just before
        it. A *position* numbers what can run in the backward pass: in each slot all forward ops, which may be
        recomputed there, then the backward op. Forms are numbers in ``flat.forms``: first encodings, then copies to
        host memory.

        Args:
            flat: the graph.
            columns: the candidates' decisions: a row for each of ``flat.recomputable_values``, then for each of
                ``flat.forms``.
        """
        self.flat, self.candidate_count = flat, columns.shape[1]
        self.positions_per_slot = len(flat.forward_ops) + 1
        """Number of positions in a slot."""
        count, drops = self.candidate_count, len(flat.recomputable_values)
        # which forms are used, and which values are recomputed
        self.uses_form = columns[drops:].copy()
        """(form, candidate): whether the candidate uses the form. Of several forms that a value can be fetched from,
        only the first is used."""
        self.recomputes = np.zeros((len(flat.forward_values), count), dtype=bool)
        """(row, candidate): whether the candidate recomputes the value if it is needed."""
        self.recomputes[flat.recomputable_rows] = columns[:drops]
        for row, forms in flat.fetchable_forms_of_row.items():
            for k, index in enumerate(forms):
                for earlier in forms[:k]:
                    self.uses_form[index] &= ~self.uses_form[earlier]
                self.recomputes[row] &= ~self.uses_form[index]  # it is fetched instead
        self.uses_host_copy = self.uses_form[len(flat.encoding_indices) :]
        """(copied form, candidate): the rows of ``uses_form`` for copies to host memory."""
        self.row_of_host_copy = flat.row_of_form[len(flat.encoding_indices) :]
        """Row of the value of each copied form."""
        self.any_recomputes = [bool(row.any()) for row in self.recomputes]
        """By row: whether any candidate recomputes the value."""
        # when each value is needed: filled by the reads of backward ops, then in reverse by those of recomputed ops
        self.recompute_slots: dict[int, Ints] = {}
        """Row -> slot in which the value is recomputed, by candidate; NEVER if it is not."""
        self.fetch_slots: dict[int, Ints] = {}
        """Encoding that is fetched with other operands -> slot in which the value is fetched from it, by candidate."""
        self.first_needed_slot = np.full((len(flat.forward_values), count), NEVER, dtype=np.int32)
        """(row, candidate): slot in which the value is first needed."""
        self.last_needed_position = np.full((len(flat.forward_values), count), -1, dtype=np.int32)
        """(row, candidate): position at which the value is last needed; -1 if it is not."""
        self.last_parameter_read = {v: np.full(count, -1, dtype=np.int32) for v in flat.returns_of_parameter}
        """By parameter: position of the last recomputed op that reads it, which delays the return of its gradient; by
        candidate, -1 if there is none."""
        self.last_encoding_read = np.full((len(flat.encoding_indices), count), -1, dtype=np.int32)
        """(encoding, candidate): the position at which an op last reads the encoding itself; -1 if none does."""
        self.encoding_reader_scratch = np.zeros((flat.slot_count, count), dtype=np.int64)
        """(slot, candidate): scratch bytes that the backward op needs more if it reads an encoding, not the value."""
        self.encoding_reader_unsaved = np.zeros((flat.slot_count, count), dtype=np.int64)
        """(slot, candidate): ``scratch_saved`` of the backward op if it reads an encoding: then it cannot overwrite the
        value, and saves nothing."""
        self._add_backward_reads()
        for index in range(len(self.flat.forward_ops) - 1, -1, -1):
            self._add_operands_of(index)
        # what the forward pass saves: the value itself, or a form that a candidate uses and needs
        self.is_needed = self.first_needed_slot < NEVER
        """(row, candidate): whether the backward pass needs the value, in any form."""
        self.saved_as_is = self.is_needed & ~self.recomputes
        """(row, candidate): whether the value itself is saved."""
        self.saves_encoding = self.last_encoding_read >= 0
        """(encoding, candidate): whether the encoding is saved."""
        for row, forms in flat.fetchable_forms_of_row.items():
            for index in forms:
                if index in flat.encoding_indices:
                    self.saved_as_is[row] &= ~self.uses_form[index]
                    self.saves_encoding[index] |= self.uses_form[index] & self.is_needed[row]
        needs_copy = self.uses_host_copy & self.is_needed[self.row_of_host_copy]
        first_needed = self.first_needed_slot[self.row_of_host_copy]
        self.host_copies = Copies(flat, needs_copy, first_needed) if needs_copy.any() else None
        """Copies to host memory; None if no candidate needs any."""
        for index, row in enumerate(self.row_of_host_copy):
            self.saved_as_is[row] &= ~needs_copy[index]

    def position_of_backward_op(self, slot: int) -> int:
        """Return the position of a slot's backward op: the last of the slot, after all forward ops."""
        return (slot + 1) * self.positions_per_slot - 1

    def _add_backward_reads(self) -> None:
        """Record the first and last slot in which backward ops read each value, by candidate.

        An op that can read an encoding does not need the value if the candidate saves that encoding.
        """
        flat = self.flat
        self.first_needed_slot[:] = flat.first_reading_slot[:, None]
        last_read = (flat.last_reading_slot + 1) * self.positions_per_slot - 1  # of backward ops; -1 if none reads it
        self.last_needed_position[:] = last_read[:, None]
        for slot, readable in flat.form_readers:  # (form, row) of the forms that the slot's op can read
            reads_some_form = np.zeros(self.candidate_count, dtype=bool)
            position = self.position_of_backward_op(slot)
            reads_form_of: dict[int, Any] = {}
            """By row: which candidates read a saved form instead of the value."""
            for index, row in readable:
                reads_form = self.uses_form[index] & ~reads_some_form  # an op reads a single form
                reads_some_form |= reads_form
                reads_form_of[row] = reads_form_of.get(row, False) | reads_form
                last_reads = self.last_encoding_read[index]
                np.maximum(last_reads, position, out=last_reads, where=reads_form)
                op = flat.graph.backward_ops[slot - 1]  # slot 0 has no backward op
                self.encoding_reader_scratch[slot] += reads_form * (
                    flat.forms[index].direct_reader_scratch - op.scratch
                )
                self.encoding_reader_unsaved[slot] += reads_form * op.scratch_saved
            for row, reads_form in reads_form_of.items():  # the others read the value itself
                first_slots, last_positions = self.first_needed_slot[row], self.last_needed_position[row]
                np.minimum(first_slots, slot, out=first_slots, where=~reads_form)
                np.maximum(last_positions, position, out=last_positions, where=~reads_form)

    def _add_operands_of(self, index: int) -> None:
        """Mark the operands of a forward op as needed in the slots where it is recomputed, and those of the decodings
        in its place.

        ``index``: position of the op in the forward pass.
        """
        op = self.flat.recompute_ops[index]
        for row in op.made_rows:
            if self.any_recomputes[row]:
                self._add_operands(index, op, self.recomputes[row], row, self.recompute_slots, key=row)
        for form, row in self.flat.encodings_fetched_with_operands[index]:
            self._add_operands(index, self.flat.fetch_ops[form], self.uses_form[form], row, self.fetch_slots, key=form)

    def _add_operands(
        self, index: int, op: ForwardOp, chosen: npt.NDArray[np.bool_], row: int, slots: dict[int, Ints], key: int
    ) -> None:
        """For the candidates in ``chosen``, run an op in the first slot that needs its result: record that slot in
        ``slots[key]``, and mark the op's operands as needed there.

        Args:
            index: of the op in the forward pass, which is its position within a slot.
            op: recomputes or decodes the value.
            chosen: whether each candidate runs the op if the value is needed.
            row: of the value.
            slots: `recompute_slots` or `fetch_slots`.
            key: row of the value in the first, number of the form in the second.
        """
        slot = np.where(chosen, self.first_needed_slot[row], NEVER)
        runs = slot < NEVER
        if not runs.any():
            return
        slots[key] = slot
        # 0 instead of NEVER before the product, which would overflow
        position = np.where(runs, np.where(runs, slot, 0) * self.positions_per_slot + index, -1)
        for read in op.read_rows:
            np.minimum(self.first_needed_slot[read], slot, out=self.first_needed_slot[read])
            np.maximum(self.last_needed_position[read], position, out=self.last_needed_position[read])
        for parameter in op.changing_parameters:
            np.maximum(self.last_parameter_read[parameter], position, out=self.last_parameter_read[parameter])
