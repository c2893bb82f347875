"""Times of host copies for many candidates at once: the vectorized form of `memplan.planning.schedule.host_copies`.

Arrays are over (copies, candidates). Copies that a candidate does not use are needed in slot NEVER.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.schedule import host_copies
from memplan.planning.search.flat_graph import FlatGraph, Ints

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
NEVER = np.iinfo(np.int32).max


class Copies:
    """The copies to and from host memory of some candidates.

    Args:
        flat: the graph.
        used: which copied forms each candidate uses.
        first: the slot in which each of them is needed first.
    """

    def __init__(self, flat: FlatGraph, used: Bools, first: npt.NDArray[Any]) -> None:
        self.flat, self.used = flat, used
        self.used_copies = np.flatnonzero(used.any(axis=1))
        """Copies that any candidate uses. All arrays below have a row for each of these."""
        self.needed = np.where(used, first, NEVER)[self.used_copies].astype(np.int64)
        """By candidate: the slot in which each copy is needed first."""
        self.count = used.shape[1]
        """Number of candidates."""
        forms = [flat.copied[index] for index in self.used_copies]
        self.rows = np.array([flat.form_rows[form] for form in forms], dtype=np.int64)
        """Row of the value that is copied."""
        self.seconds = np.array([host_copies.seconds_of(flat.forms[form]) for form in forms])
        """Seconds of the copy in one direction."""
        use_seconds = (used[index] * flat.forms[flat.copied[index]].use_seconds for index in self.used_copies)
        self.use_seconds = sum(use_seconds, np.zeros(self.count))
        """By candidate: seconds that its copies add, without waits."""
        in_use = self.needed < NEVER
        self.in_use = {int(row): in_use[index] for index, row in enumerate(self.rows)}
        """By row of a value: the candidates that use its copy."""
        self.pairs = np.nonzero(in_use)
        """Copy and candidate of each use."""
        self.counts = in_use.sum(axis=0)
        """By candidate: the number of copies it uses."""
        most = int(self.counts.max(initial=0))
        # Of many copies that any candidate uses, each uses few: orders are over those of a candidate alone.
        store_order = np.lexsort((self.rows, flat.maker[self.rows]))
        self.store_order = store_order[np.argsort(~in_use[store_order], axis=0, kind="stable")[:most]]
        """By candidate: its copies in the order in which they are copied to the host. Those past its number are any."""
        self.fetch_order = np.argsort(self.needed, axis=0, kind="stable")[:most]
        """By candidate: its copies in the order in which they are needed, ties in the order of values."""
        self.begins = np.array(host_copies.backward_begins(flat.graph))
        """Seconds at which each backward op begins."""
        self.free_positions, self.fetch_slots = self._compute_free_positions(), self._compute_fetch_slots()
        """By copy and candidate: where the value is freed on the device, and where its copy back begins."""

    def uses(self, row: int) -> Bools:
        """Return for each candidate whether it keeps forward value ``row`` as a copy in host memory."""
        in_use = self.in_use.get(row)
        return np.zeros(self.count, dtype=bool) if in_use is None else in_use

    def _compute_free_positions(self) -> Ints:
        """Return an array over (copy, candidate): the position of the forward op after which the value is freed on the
        device."""
        ends = np.array(host_copies.forward_ends(self.flat.graph))
        freed_after = np.zeros(self.needed.shape, dtype=np.int64)
        done, every = np.zeros(self.count), np.arange(self.count)
        for k, index in enumerate(self.store_order):  # each candidate has an order, and so a copy, of its own
            row, used = self.rows[index], k < self.counts
            # the copy begins when the value is computed and the copy before it is done
            end = np.maximum(done, ends[self.flat.maker[row]]) + self.seconds[index]
            done = np.where(used, end, done)
            position = np.minimum(np.searchsorted(ends, end), len(ends) - 1)
            freed_after[index[used], every[used]] = np.maximum(position, self.flat.used_last[row])[used]
        return freed_after

    def _compute_fetch_slots(self) -> Ints:
        """Return an array over (copy, candidate): the slot at whose beginning the copy back to the device begins.

        A slot is a backward op with what is recomputed just before for it.
        """
        slots = np.full(self.needed.shape, NEVER, dtype=np.int64)
        latest, every = np.full(self.count, np.inf), np.arange(self.count)
        for index in self.fetch_order[::-1]:  # each candidate has an order, and so a copy, of its own
            needed = self.needed[index, every]
            used = needed < NEVER
            slot = np.where(used, needed, 1)  # 1 is any valid slot
            # as late as possible: done when the value is needed and when the copy after it begins
            begin = np.minimum(self.begins[slot - 1], latest) - self.seconds[index]
            latest = np.where(used, begin, latest)
            before = np.maximum(np.searchsorted(self.begins, begin, side="right"), 1)
            slots[index, every] = np.where(used, np.minimum(slot, before), NEVER)
        return slots

    def live_in_forward(self, positions: int) -> tuple[Ints, Ints]:
        """Return two arrays of bytes over (forward op, candidate) on values that are being copied to the host.

        First the bytes that are live after the op only because their copy is not done yet, then the part of them that
        is freed at that op. ``positions``: number of forward ops.
        """
        copies, _ = self.pairs
        live = self._bytes_at(self.flat.used_last[self.rows[copies]], positions + 1)
        freed = self._bytes_at(self.free_positions[self.pairs], positions + 1)
        live[1:] -= freed[:-1]
        return np.cumsum(live, axis=0)[:-1], freed[:-1]

    def allocated_in_backward(self, slots: int) -> Ints:
        """Return an array over (slot, candidate): bytes allocated at the beginning of a slot for copies back.
        ``slots``: number."""
        return self._bytes_at(self.fetch_slots[self.pairs], slots)

    def _bytes_at(self, places: Ints, count: int) -> Ints:
        """Add up the bytes of the copies in use, an array over (place, candidate). ``places``: one for each of
        ``pairs``; ``count``: their number."""
        copies, candidates = self.pairs
        sums = np.bincount(
            places * self.count + candidates, weights=self.flat.bytes[self.rows[copies]], minlength=count * self.count
        )
        return sums.astype(np.int64).reshape(count, self.count)

    def waits(self, storing: Floats, spent: Floats) -> Floats:
        """Return the seconds that the step waits for copies, by candidate.

        Args:
            storing: by forward op, the seconds of the stores after it.
            spent: by slot, the seconds of the recomputed ops and fetches in it.
        """
        return self._waits_for_stores(storing) + self._waits_for_fetches(spent)

    def _waits_for_stores(self, storing: Floats) -> Floats:
        """Return, by candidate, the seconds that the forward pass waits at its end for copies to host memory."""
        ends = np.array(host_copies.forward_ends(self.flat.graph))[:, None] + np.cumsum(storing, axis=0)
        done, every = np.zeros(self.count), np.arange(self.count)
        for k, index in enumerate(self.store_order):
            maker = self.flat.maker[self.rows[index]]
            begin = ends[maker, every] - storing[maker, every]
            end = np.maximum(done, begin) + self.seconds[index]
            done = np.where(k < self.counts, end, done)
        # A wait before the end of the pass is for a copy that is done by then: see host_copies.
        return np.maximum(done - ends[-1], 0.0)

    def _waits_for_fetches(self, spent: Floats) -> Floats:
        """Return, by candidate, the seconds that the backward pass waits for copies back to the device."""
        begins = np.zeros_like(spent)  # by slot: seconds at which it begins, without waits
        begins[1:] = self.begins[:-1, None] + np.cumsum(spent, axis=0)[:-1]
        every = np.arange(self.count)
        needed = np.take_along_axis(self.needed, self.fetch_order, axis=0)
        waited = np.zeros((len(self.fetch_order) + 1, self.count))
        """Seconds waited after the first k copies were needed."""
        done = np.zeros(self.count)
        for k, index in enumerate(self.fetch_order):  # each candidate has an order, and so a copy, of its own
            used = needed[k] < NEVER
            fetched = np.where(used, self.fetch_slots[index, every], 1)  # slot in which the copy is issued
            slot = np.where(used, needed[k], 1)  # slot in which it is needed
            earlier = (needed[:k] < fetched).sum(axis=0)  # copies whose waits are over by then
            end = np.maximum(done, begins[fetched, every] + waited[earlier, every]) + self.seconds[index]
            done = np.where(used, end, done)
            late = np.maximum(end - begins[slot, every] - waited[k], 0.0)
            waited[k + 1] = waited[k] + np.where(used, late, 0.0)
        return waited[-1]
