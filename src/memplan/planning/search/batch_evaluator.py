"""Peak and added seconds of many choices at once, without building their schedules.

Arrays are over (rows, candidates); Python loops over ops only. A backward pass over the forward ops finds in which
slot each value is first and last needed there, a forward pass follows the bytes of what is made again within its
slot, and sums over slots give the rest. ``peaks.levels`` of ``schedule`` is the plain account of the same; the two are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import Surroundings
from memplan.planning.levers.lever import STAYS, GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.search.batch_copies import NEVER, Copies
from memplan.planning.search.flat_graph import FlatGraph, ForwardOp, Ints

Columns = npt.NDArray[np.bool_]
"""(decisions, candidates): which values are made again, then which kept forms are used."""

CHUNK = 512
"""Candidates that are evaluated together: what they need then stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One entry a candidate."""

    peak: Ints
    seconds: npt.NDArray[np.float64]
    excess: npt.NDArray[np.float64]
    """Bytes over the budget (or their squares) summed over all positions: what tells near misses apart, where the peak
    alone does not."""
    load: npt.NDArray[np.float64]
    """Bytes, summed over all positions: what tells apart how much of the room candidates leave."""
    needed: npt.NDArray[np.bool_]
    """(forward values, candidates): which values the backward pass needs in some way."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The levels of one candidate."""

    forward: Ints
    """The most during each forward op and what follows it before the next."""
    slots: Ints
    """The most during each slot of the backward pass."""
    update: int
    boundary: int

    def at_least(self, level: int) -> Profile:
        """With so many bytes at every position, or what there is where that is more."""
        return Profile(
            np.maximum(self.forward, level), np.maximum(self.slots, level), max(self.update, level),
            max(self.boundary, level),
        )  # fmt: skip


class Evaluator:
    """Evaluates choices on one graph. A candidate is a column of booleans: see `column` and `choices`."""

    def __init__(
        self, graph: JointGraph, surroundings: Surroundings | None = None, *, gradients: GradientUse = STAYS
    ) -> None:
        around = Surroundings() if surroundings is None else surroundings
        self.flat = FlatGraph(graph, around, gradients)
        self.rows = len(self.flat.droppable) + len(self.flat.forms)

    def column(self, choices: Choices) -> npt.NDArray[np.bool_]:
        """The candidate that stands for choices."""
        flat = self.flat
        return np.array(
            [value in choices.recompute for value in flat.droppable]
            + [(form.lever, form.value) in choices.kept_as for form in flat.forms],
            dtype=bool,
        )

    def choices(self, column: npt.NDArray[np.bool_]) -> Choices:
        """The choices that a candidate stands for; what makes no difference is left out."""
        flat = self.flat
        drops = frozenset(v for v, chosen in zip(flat.droppable, column, strict=False) if chosen)
        some = zip(flat.forms, column[len(flat.droppable) :], strict=True)
        kept = frozenset((form.lever, form.value) for form, chosen in some if chosen)
        made = schedule(flat.graph, Choices(drops, kept, flat.gradients))
        again = {value for action in made.backward if action.recomputed for value in action.makes}
        used = (flat.graph.form[a.form] for a in made.forward if a.kind == "store" and a.form is not None)
        return Choices(frozenset(again), frozenset((form.lever, form.value) for form in used), flat.gradients)

    def evaluate(self, columns: Columns, budget: int | Profile | None = None, *, squared: int = 0) -> Evaluated:
        """Peak, added seconds and excess over the budget of every candidate.

        Args:
            columns: the candidates.
            budget: in bytes; as a profile, one for each position.
            squared: so many times the bytes over the budget are squared before they are summed.
        """
        count = columns.shape[1]
        peak, seconds = np.zeros(count, dtype=np.int64), np.zeros(count)
        excess, load = np.zeros(count), np.zeros(count)
        needed = np.zeros((len(self.flat.values), count), dtype=bool)
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            batch = self._batch(columns[:, part])
            peak[part], seconds[part], load[part] = batch.peak, batch.seconds, batch.load
            needed[:, part] = batch.needed
            if budget is not None:
                excess[part] = batch.excess(budget, squared)
        return Evaluated(peak, seconds, excess, load, needed)

    def profiles(self, columns: Columns) -> list[Profile]:
        """The levels at every position of every candidate."""
        return [
            Profile(batch.forward[:, at], batch.slots[:, at], int(batch.update[at]), int(batch.boundary[at]))
            for start in range(0, columns.shape[1], CHUNK)
            for batch in [self._batch(columns[:, start : start + CHUNK])]
            for at in range(len(batch.seconds))
        ]

    def _batch(self, columns: Columns) -> _Levels:
        return _Batch(self.flat, columns).run() if self.flat.regular else _one_by_one(self, columns)


