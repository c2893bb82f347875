"""Compute in which slots of the backward pass many candidates need each forward value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_copies import NEVER, Copies
from memplan.planning.search.candidates import Columns
from memplan.planning.search.flat_graph import FlatGraph, ForwardOp, Ints


class Needs:
    """By candidate: in which slots the backward pass needs each forward value, and in which forms it is kept.

    Slots are the steps of the backward pass and rows the forward values, as `flat_graph` numbers them; forms are
    indices of ``flat.forms``. Arrays have a row for each forward value, saved form or slot, and a column for each
    candidate.
    """

    def __init__(self, flat: FlatGraph, columns: Columns) -> None:
        """Compute everything.

        Args:
            flat: the graph.
            columns: the candidates' decisions: a row for each of ``flat.droppable``, then for each of ``flat.forms``.
        """
        self.flat, self.count = flat, columns.shape[1]
        self.slot_size = len(flat.forward) + 1
        """Positions in a slot: all forward ops, which may be recomputed there, then the backward op."""
        count, drops = self.count, len(flat.droppable)
        # which forms are used, and which values are recomputed
        self.formed = columns[drops:].copy()
        """Which forms each candidate uses. Of several whole forms of a value only the first is used."""
        self.dropped = np.zeros((len(flat.values), count), dtype=bool)
        """Which values each candidate recomputes."""
        self.dropped[flat.drop_rows] = columns[:drops]
        for row, forms in flat.fetchable_forms_of.items():
            for k, index in enumerate(forms):
                for before in forms[:k]:
                    self.formed[index] &= ~self.formed[before]
                self.dropped[row] &= ~self.formed[index]
        self.copied = self.formed[len(flat.plain) :]
        """The copied forms among them."""
        self.copied_rows = flat.form_rows[len(flat.plain) :]
        """Row of the value of each copied form."""
        self.any_dropped = [bool(row.any()) for row in self.dropped]
        """By row: whether any candidate recomputes the value."""
        # when each value is needed: from the reads of backward ops, then in reverse from those of recomputed ops
        self.recomputed_in: dict[int, Ints] = {}
        """Row -> slot in which the value is recomputed, by candidate."""
        self.fetched_in: dict[int, Ints] = {}
        """Form that is fetched with other operands -> slot in which the value is fetched from it, by candidate."""
        self.first = np.full((len(flat.values), count), NEVER, dtype=np.int32)
        """Slot in which a value is first needed."""
        self.last = np.full((len(flat.values), count), -1, dtype=np.int32)
        """Position at which it is last needed: slot * ``slot_size`` + index of the forward op, or ``slot_size - 1`` for
        the backward op."""
        self.parameter_last = {v: np.full(count, -1, dtype=np.int32) for v in flat.returns_of}
        """By parameter: the position of its last read, for which the give of its gradient waits."""
        self.last_direct = np.full((len(flat.plain), count), -1, dtype=np.int32)
        """By plain form: the position at which an op last reads it directly; -1 if none does."""
        self.slot_scratch = np.zeros((flat.slots, count), dtype=np.int64)
        """Scratch bytes that ops which read a saved form need beyond those with the value."""
        self.direct_saved = np.zeros((flat.slots, count), dtype=np.int64)
        """Scratch bytes that ops which read a saved form would have saved by working in place on the value."""
        self._add_backward_reads()
        for index in range(len(self.flat.forward) - 1, -1, -1):
            self._add_operands_of(index)
        # what is saved for that: the value itself, or a form that a candidate uses and needs
        self.needed = self.first < NEVER
        """Which values the backward pass needs."""
        self.saved_as_is = self.needed & ~self.dropped
        """Which values are saved themselves."""
        self.used = self.last_direct >= 0
        """Which plain forms are saved."""
        for row, forms in flat.fetchable_forms_of.items():
            for index in forms:
                if index in flat.plain:
                    self.saved_as_is[row] &= ~self.formed[index]
                    self.used[index] |= self.formed[index] & self.needed[row]
        used = self.copied & self.needed[self.copied_rows]
        self.copies = Copies(flat, used, self.first[self.copied_rows]) if used.any() else None
        """Those to host memory; None if no candidate needs any."""
        for index, row in enumerate(self.copied_rows):
            self.saved_as_is[row] &= ~used[index]

    def _add_backward_reads(self) -> None:
        """Record the first and last slot in which backward ops read each value, by candidate.

        An op that can read an encoding does not need the value if the candidate saves that encoding. A slot is a
        backward op with what is recomputed just before for it.
        """
        flat, final = self.flat, self.slot_size - 1
        self.first[:] = flat.first_read[:, None]
        self.last[:] = np.where(flat.last_read < 0, -1, flat.last_read * self.slot_size + final)[:, None]
        for slot, readable in flat.direct:  # (form, row) of the forms that the slot's op can read
            decided = np.zeros(self.count, dtype=bool)
            position = slot * self.slot_size + final
            instead: dict[int, Any] = {}
            """By row: which candidates read a saved form instead of the value."""
            for index, row in readable:
                direct = self.formed[index] & ~decided  # an op reads a single form
                decided |= direct
                instead[row] = instead.get(row, False) | direct
                np.maximum(self.last_direct[index], position, out=self.last_direct[index], where=direct)
                op = flat.graph.backward_ops[slot - 1]
                self.slot_scratch[slot] += direct * (flat.forms[index].direct_scratch - op.scratch)
                self.direct_saved[slot] += direct * op.scratch_saved
            for row, direct in instead.items():
                np.minimum(self.first[row], slot, out=self.first[row], where=~direct)
                np.maximum(self.last[row], position, out=self.last[row], where=~direct)

    def _add_operands_of(self, index: int) -> None:
        """Mark the operands of a forward op as needed in the slots where it is recomputed, and those of its decodings.

        A slot is a backward op with what is recomputed just before for it. ``index``: position of the op in the forward
        pass.
        """
        op = self.flat.recompute_ops[index]
        for row in op.makes:
            if self.any_dropped[row]:
                self._add_operands(index, op, self.dropped[row], row=row, slots=self.recomputed_in, key=row)
        for form, row in self.flat.operand_fetches_at[index]:
            self._add_operands(index, self.flat.fetch_ops[form], self.formed[form], row, self.fetched_in, form)

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
            slots: `recomputed_in` or `fetched_in`.
            key: of the op in ``slots``.
        """
        slot = np.where(chosen, self.first[row], NEVER)
        runs = slot < NEVER
        if not runs.any():
            return
        slots[key] = slot
        # np.where twice, as NEVER * slot_size would overflow
        position = np.where(runs, np.where(runs, slot, 0) * self.slot_size + index, -1)
        for read in op.reads:
            np.minimum(self.first[read], slot, out=self.first[read])
            np.maximum(self.last[read], position, out=self.last[read])
        for parameter in op.parameters:
            np.maximum(self.parameter_last[parameter], position, out=self.parameter_last[parameter])
