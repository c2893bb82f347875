"""Bytes of many candidates at every position of the step, and the seconds that they add.

A forward pass follows the bytes of what is made again within its slot, and sums over slots give the rest.
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
    """One pass over the graph for some candidates."""

    def __init__(self, flat: FlatGraph, columns: Columns) -> None:
        super().__init__(flat, columns)
        count = self.count
        self.seconds = np.zeros(count)
        self.now = np.zeros((flat.slots, count), dtype=np.int64)
        """Bytes made less bytes freed so far within a slot, before its backward op."""
        self.top = np.zeros((flat.slots, count), dtype=np.int64)
        self.storing = np.zeros((len(flat.forward), count))
        """Seconds of what is stored after each forward op, but for copies; where there are any."""
        self.spent = np.zeros((flat.slots, count))
        """Of what is made again or fetched in each slot, likewise."""

    def run(self) -> Levels:
        """Return the bytes at every position, and the seconds."""
        flat = self.flat
        forward, boundary = self._forward()
        self._recompute()
        slots, end = self._backward(boundary)
        update = end if flat.gradients.updates else end + flat.around.update
        if self.copies is not None:
            self.seconds += self.copies.use_seconds + self.copies.waits(self.storing, self.spent)
        return Levels(forward, slots, update, self.seconds, self.needed)

    # -- forward pass

    def _forward(self) -> tuple[Ints, Ints]:
        """The most during each forward op, and the level at the end."""
        flat = self.flat
        freed = ~self.kept & ~flat.is_output[:, None]
        net = np.repeat(flat.made[:, None], self.count, axis=1)
        if len(flat.values):
            lost = np.where(freed, flat.bytes[:, None], 0)[flat.by_freed]
            net[flat.freed_positions] -= np.add.reduceat(lost, flat.freed_starts, axis=0)
        for at in flat.plain:
            net[flat.used_last[flat.form_rows[at]]] += self.used[at] * flat.form_bytes[at]
        after = flat.base + np.cumsum(net, axis=0)
        leaving = None
        if self.copies is not None:
            held, leaving = self.copies.held_in_forward(len(after))
            after += held - leaving
            net += np.diff(held - leaving, axis=0, prepend=0)
        during = after - net + flat.forward_during[:, None]
        for at, over in flat.forward_overwrites:
            during[at] -= self._takes(over, freed) * flat.forward[at].taken
        if leaving is not None:
            np.maximum(during, after + leaving, out=during, where=leaving > 0)
        self._store(during, after, freed, leaving)
        end = after[-1] if len(after) else np.full(self.count, flat.base, dtype=np.int64)
        return during, end

    def _takes(self, rows: Sequence[int], freed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        takes = np.zeros(self.count, dtype=bool)
        for row in rows:
            here = freed[row]
            for at in self.flat.forms_of.get(row, ()):
                here = here & ~self.used[at]
            takes |= here if self.copies is None else here & ~self.copies.uses(row)
        return takes

    def _store(self, during: Ints, after: Ints, freed: npt.NDArray[np.bool_], leaving: Ints | None) -> None:
        """The level while plain forms are stored, after the op that reads each value last: worked out from the end."""
        flat = self.flat
        due: dict[int, list[int]] = {}
        for at in flat.plain:
            due.setdefault(int(flat.used_last[flat.form_rows[at]]), []).append(at)
        for position, forms in due.items():
            later = np.zeros(self.count, dtype=np.int64)
            """What changes between the store at hand and the end of the position."""
            if leaving is not None:
                later -= leaving[position]
            for row in np.flatnonzero(flat.written & (flat.freed_at == position)):
                later -= freed[row] * flat.bytes[row]
            stored_later: dict[int, Any] = {}
            """By row: which candidates store another form of the value after the one at hand."""
            for at in sorted(forms, key=lambda one: -flat.forms[one].kept):
                form, row, used = flat.forms[at], flat.form_rows[at], self.used[at]
                if not flat.written[row]:
                    here = freed[row] & used & ~stored_later.get(row, np.False_)
                    later -= (here if self.copies is None else here & ~self.copies.uses(row)) * flat.bytes[row]
                    stored_later[row] = stored_later.get(row, np.False_) | used
                level = after[position] - later + form.store_scratch
                np.maximum(during[position], level, out=during[position], where=used)
                later += used * flat.form_bytes[at]
                self.seconds += used * form.use_seconds
                self.storing[position] += used * form.store_seconds

    # -- what is made again

    def _recompute(self) -> None:
        flat = self.flat
        self.fetched = np.zeros((len(flat.plain), self.count), dtype=bool)
        self.frees = np.zeros((flat.slots, self.count), dtype=np.int64)
        """Bytes of forward values and kept forms that are freed by a slot's backward op."""
        if self.copies is not None:
            self.now += self.copies.taken_in_backward(flat.slots)
            np.maximum(self.top, self.now, out=self.top)
        for at, op in enumerate(flat.rerun):
            if any(row in self.again for row in op.makes):
                self._again(at)
            for form, row in flat.rebuilds_at[at]:
                if form in self.rebuilds:
                    self._rebuild(at, form, row)
        for row, forms in flat.fetches_of.items():
            for at in forms:
                self._fetch(at, row, np.flatnonzero(self.used[at] & self.needed[row] & ~self.fetched[at]))
        rows, some = np.nonzero((self.last % self.every == self.every - 1) & self.needed & ~flat.is_output[:, None])
        slots = self.last[rows, some] // self.every
        self.frees += np.bincount(
            slots * self.count + some, weights=flat.bytes[rows], minlength=self.frees.size
        ).reshape(self.frees.shape).astype(np.int64)  # fmt: skip

    def _again(self, at: int) -> None:
        """A forward op in the slots in which it runs again: several, where its results are needed apart."""
        made = [(row, self.again[row]) for row in self.flat.rerun[at].makes if row in self.again]
        for k, (_, slot) in enumerate(made):
            here = slot < NEVER
            for _, before in made[:k]:
                here &= before != slot
            some = np.flatnonzero(here)
            if len(some):
                wanted = [(row, other[some] == slot[some]) for row, other in made]
                self._run_again(at, self.flat.rerun[at], slot[some], some, wanted)

    def _rebuild(self, at: int, form: int, row: int) -> None:
        """Fetch a form with other operands, as if its op ran again, and free it where no op reads it later."""
        some = np.flatnonzero(self.rebuilds[form] < NEVER)
        slot = self.rebuilds[form][some]
        self._run_again(at, self.flat.rebuilt[form], slot, some, [(row, np.ones(len(some), dtype=bool))])
        self._free_form(form, slot.astype(np.int64), some)
        self.fetched[form][some] = True

    def _free_form(self, at: int, slot: Ints, some: Ints) -> None:
        """Free a kept form that was fetched, unless an op reads it later, which frees it then."""
        freed = self.flat.form_bytes[at] * (self.last_direct[at][some] < slot * self.every)
        self.now.ravel()[slot * self.count + some] -= freed

    def _run_again(
        self, at: int, op: ForwardOp, slot: Ints, some: Ints, wanted: Sequence[tuple[int, npt.NDArray[np.bool_]]]
    ) -> None:
        flat = self.flat
        for row in op.reads:
            for form in flat.fetches_of.get(row, ()):
                due = self.formed[form][some] & ~self.fetched[form][some] & (self.first[row][some] == slot)
                self._fetch(form, row, some[due])
        now, top = self.now.ravel(), self.top.ravel()
        place = slot.astype(np.int64) * self.count + some
        position = slot * self.every + at
        level = now[place]
        frees = np.zeros(len(some), dtype=np.int64)
        takes = np.zeros(len(some), dtype=bool)
        for row in op.reads:
            if not flat.is_output[row]:
                ends = self.last[row][some] == position
                frees += ends * flat.bytes[row]
                if row in op.overwrites:
                    takes |= ends
        first = op.makes[0]
        during = level + op.during
        if takes.any():
            for row, want in wanted:
                if row == first:
                    during -= (takes & want) * op.taken
        top[place] = np.maximum(top[place], during)
        made = sum((want * flat.bytes[row] for row, want in wanted), np.zeros(len(some), dtype=np.int64))
        now[place] = level + made - frees
        self.seconds[some] += op.op.seconds
        if self.copies is not None:
            self.spent.ravel()[place] += op.op.seconds
        for parameter in op.parameters:
            for give in flat.given_at[parameter]:
                self._give_again(give, parameter, position, place, some)

    def _give_again(self, at: int, parameter: int, position: Ints, place: Ints, some: Ints) -> None:
        """A gradient that had to wait for this op."""
        give = self.flat.gives[at]
        here = (self.parameter_last[parameter][some] == position) & (position > self._static(at))
        now, top, place = self.now.ravel(), self.top.ravel(), place[here]
        now[place] += give.copy
        top[place] = np.maximum(top[place], now[place] + give.transient)
        now[place] -= give.freed

    def _static(self, at: int) -> int:
        return self.flat.gives[at].slot * self.every + self.every - 1

    def _fetch(self, at: int, row: int, some: Ints) -> None:
        """Fetch a form that needs nothing else, just before the value is read."""
        if not len(some):
            return
        form, now, top = self.flat.forms[at], self.now.ravel(), self.top.ravel()
        slot = self.first[row][some].astype(np.int64)
        place, size = slot * self.count + some, int(self.flat.bytes[row])
        top[place] = np.maximum(top[place], now[place] + size + form.fetch_scratch)
        now[place] += size
        self._free_form(at, slot, some)
        self.fetched[at][some] = True
        self.seconds[some] += form.fetch_seconds
        if self.copies is not None:
            self.spent.ravel()[place] += form.fetch_seconds

    # -- backward pass

    def _backward(self, boundary: Ints) -> tuple[Ints, Ints]:
        """The most in each slot, and the level at the end."""
        flat = self.flat
        for at in flat.plain:
            direct = self.last_direct[at]
            ends = direct >= 0
            if flat.forms[at].whole:
                # Fetched at or before its last direct reader, that reader frees it; later, the fetch does.
                row = flat.form_rows[at]
                ends &= ~self.needed[row] | (direct >= self.first[row].astype(np.int64) * self.every)
            some = np.flatnonzero(ends)
            self.frees[direct[some] // self.every, some] += flat.form_bytes[at]
        takes = np.repeat(flat.taken[:, None], self.count, axis=1)
        for slot, row in flat.overwritten:
            takes[slot] |= self.last[row] == slot * self.every + self.every - 1
        given, most = self._give()
        net = self.now + flat.net[:, None] - self.frees
        end = boundary + np.cumsum(net + given, axis=0)
        begin = end - net - given
        taken = flat.first_result[:, None] - self.direct_saved
        run = self.now + flat.during[:, None] + self.slot_scratch - takes * taken
        slots = begin + np.maximum(np.maximum(self.top, run), net + most)
        return slots, end[-1]

    def _give(self) -> tuple[Ints, Ints]:
        """What the gradients that are given away change in each slot, and the most meanwhile."""
        flat = self.flat
        if not flat.waits:
            return flat.given[:, None], flat.given_most[:, None]
        every = np.ones(self.count, dtype=bool)
        net = np.zeros((flat.slots, self.count), dtype=np.int64)
        most = np.zeros((flat.slots, self.count), dtype=np.int64)
        for at, give in enumerate(flat.gives):
            here = every if give.parameter is None else self.parameter_last[give.parameter] <= self._static(at)
            net[give.slot] += here * give.copy
            level = net[give.slot] + give.transient
            np.maximum(most[give.slot], level, out=most[give.slot], where=here)
            net[give.slot] -= here * give.freed
        return net, most
