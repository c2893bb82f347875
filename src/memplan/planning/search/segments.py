"""The forward pass cut at its narrow places, and for every segment some ways to treat its values.

A segment is a run of forward ops between two places that few values cross. Segments that repeat (the blocks of a
network) have the same ops, sizes and links: their values correspond, place by place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.candidates import Columns, Profile
from memplan.planning.search.flat_graph import FlatGraph, Ints

MOST = 64
"""Segments: where there are more, neighbours are merged."""
FEWEST = 4
"""Cuts at local minima: where there are fewer, it is cut at every step up or down."""
MERGES = (1, 2, 3, 4, 6, 8)
"""Of how many neighbouring segments only the last one's results are kept, in the variants that span several."""
GRADES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of the values of a segment, ordered by seconds per byte, how many are made again."""


Patch = tuple[Ints, npt.NDArray[np.bool_]]
"""Rows of a column, and their bits."""
Draft = tuple[int, int, Ints, npt.NDArray[np.bool_]]
"""First segment, the one after the last, and a patch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Forward ops, from ``start`` up to ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to treat the values of one or several neighbouring segments."""

    first: int
    stop: int
    """The segments that it covers."""
    rows: Ints
    """Of a column."""
    bits: npt.NDArray[np.bool_]
    saved: int
    """Bytes kept from the forward to the backward pass."""
    need: int
    """Bytes that are there, beyond what earlier segments keep, at the worst moment of these segments."""
    seconds: float


def segments(flat: FlatGraph, small: int = 0) -> list[Segment]:
    """Cut the forward pass where the fewest values cross: at the local minima of their number."""
    count = len(flat.forward)
    change = np.zeros(count + 1, dtype=np.int64)
    for row in np.flatnonzero(flat.bytes > small):
        change[flat.maker[row]] += 1
        change[flat.used_last[row]] -= 1
    crossing = np.cumsum(change)[:count]
    """Values made by then and still to be read, after each op."""
    runs, at = list[tuple[int, bool, bool]](), 0
    while at < count:
        end = at
        while end + 1 < count and crossing[end + 1] == crossing[at]:
            end += 1
        falls = at == 0 or crossing[at - 1] > crossing[at]
        rises = end + 1 == count or crossing[end + 1] > crossing[at]
        runs.append((at + 1, falls, rises))
        at = end + 1
    cuts = [cut for cut, falls, rises in runs if falls and rises and cut < count]
    if len(cuts) < FEWEST:
        # In a U-Net every level adds a value that crosses: its steps are as narrow as it gets.
        cuts = [cut for cut, falls, rises in runs if (falls or rises) and cut < count]
    stride = -(-len(cuts) // MOST) if cuts else 1
    edges = [0, *cuts[stride - 1 :: stride], count]
    return [Segment(a, b) for a, b in pairwise(edges) if a < b]


def repeated(flat: FlatGraph, parts: Sequence[Segment]) -> list[list[int]]:
    """Rows of the flat graph that correspond to each other in repeated segments; none that stands alone."""
    kinds: dict[tuple[object, ...], list[Segment]] = {}
    for part in parts:
        kinds.setdefault(_signature(flat, part), []).append(part)
    groups = list[list[int]]()
    for alike in kinds.values():
        if len(alike) > 1:
            made = [[row for op in flat.forward[part.start : part.stop] for row in op.makes] for part in alike]
            groups += [list(group) for group in zip(*made, strict=True)]
    return groups


def _signature(flat: FlatGraph, part: Segment) -> tuple[object, ...]:
    """What the ops are, what they make, and which earlier result of the segment each of them reads."""
    place: dict[int, int] = {}
    signature = list[object]()
    for op in flat.forward[part.start : part.stop]:
        reads = tuple(place.get(row, -1) for row in op.reads)
        signature.append((op.op.target, tuple(int(flat.bytes[row]) for row in op.makes), reads))
        place |= {row: len(place) + k for k, row in enumerate(op.makes)}
    return tuple(signature)


class Variants:
    """The variants of all segments of a graph; what each saves, needs and costs is evaluated with all else kept."""

    def __init__(self, evaluator: Evaluator, *, small: int) -> None:
        self.evaluator, self.flat, self.small = evaluator, evaluator.flat, small
        self.parts = segments(self.flat, small)
        flat = self.flat
        self.row = {int(row): at for at, row in enumerate(flat.drop_rows) if flat.bytes[row] > small}
        self.segment_of = np.zeros(len(flat.forward), dtype=np.int64)
        for k, part in enumerate(self.parts):
            self.segment_of[part.start : part.stop] = k
        self.slot_segment = self._slot_segments()
        kept = evaluator.evaluate(np.zeros((evaluator.rows, 1), dtype=bool))
        saved = np.where(kept.needed[:, 0] & ~flat.is_output, flat.bytes, 0)
        self.saved = np.zeros(len(self.parts), dtype=np.int64)
        np.add.at(self.saved, self.segment_of[flat.maker], saved)
        self.before = np.concatenate([[0], np.cumsum(self.saved)])

    def all(self) -> list[Variant]:
        """Every variant of every segment."""
        drafts = list[Draft]()
        for k in range(len(self.parts)):
            drafts += [(k, k + 1, *patch) for patch in self._own(k)]
            for span in MERGES:
                if k + span <= len(self.parts):
                    drafts.append((k, k + span, *self._ends_only(k, k + span)))
        columns = np.zeros((self.evaluator.rows, len(drafts)), dtype=bool)
        for at, (_, _, rows, bits) in enumerate(drafts):
            columns[rows, at] = bits
        return self._evaluated(drafts, columns)

    def _evaluated(self, drafts: Sequence[Draft], columns: Columns) -> list[Variant]:
        found = self.evaluator.evaluate(columns)
        profiles = self.evaluator.profiles(columns)
        kept = self.evaluator.profiles(np.zeros((self.evaluator.rows, 1), dtype=bool))[0]
        variants = list[Variant]()
        for at, (first, stop, rows, bits) in enumerate(drafts):
            saved = int(self.before[stop] - self.before[first]) + profiles[at].boundary - kept.boundary
            need = self._need(profiles[at], first, stop)
            variants.append(Variant(first, stop, rows, bits, saved, need, float(found.seconds[at])))
        return variants

    def _need(self, profile: Profile, first: int, stop: int) -> int:
        """The most in the segments' own ops and slots, less what earlier segments keep."""
        ahead = profile.forward[self.parts[first].start : self.parts[stop - 1].stop]
        slots = profile.slots[(self.slot_segment >= first) & (self.slot_segment < stop)]
        return int(max(ahead.max(initial=0), slots.max(initial=0)) - self.before[first])

    def _slot_segments(self) -> Ints:
        """For each slot, the last segment of which anything is read there or later."""
        flat = self.flat
        last = np.zeros(flat.slots, dtype=np.int64)
        for row, readers in enumerate(flat.readers):
            for slot in readers:
                last[slot] = max(last[slot], self.segment_of[flat.maker[row]])
        for slot, candidates in flat.direct:
            for _, row in candidates:
                last[slot] = max(last[slot], self.segment_of[flat.maker[row]])
        last[0] = len(self.parts) - 1
        return np.maximum.accumulate(last[::-1])[::-1]

    def _rows(self, first: int, stop: int) -> list[int]:
        """Rows of the forward values made in these segments that may be made again."""
        ops = self.flat.forward[self.parts[first].start : self.parts[stop - 1].stop]
        return [row for op in ops for row in op.makes if row in self.row]

    def _own(self, k: int) -> list[Patch]:
        """Of one segment: keep all; make again what is cheap for its bytes, in several grades."""
        flat, rows = self.flat, self._rows(k, k + 1)
        worth = [flat.rerun[flat.maker[row]].op.seconds / int(flat.bytes[row]) for row in rows]
        order = [rows[at] for at in np.argsort(worth, kind="stable")]
        counts = sorted({0, *(round(len(order) * grade) for grade in GRADES)})
        return [self._patch(rows, set(order[:count]), coded=count > 0) for count in counts]

    def _ends_only(self, first: int, stop: int) -> Patch:
        """Of several segments: keep only what later ones read."""
        rows, end = self._rows(first, stop), self.parts[stop - 1].stop
        return self._patch(rows, {row for row in rows if self.flat.used_last[row] < end}, coded=True)

    def _patch(self, rows: Sequence[int], dropped: set[int], *, coded: bool) -> Patch:
        """Bits of a column. ``coded``: with the plain forms of what is made again, and of what cannot be."""
        flat, drops = self.flat, len(self.flat.droppable)
        at = [self.row[row] for row in rows]
        bits = [row in dropped for row in rows]
        if coded and rows:
            low, high = min(flat.maker[row] for row in rows), max(flat.maker[row] for row in rows)
            for form in flat.plain:
                row = flat.form_rows[form]
                if low <= flat.maker[row] <= high and (row in dropped or row not in self.row):
                    at.append(drops + form)
                    bits.append(not flat.forms[form].whole or row not in self.row)
        return np.array(at, dtype=np.int64), np.array(bits, dtype=bool)