@dataclass(frozen=True, slots=True)
class _Levels:
    forward: Ints
    slots: Ints
    update: Ints
    boundary: Ints
    seconds: npt.NDArray[np.float64]
    needed: npt.NDArray[np.bool_]

    @property
    def peak(self) -> Ints:
        most = np.maximum(self.slots.max(axis=0), self.update)
        return np.maximum(most, self.forward.max(axis=0, initial=0))

    @property
    def load(self) -> npt.NDArray[np.float64]:
        return (self.forward.sum(axis=0) + self.slots.sum(axis=0)).astype(np.float64)

    def excess(self, budget: int | Profile, squared: int) -> npt.NDArray[np.float64]:
        if isinstance(budget, Profile):
            update, forward, slots = budget.update, budget.forward[:, None], budget.slots[:, None]
        else:
            update = forward = slots = budget
        total = np.zeros(len(self.seconds))
        for part in (self.update[None] - update, self.forward - forward, self.slots - slots):
            over = np.maximum(part, 0)
            if squared:
                over = over.astype(np.float64)
                for _ in range(squared):
                    over *= over
            total += over.sum(axis=0)
        return total


def _one_by_one(evaluator: Evaluator, columns: Columns) -> _Levels:
    """The same through schedules, for graphs with what the batch does not know."""
    flat, parts, seconds = evaluator.flat, list[Sequence[Ints]](), list[float]()
    for column in columns.T:
        made = schedule(flat.graph, evaluator.choices(column))
        found = levels(made, flat.around)
        forward = np.zeros(len(flat.forward), dtype=np.int64)
        slots = np.zeros(flat.slots, dtype=np.int64)
        at = 0
        for action, level in zip(made.forward, found.forward, strict=True):
            at = at + 1 if action.kind == "run" else at
            forward[max(at - 1, 0)] = max(forward[max(at - 1, 0)], level)
        slot, ended = 0, False
        for action, level in zip(made.backward, found.backward, strict=True):
            if ended and action.kind != "give":
                slot, ended = slot + 1, False
            slots[slot] = max(slots[slot], level)
            ended = ended or action.kind == "receive" or (action.kind == "run" and not action.recomputed)
        parts.append((forward, slots, np.array(found.update), np.array(found.boundary)))
        seconds.append(made.seconds)
    forward, slots, update, boundary = (np.stack([part[k] for part in parts], axis=-1) for k in range(4))
    everything = np.ones((len(flat.values), columns.shape[1]), dtype=bool)
    return _Levels(forward, slots, update, boundary, np.array(seconds), everything)


class _Batch:
    """One pass over the graph for some candidates."""

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
        self.seconds = np.zeros(count)
        self.first = np.full((len(flat.values), count), NEVER, dtype=np.int32)
        """Slot in which a value is first needed."""
        self.last = np.full((len(flat.values), count), -1, dtype=np.int32)
        """Position (slot * every + which) at which it is needed last."""
        self.parameter_last = {v: np.full(count, -1, dtype=np.int32) for v in flat.given_at}
        self.last_direct = np.full((len(flat.plain), count), -1, dtype=np.int32)
        self.slot_scratch = np.zeros((flat.slots, count), dtype=np.int64)
        self.direct_saved = np.zeros((flat.slots, count), dtype=np.int64)
        """Of ops that read a kept form: what they would have saved of their own scratch by working in place."""
        self.now = np.zeros((flat.slots, count), dtype=np.int64)
        """Bytes made less bytes freed so far within a slot, before its backward op."""
        self.top = np.zeros((flat.slots, count), dtype=np.int64)
        self.storing = np.zeros((len(flat.forward), count))
        """Seconds of what is stored after each forward op, but for copies; where there are any."""
        self.spent = np.zeros((flat.slots, count))
        """Of what is made again or fetched in each slot, likewise."""

    def run(self) -> _Levels:
        flat = self.flat
        self.find_needs()
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
        forward, boundary = self._forward()
        self._recompute()
        slots, end = self._backward(boundary)
        update = end if flat.gradients.updates else end + flat.around.update
        if self.copies is not None:
            self.seconds += self.copies.use_seconds + self.copies.waits(self.storing, self.spent)
        return _Levels(forward, slots, update, boundary, self.seconds, self.needed)

    # -- when is what needed

    def find_needs(self) -> None:
        """Fill ``first``, ``last`` and ``needed``."""
        self._needs_of_backward()
        for at in range(len(self.flat.forward) - 1, -1, -1):
            self._needs_of(at)
        self.needed = self.first < NEVER

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
