"""When many candidates at once need each value in the backward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_copies import NEVER, Copies
from memplan.planning.search.candidates import Columns
from memplan.planning.search.flat_graph import FlatGraph, ForwardOp, Ints


class Needs:
    """When some candidates need each value in the backward pass, and what they keep of it."""

    def __init__(self, flat: FlatGraph, columns: Columns) -> None:
        self.flat, self.count = flat, columns.shape[1]
        self.every = len(flat.forward) + 1
        """Positions a slot has: its recomputed forward ops, then its backward op."""
        count, drops = self.count, len(flat.droppable)
        self.formed = columns[drops:].copy()
        """Which forms each candidate uses: of several whole ones of a value, the first."""
        self.dropped = np.zeros((len(flat.values), count), dtype=bool)
        self.dropped[flat.drop_rows] = columns[:drops]
        for row, forms in flat.whole_of.items():
            for k, at in enumerate(forms):
                for before in forms[:k]:
                    self.formed[at] &= ~self.formed[before]
                self.dropped[row] &= ~self.formed[at]
        self.away = self.formed[len(flat.plain) :]
        """Of these, the copies."""
        self.away_rows = flat.form_rows[len(flat.plain) :]
        self.some_drop = [bool(row.any()) for row in self.dropped]
        self.again: dict[int, Ints] = {}
        """Row -> slot in which the value is made again, by candidate."""
        self.rebuilds: dict[int, Ints] = {}
        """Form with other operands -> slot in which the value is fetched from it."""
        self.first = np.full((len(flat.values), count), NEVER, dtype=np.int32)
        """Slot in which a value is first needed."""
        self.last = np.full((len(flat.values), count), -1, dtype=np.int32)
        """Position (slot * every + which) at which it is needed last."""
        self.parameter_last = {v: np.full(count, -1, dtype=np.int32) for v in flat.given_at}
        self.last_direct = np.full((len(flat.plain), count), -1, dtype=np.int32)
        self.slot_scratch = np.zeros((flat.slots, count), dtype=np.int64)
        self.direct_saved = np.zeros((flat.slots, count), dtype=np.int64)
        """Of ops that read a kept form: what they would have saved of their own scratch by working in place."""
        self._needs_of_backward()
        for at in range(len(self.flat.forward) - 1, -1, -1):
            self._needs_of(at)
        self.needed = self.first < NEVER
        self.kept = self.needed & ~self.dropped
        self.used = self.last_direct >= 0
        for row, forms in flat.whole_of.items():
            for at in forms:
                if at in flat.plain:
                    self.kept[row] &= ~self.formed[at]
                    self.used[at] |= self.formed[at] & self.needed[row]
        used = self.away & self.needed[self.away_rows]
        self.copies = Copies(flat, used, self.first[self.away_rows]) if used.any() else None
        for at, row in enumerate(self.away_rows):
            self.kept[row] &= ~used[at]

    def _needs_of_backward(self) -> None:
        flat, final = self.flat, self.every - 1
        self.first[:] = flat.first_read[:, None]
        self.last[:] = np.where(flat.last_read < 0, -1, flat.last_read * self.every + final)[:, None]
        for slot, candidates in flat.direct:
            taken = np.zeros(self.count, dtype=bool)
            position = slot * self.every + final
            instead: dict[int, Any] = {}
            """By row: which candidates read a kept form instead."""
            for at, row in candidates:
                direct = self.formed[at] & ~taken
                taken |= direct
                instead[row] = instead.get(row, False) | direct
                np.maximum(self.last_direct[at], position, out=self.last_direct[at], where=direct)
                op = flat.graph.backward_ops[slot - 1]
                self.slot_scratch[slot] += direct * (flat.forms[at].direct_scratch - op.scratch)
                self.direct_saved[slot] += direct * op.scratch_saved
            for row, direct in instead.items():
                np.minimum(self.first[row], slot, out=self.first[row], where=~direct)
                np.maximum(self.last[row], position, out=self.last[row], where=~direct)

    def _needs_of(self, at: int) -> None:
        """A forward op that runs again in some slots needs what it reads there; so does a form that is fetched there
        with other operands."""
        for row in self.flat.rerun[at].makes:
            if self.some_drop[row]:
                self._needs(at, self.flat.rerun[at], self.dropped[row], row, self.again, row)
        for form, row in self.flat.rebuilds_at[at]:
            self._needs(at, self.flat.rebuilt[form], self.formed[form], row, self.rebuilds, form)

    def _needs(
        self, at: int, op: ForwardOp, chosen: npt.NDArray[np.bool_], row: int, slots: dict[int, Ints], key: int
    ) -> None:
        """Note what making a value again needs, in the slot in which the value is needed first; and that slot."""
        slot = np.where(chosen, self.first[row], NEVER)
        if slot.min() == NEVER:
            return
        slots[key] = slot
        position = np.where(slot < NEVER, np.where(slot < NEVER, slot, 0) * self.every + at, -1)
        for read in op.reads:
            np.minimum(self.first[read], slot, out=self.first[read])
            np.maximum(self.last[read], position, out=self.last[read])
        for parameter in op.parameters:
            np.maximum(self.parameter_last[parameter], position, out=self.parameter_last[parameter])
