"""Peak and added seconds of many choices at once, without building their schedules.

Arrays are over (rows, candidates); Python loops over ops only. A backward pass over the forward ops determines in which
slot each value is first and last needed, a forward pass counts the bytes of recomputed values within their slots, and
cumulative sums over slots give the levels. The result equals ``byte_levels.levels`` of each candidate's schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memplan._interrupts import safe_point
from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.search.batch_levels import Batch
from memplan.planning.search.candidates import Columns, Evaluated, Levels, Profile
from memplan.planning.search.flat_graph import FlatGraph, Ints

CHUNK = 512
"""Candidates that are evaluated together, so that their arrays stay in the processor's cache."""


LATEST_BYTES = 96 << 20
"""Host memory for the latest results."""


class Evaluator:
    """Evaluates choices on one graph. A candidate is a column of booleans: first whether each of
    ``flat.recomputable_values`` is recomputed, then whether each of ``flat.forms`` is used."""

    def __init__(
        self,
        graph: JointGraph,
        outside_memory: OutsideMemory | None = None,
        *,
        gradients: GradientUse = KEPT_UNTIL_UPDATE,
    ) -> None:
        outside_memory = OutsideMemory() if outside_memory is None else outside_memory
        self.flat = FlatGraph(graph, outside_memory, gradients)
        self.decision_count = len(self.flat.recomputable_values) + len(self.flat.forms)
        """Number of booleans of a candidate."""
        self._latest: dict[bytes, Levels] = {}
        """Results by digest of their candidates, those used last at the end."""

    def forget(self) -> None:
        """Free the memory of the latest results."""
        self._latest.clear()

    def column(self, choices: Choices) -> npt.NDArray[np.bool_]:
        """Return choices as a candidate, the inverse of `choices`."""
        flat = self.flat
        return np.array(
            [value in choices.recompute for value in flat.recomputable_values]
            + [(form.lever, form.value) in choices.saved_forms for form in flat.forms],
            dtype=bool,
        )

    def schedule_of(self, column: npt.NDArray[np.bool_]) -> Schedule:
        """Return the schedule of a candidate."""
        flat = self.flat
        value_bits, form_bits = np.split(column, [len(flat.recomputable_values)])
        drops = frozenset(value for value, chosen in zip(flat.recomputable_values, value_bits, strict=True) if chosen)
        chosen_forms = (form for form, chosen in zip(flat.forms, form_bits, strict=True) if chosen)
        forms = frozenset((form.lever, form.value) for form in chosen_forms)
        return schedule(flat.graph, Choices(drops, forms, flat.gradients, order=flat.graph.order))

    def choices(self, column: npt.NDArray[np.bool_]) -> Choices:
        """Return the choices of a candidate, without those that have no effect on its schedule."""
        flat, planned = self.flat, self.schedule_of(column)
        recomputed = {value for action in planned.backward if action.recomputed for value in action.makes}
        stored = (
            flat.graph.form_by_encoded[a.encoding]
            for a in planned.forward
            if a.kind == "store" and a.encoding is not None
        )
        saved_forms = frozenset((form.lever, form.value) for form in stored)
        return Choices(frozenset(recomputed), saved_forms, flat.gradients, order=flat.graph.order)

    def evaluate(self, columns: Columns, budget: int | Profile | None = None, *, squarings: int = 0) -> Evaluated:
        """Compute peak, added seconds and excess over the budget of every candidate.

        Args:
            columns: the candidates.
            budget: in bytes, the same for the whole step, or a profile with a budget for each position. None: excess is
                0.
            squarings: how many times the bytes over the budget are squared before they are summed.
        """
        count = columns.shape[1]
        peak, seconds = np.zeros(count, dtype=np.int64), np.zeros(count)
        excess, load = np.zeros(count), np.zeros(count)
        needed = np.zeros((len(self.flat.forward_values), count), dtype=bool)
        for start in range(0, count, CHUNK):
            safe_point()
            part = slice(start, min(start + CHUNK, count))
            batch = self._batch(columns[:, part])
            peak[part], seconds[part], load[part] = batch.peak, batch.seconds, batch.summed_bytes
            needed[:, part] = batch.is_needed
            if budget is not None:
                excess[part] = batch.excess(budget, squarings)
        return Evaluated(peak, seconds, excess, load, needed)

    def profiles(self, columns: Columns) -> list[Profile]:
        """Return the bytes at every position, a profile for each candidate."""
        profiles = list[Profile]()
        for start in range(0, columns.shape[1], CHUNK):
            batch = self._batch(columns[:, start : start + CHUNK])
            for index in range(len(batch.seconds)):
                profiles.append(Profile(batch.forward[:, index], batch.slots[:, index], int(batch.update[index])))
        return profiles

    def _batch(self, columns: Columns) -> Levels:
        """Return the bytes and seconds of candidates: all at once if the graph allows that, else schedule by schedule.

        The moves from a state are evaluated for one budget after the other, so the latest results are kept.
        """
        digest = hashlib.blake2b(columns.tobytes())
        digest.update(repr(columns.shape).encode())  # without decisions to make, all columns are of no bytes
        key = digest.digest()
        found = self._latest.pop(key, None)
        if found is None:
            found = Batch(self.flat, columns).run() if self.flat.supports_batches else _by_schedules(self, columns)
            while self._latest and sum(result.nbytes for result in self._latest.values()) + found.nbytes > LATEST_BYTES:
                del self._latest[next(iter(self._latest))]  # the one that was not used for longest
        self._latest[key] = found
        return found


def _by_schedules(evaluator: Evaluator, columns: Columns) -> Levels:
    """Return the result of `Batch.run` by building the schedule of every candidate: slow, for graphs that `Batch` does
    not support (`FlatGraph.supports_batches`)."""
    flat, parts, seconds = evaluator.flat, list[Sequence[Ints]](), list[float]()
    for column in columns.T:
        planned = schedule(flat.graph, evaluator.choices(column))
        planned_levels = levels(planned, flat.outside_memory)
        forward = np.zeros(len(flat.forward_ops), dtype=np.int64)
        slots = np.zeros(flat.slot_count, dtype=np.int64)
        ops_begun = 0
        for action, level in zip(planned.forward, planned_levels.forward, strict=True):
            ops_begun += action.kind == "run"
            position = max(ops_begun - 1, 0)  # of the action's op, or of the op before it
            forward[position] = max(forward[position], level)
        # a slot ends after its backward op, slot 0 after the tangents are received; gradients are returned before that
        slot, slot_op_ran = 0, False
        for action, level in zip(planned.backward, planned_levels.backward, strict=True):
            if slot_op_ran and action.kind != "give":
                slot, slot_op_ran = slot + 1, False
            slots[slot] = max(slots[slot], level)
            slot_op_ran = slot_op_ran or action.kind == "receive" or (action.kind == "run" and not action.recomputed)
        parts.append((forward, slots, np.array(planned_levels.update)))
        seconds.append(planned.seconds)
    forward, slots, update = (np.stack([part[k] for part in parts], axis=-1) for k in range(3))
    all_needed = np.ones((len(flat.forward_values), columns.shape[1]), dtype=bool)  # not computed here
    return Levels(forward, slots, update, np.array(seconds), all_needed)
