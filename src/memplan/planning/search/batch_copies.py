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
    """When the copies to and from host memory of many candidates run, and how long the step waits for them.

    A *slot* is a backward op with what is recomputed and fetched just before it. A *row* is the number of a forward
    value.

    Args:
        flat: the graph.
        used: (copied form, candidate): whether the candidate copies the form's value.
        first: (copied form, candidate): the slot in which the value is needed first.
    """

    def __init__(self, flat: FlatGraph, used: Bools, first: npt.NDArray[Any]) -> None:
        self.flat, self.used = flat, used
        self.used_copies = np.flatnonzero(used.any(axis=1))
        """Copies that any candidate uses, as numbers in ``flat.host_copy_indices``. The arrays below have an entry for
        each."""
        self.first_needed_slot = np.where(used, first, NEVER)[self.used_copies].astype(np.int64)
        """(copy, candidate): the slot in which the value is needed first; NEVER if the candidate does not copy it."""
        self.candidate_count = used.shape[1]
        """Number of candidates."""
        forms = [flat.host_copy_indices[index] for index in self.used_copies]
        self.row_of_copy = np.array([flat.row_of_form[form] for form in forms], dtype=np.int64)
        """Row of the value that is copied."""
        self.copy_seconds = np.array([host_copies.copy_seconds_of(flat.forms[form]) for form in forms])
        """Seconds of the copy in one direction."""
        seconds_of_copies = (
            used[index] * flat.forms[flat.host_copy_indices[index]].use_seconds for index in self.used_copies
        )
        self.added_seconds = sum(seconds_of_copies, np.zeros(self.candidate_count))
        """By candidate: seconds that its copies add, without waits."""
        in_use = self.first_needed_slot < NEVER
        self.in_use = {int(row): in_use[index] for index, row in enumerate(self.row_of_copy)}
        """By row of a value: the candidates that use its copy."""
        self.pairs = np.nonzero(in_use)
        """Copy and candidate of each use."""
        self.counts = in_use.sum(axis=0)
        """By candidate: the number of copies it uses."""
        most_copies = int(self.counts.max(initial=0))
        # Of many copies that any candidate uses, each uses few: orders are over those of a candidate alone.
        store_order = np.lexsort((self.row_of_copy, flat.op_of_row[self.row_of_copy]))
        self.store_order = store_order[np.argsort(~in_use[store_order], axis=0, kind="stable")[:most_copies]]
        """(place in the order, candidate): its copies in the order in which they are copied to the host, that of the
        ops that compute the values. Those past its number are any."""
        self.fetch_order = np.argsort(self.first_needed_slot, axis=0, kind="stable")[:most_copies]
        """(place in the order, candidate): its copies in the order in which they are needed, ties by value."""
        self.backward_op_begins = np.array(host_copies.backward_begins(flat.graph))
        """Seconds at which each backward op begins."""
        self.freed_after_op, self.fetch_slots = self._compute_free_positions(), self._compute_fetch_slots()
        """(copy, candidate): the forward op after which the value is freed on the device, and the slot at whose
        beginning its copy back begins."""

    def uses(self, row: int) -> Bools:
        """Return for each candidate whether it keeps forward value ``row`` as a copy in host memory."""
        in_use = self.in_use.get(row)
        return np.zeros(self.candidate_count, dtype=bool) if in_use is None else in_use

    def _compute_free_positions(self) -> Ints:
        """Return an array over (copy, candidate): the position of the forward op after which the value is freed on the
        device."""
        op_ends = np.array(host_copies.forward_ends(self.flat.graph))  # seconds
        freed_after = np.zeros(self.first_needed_slot.shape, dtype=np.int64)
        previous_copy_end, all_candidates = np.zeros(self.candidate_count), np.arange(self.candidate_count)
        for k, index in enumerate(self.store_order):  # `index` has a copy for each candidate
            row, used = self.row_of_copy[index], k < self.counts
            # the copy begins when the value is computed and the copy before it is done
            copy_end = np.maximum(previous_copy_end, op_ends[self.flat.op_of_row[row]]) + self.copy_seconds[index]
            previous_copy_end = np.where(used, copy_end, previous_copy_end)
            op_at_copy_end = np.minimum(np.searchsorted(op_ends, copy_end), len(op_ends) - 1)
            freed_at = np.maximum(op_at_copy_end, self.flat.last_forward_use[row])  # not while ops read the value
            freed_after[index[used], all_candidates[used]] = freed_at[used]
        return freed_after

    def _compute_fetch_slots(self) -> Ints:
        """Return an array over (copy, candidate): the slot at whose beginning the copy back to the device begins.

        A slot is a backward op with what is recomputed just before for it. NEVER if the candidate does not copy the
        value.
        """
        fetch_slots = np.full(self.first_needed_slot.shape, NEVER, dtype=np.int64)
        next_copy_begin, all_candidates = np.full(self.candidate_count, np.inf), np.arange(self.candidate_count)
        for index in self.fetch_order[::-1]:  # from the last copy back; `index` has a copy for each candidate
            first_needed = self.first_needed_slot[index, all_candidates]
            used = first_needed < NEVER
            needed_slot = np.where(used, first_needed, 1)  # 1: any valid slot, for candidates without this copy
            # as late as possible: done when the value is needed and when the next copy begins
            begin = np.minimum(self.backward_op_begins[needed_slot - 1], next_copy_begin) - self.copy_seconds[index]
            next_copy_begin = np.where(used, begin, next_copy_begin)
            slot_at_begin = np.searchsorted(self.backward_op_begins, begin, side="right")
            slot_at_begin = np.maximum(slot_at_begin, 1)  # slot 0 gets the tangents
            fetch_slots[index, all_candidates] = np.where(used, np.minimum(needed_slot, slot_at_begin), NEVER)
        return fetch_slots

    def live_in_forward(self, positions: int) -> tuple[Ints, Ints]:
        """Return the bytes that values which are being copied to the host add to the level after each forward op.

        Two arrays over (forward op, candidate): the bytes that are live after the op only because their copy is not
        done yet, and those of them that are freed right then. ``positions``: number of forward ops.
        """
        copies, _ = self.pairs
        live = self._bytes_at(self.flat.last_forward_use[self.row_of_copy[copies]], positions + 1)
        freed = self._bytes_at(self.freed_after_op[self.pairs], positions + 1)
        live[1:] -= freed[:-1]
        return np.cumsum(live, axis=0)[:-1], freed[:-1]

    def allocated_in_backward(self, slots: int) -> Ints:
        """Return an array over (slot, candidate): bytes allocated at the beginning of a slot for copies back to the
        device. ``slots``: number of slots."""
        return self._bytes_at(self.fetch_slots[self.pairs], slots)

    def _bytes_at(self, places: Ints, count: int) -> Ints:
        """Add up the bytes of the copies in use, an array over (place, candidate).

        Args:
            places: of each of ``pairs``: a forward op or a slot.
            count: number of places.
        """
        copies, candidates = self.pairs
        sums = np.bincount(
            places * self.candidate_count + candidates,
            weights=self.flat.value_bytes[self.row_of_copy[copies]],
            minlength=count * self.candidate_count,
        )
        return sums.astype(np.int64).reshape(count, self.candidate_count)

    def waits(self, store_seconds: Floats, recompute_seconds: Floats) -> Floats:
        """Return the seconds that the step waits for copies, by candidate.

        Args:
            store_seconds: (forward op, candidate): seconds of encoding values after the op.
            recompute_seconds: (slot, candidate): seconds of the slot's recomputed ops and decodings.
        """
        return self._waits_for_stores(store_seconds) + self._waits_for_fetches(recompute_seconds)

    def _waits_for_stores(self, store_seconds: Floats) -> Floats:
        """Return, by candidate, the seconds that the forward pass waits at its end for copies to host memory.
        ``store_seconds``: see `waits`."""
        op_ends = np.array(host_copies.forward_ends(self.flat.graph))[:, None] + np.cumsum(store_seconds, axis=0)
        previous_copy_end, all_candidates = np.zeros(self.candidate_count), np.arange(self.candidate_count)
        for k, index in enumerate(self.store_order):
            op = self.flat.op_of_row[self.row_of_copy[index]]
            # before encodings are stored
            value_computed = op_ends[op, all_candidates] - store_seconds[op, all_candidates]
            copy_end = np.maximum(previous_copy_end, value_computed) + self.copy_seconds[index]
            previous_copy_end = np.where(k < self.counts, copy_end, previous_copy_end)
        # A wait before the end of the pass is for a copy that is done by then: see host_copies.
        return np.maximum(previous_copy_end - op_ends[-1], 0.0)

    def _waits_for_fetches(self, recompute_seconds: Floats) -> Floats:
        """Return, by candidate, the seconds that the backward pass waits for copies back to the device.
        ``recompute_seconds``: see `waits`."""
        slot_begins = np.zeros_like(recompute_seconds)  # seconds, without waits
        slot_begins[1:] = self.backward_op_begins[:-1, None] + np.cumsum(recompute_seconds, axis=0)[:-1]
        all_candidates = np.arange(self.candidate_count)
        needed_slots = np.take_along_axis(self.first_needed_slot, self.fetch_order, axis=0)
        waited = np.zeros((len(self.fetch_order) + 1, self.candidate_count))
        """[k]: seconds waited until the first k copies of the fetch order were done."""
        previous_copy_end = np.zeros(self.candidate_count)
        for k, index in enumerate(self.fetch_order):  # `index` has a copy for each candidate
            used = needed_slots[k] < NEVER
            fetch_slot = np.where(used, self.fetch_slots[index, all_candidates], 1)  # 1: any valid slot
            needed_slot = np.where(used, needed_slots[k], 1)
            waits_before = (needed_slots[:k] < fetch_slot).sum(axis=0)  # copies waited for before this one begins
            copy_begin = np.maximum(
                previous_copy_end, slot_begins[fetch_slot, all_candidates] + waited[waits_before, all_candidates]
            )
            copy_end = copy_begin + self.copy_seconds[index]
            previous_copy_end = np.where(used, copy_end, previous_copy_end)
            wait = np.maximum(copy_end - slot_begins[needed_slot, all_candidates] - waited[k], 0.0)
            waited[k + 1] = waited[k] + np.where(used, wait, 0.0)
        return waited[-1]
