"""Extrapolation of a run that was recorded with shortened loaders to all batches of the loaders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from memplan.studies.runs.phases import PhaseSpan
from memplan.trace.program_facts import RunPart
from memplan.trace.records import HOST, ExpectedSize, HostKind, HostStorage, LoaderUse, Storage
from memplan.trace.trace import Trace

_MOST_ADDED = 1_000_000
"""Storages added for a phase at most; each storage that further batches keep becomes a single one for all of them."""
_SCRATCH = ("temporary", "workspace")
_OF_WEIGHTS = ("weight", "buffer", "parameter_gradient", "optimizer_state")

_Shift = Callable[[int], int]
"""Tick of the recorded trace -> tick of the extrapolated trace."""


@dataclass(frozen=True)
class _Period:
    """Recorded batches that the further batches of a phase repeat: from one update to the next, or a single batch."""

    start: int
    end: int
    """Ticks: the period is ``start < tick <= end``."""
    recorded: tuple[tuple[Storage, ...], ...]
    """Storages allocated in the period, in the period before, and so on; equal indices correspond. At least two."""
    batches: int
    last_batch: tuple[int, int]
    """Ticks ``start < tick <= end`` of the part with the last batch, if it comes after the period; else (0, 0)."""
    loads_ahead: bool
    """Whether the last batch was loaded before its part began."""

    @property
    def storages(self) -> tuple[Storage, ...]:
        return self.recorded[0]

    @property
    def ticks(self) -> int:
        return self.end - self.start

    def size_of(self, index: int, repeat: int) -> int:
        """Return the bytes of a storage in the ``repeat``-th further period: constant, unless it grew by the same bytes
        twice."""
        last, before, *earlier = (period[index].bytes for period in self.recorded)
        grows = last > before and earlier and before - earlier[0] == last - before
        return last + repeat * (last - before) if grows else last

    def freed_at(self, index: int, repeat: int, last: int) -> int | None:
        """Return the tick at which a storage is freed in a trace with ``last`` further periods.

        A storage with n periods after it is freed like the recorded storage with n periods after it; if n is larger
        than all recorded, like the first recorded storage.

        ``repeat``: number of its period: 0 for the last recorded period, -1 for the period before.
        """
        back = min(last - repeat, len(self.recorded) - 1)  # number of periods after it
        died = self.recorded[back][index].died
        if died is None:
            return None
        if died > self.end:  # after the phase, which is ``last`` periods longer
            return died + last * self.ticks
        return died + (repeat + back) * self.ticks

    def accumulates(self, index: int) -> bool:
        """Return whether the storage with this index of every period stays allocated."""
        return _outlives(self.recorded[-1][index], self.end)

    @property
    def accumulated(self) -> list[Storage]:
        """Storages of the first recorded period that are still allocated at the end of the last."""
        return [storage for index, storage in enumerate(self.recorded[-1]) if self.accumulates(index)]

    @property
    def grows(self) -> bool:
        """Whether memory grows with each period: storages accumulate, or become larger."""
        if any(storage.bytes for storage in self.accumulated):
            return True
        return any(self.size_of(index, repeat=1) > storage.bytes for index, storage in enumerate(self.storages))


def extrapolate(
    trace: Trace, parts: Sequence[RunPart], spans: Sequence[PhaseSpan]
) -> tuple[Trace, dict[int, int]]:  # fmt: skip
    """Return the trace of a run with the batches that its shortened loaders left out.

    Every further batch allocates and frees as the last recorded batch. Storages that each recorded batch left
    allocated accumulate; a tensor that grew with every batch (predictions, concatenated) goes on growing. Results of
    ops after the last batch that concatenate a tensor of each batch grow with the number of batches.

    Returns:
        The trace, with the further batches after the last recorded batch of each phase; and, by index of a phase, the
        bytes on the device by which it grows with each batch.
    """
    growth = dict[int, int]()
    for number, span in reversed(list(enumerate(spans))):  # backwards: the ticks of earlier phases do not change
        period = _last_period(trace, parts, span) if span.is_cut else None
        if period is None or span.length is None:
            continue
        repeats = -((len(span.batches) - span.length) // period.batches)  # batches left out, in periods rounded up
        if not period.grows:
            repeats = min(repeats, int(span.last_share < 1))  # a smaller last batch leaves less
        if repeats:
            trace = _repeat_period(trace, span, period, repeats)
        if period.grows and repeats:
            on_device = [s for s in period.accumulated if trace.device == HOST or s.device != HOST]
            growth[number] = sum(storage.bytes for storage in on_device) // period.batches
    return trace, growth


def _last_period(trace: Trace, parts: Sequence[RunPart], span: PhaseSpan) -> _Period | None:
    """Return the period of a phase to repeat: the last, or else the last but one.

    The part with the last batch can include what the script does after the loop, if the loader loads one batch ahead or
    the loop stops at the loader's length. Then the last period does not match the earlier ones.

    Returns:
        The period; None if fewer than two periods were recorded, or they differ.
    """
    updating = [index for index, number in enumerate(span.active) if parts[number].updates]
    last, size = len(span.active) - 1, 1  # without updates, a period is a single batch
    if updating:
        last = updating[-1]
        size = last - updating[-2] if len(updating) > 1 else last + 1
    return _period_at(trace, parts, span, last, size) or _period_at(trace, parts, span, last - size, size)


def _period_at(trace: Trace, parts: Sequence[RunPart], span: PhaseSpan, last: int, size: int) -> _Period | None:
    """Return the period of ``size`` active parts that ends with ``span.active[last]``.

    None if the period before it ran other ops, or if other phases interrupt the two.
    """
    active = span.active
    if last + 1 < 2 * size or parts[active[last]].exhausted:  # fewer than two periods
        return None
    interrupting = set(range(active[last + 1 - 2 * size], active[last] + 1)) - set(span.parts)
    if any(parts[number].kind != "generate" for number in interrupting):
        return None
    # the last parts of the period, of up to two before it, and of what comes before these (-1: nothing)
    last_parts = [index for index in range(last, -2, -size) if last - index <= 3 * size]
    ticks = [_end_of_part(trace, active[index]) if index >= 0 else trace.steps[active[0]] for index in last_parts]
    periods = [_allocated_between(trace, start, end) for end, start in pairwise(ticks)]
    matching = list(takewhile(lambda period: _same_ops(trace, periods[0], period), periods))
    if len(matching) < 2:
        return None
    after = active[last - size] if last >= size else -1
    batches = sum(after < number <= active[last] for number in span.batches)
    # the loader was exhausted before the last batch was used
    loads_ahead = parts[active[-1]].exhausted and len(active) == len(span.batches)
    ends_with_last_batch = last < len(active) - 1 and (loads_ahead or not parts[active[-1]].exhausted)
    last_batch = (trace.steps[active[-1]], _end_of_part(trace, active[-1])) if ends_with_last_batch else (0, 0)
    return _Period(ticks[1], ticks[0], tuple(matching), max(batches, 1), last_batch, loads_ahead)


def _end_of_part(trace: Trace, part: int) -> int:
    return trace.steps[part + 1] if part + 1 < len(trace.steps) else trace.end


def _last_loaded(trace: Trace, start: int, end: int) -> Iterator[Storage]:
    """Yield the storages of the last batch that was loaded before ``end``, and those computed from it, all allocated
    at ticks ``start < tick <= end``."""
    batch = set[int]()
    # (begin, end) of the last load of each loader
    loads = [max((load for load in use.loads if load[1] <= end), default=(0, 0)) for use in trace.loaders]
    for storage in _allocated_between(trace, start, end):
        read = () if storage.op is None else trace.ops[storage.op].reads
        is_loaded = any(begun < storage.born <= done for begun, done in loads)
        if is_loaded or any(operand.storage in batch for operand in read):
            batch.add(storage.id)
            yield storage


def _allocated_between(trace: Trace, start: int, end: int) -> tuple[Storage, ...]:
    """Return the storages allocated at ticks ``start < tick <= end``, in order."""
    return tuple(sorted((s for s in trace.storages if start < s.born <= end), key=lambda storage: storage.born))


def _same_ops(trace: Trace, a: Sequence[Storage], b: Sequence[Storage]) -> bool:
    """Return whether ops of the same names allocated two sequences of storages, one by one."""
    names = [[None if s.op is None else trace.ops[s.op].name for s in storages] for storages in (a, b)]
    return names[0] == names[1]


def _outlives(storage: Storage, tick: int) -> bool:
    return storage.died is None or storage.died > tick


def _repeat_period(trace: Trace, span: PhaseSpan, period: _Period, repeats: int) -> Trace:
    """Return the trace with ``repeats`` copies of a period after it: of its storages and calls of the allocator, not
    its ops.

    Ticks after the period shift. Sizes and frees that depend on the number of batches change.
    """
    copies = min(repeats, _MOST_ADDED // max(len(period.storages), 1))
    duration = copies * period.ticks

    def later(tick: int) -> int:
        """Return where a tick of the trace is after the copies are inserted."""
        return tick + duration if tick > period.end else tick

    storages = [
        replace(s, born=later(s.born), died=None if s.died is None else later(s.died)) for s in trace.storages
    ]  # fmt: skip
    shares = _shares_of_last_batch(trace, span, period)
    for number, share in shares.items():
        if trace.storages[number].born > period.end:  # of the recorded last batch
            storages[number] = replace(storages[number], bytes=round(storages[number].bytes * share))
    for back, recorded in enumerate(period.recorded[:-1]):  # these are freed later, with more periods after them
        for index, storage in enumerate(recorded):
            storages[storage.id] = replace(storages[storage.id], died=period.freed_at(index, -back, copies))
    for number, size in _concatenated_sizes(trace, span, period, repeats).items():
        storages[number] = replace(storages[number], bytes=size)
    added = _Copies(trace)
    added.add_periods(period, copies, shares if copies == repeats else {})
    if copies < repeats:
        added.add_accumulated(period, repeats - copies, period.end + duration, later)
    calls = [replace(call, tick=later(call.tick)) for call in trace.calls]
    calls += [
        replace(call, tick=call.tick + repeat * period.ticks)
        for call in trace.calls if period.start < call.tick <= period.end
        for repeat in range(1, copies + 1)
    ]  # fmt: skip
    return replace(
        trace,
        storages=(*storages, *added.storages),
        ops=tuple(
            replace(op, start=later(op.start + 1) - 1, end=later(op.end)) if op.end > period.end else op
            for op in trace.ops
        ),
        steps=tuple(tick + duration if tick >= period.end else tick for tick in trace.steps),
        end=trace.end + duration,
        calls=tuple(sorted(calls, key=lambda call: call.tick)),
        passes=tuple(
            replace(entry, start=later(entry.start), end=later(entry.end)) for entry in trace.passes
        ),
        collected=tuple(map(later, trace.collected)),
        expected=(*trace.expected, *added.expected),
        host=(*trace.host, *added.host),
        loaders=tuple(_repeat_loads(use, period, copies, later) for use in trace.loaders),
        lines=(),
    )  # fmt: skip


class _Copies:
    """Copies of a trace's storages, to be appended to it, with their expected sizes and kinds of host memory."""

    def __init__(self, trace: Trace) -> None:
        self.storages: list[Storage] = []
        """The copies."""
        self.expected: list[ExpectedSize] = []
        """Expected sizes of copies."""
        self.host: list[HostStorage] = []
        """Kinds of host memory of copies."""
        self._next_id = len(trace.storages)
        """Id of the next copy."""
        self._size_of = {size.storage: size for size in trace.expected}
        """Expected sizes in the trace, by storage."""
        self._kind_of: dict[int, HostKind] = {entry.storage: entry.kind for entry in trace.host}
        """Kinds of host memory in the trace, by storage."""

    def add_periods(self, period: _Period, number: int, shares: dict[int, float]) -> None:
        """Copy the storages of a period ``number`` times; in the last copy each has a share of its bytes."""
        for index, storage in enumerate(period.storages):
            for repeat in range(1, number + 1):
                size = period.size_of(index, repeat)
                if repeat == number:
                    size = round(size * shares.get(storage.id, 1))
                born = storage.born + repeat * period.ticks
                copy = self._add(storage, size, born, period.freed_at(index, repeat, number))
                if storage.id in self._size_of:
                    self.expected.append(replace(self._size_of[storage.id], storage=copy))

    def add_accumulated(self, period: _Period, number: int, tick: int, later: _Shift) -> None:
        """Allocate at a tick, as a single storage each, the accumulated storages of ``number`` periods."""
        for first in period.accumulated:  # freed as the first: variables of the script hold the last batch for longer
            self._add(first, number * first.bytes, tick, None if first.died is None else later(first.died))

    def _add(self, storage: Storage, size: int, born: int, died: int | None) -> int:
        """Append a copy of a storage with other bytes and ticks, and return its id."""
        copy, self._next_id = self._next_id, self._next_id + 1
        self.storages.append(replace(storage, id=copy, bytes=size, born=born, died=died))
        if storage.id in self._kind_of:
            self.host.append(HostStorage(copy, self._kind_of[storage.id]))
        return copy


def _shares_of_last_batch(trace: Trace, span: PhaseSpan, period: _Period) -> dict[int, float]:
    """Return by storage the share of its bytes that a smaller last batch allocates.

    The storages are those of the recorded last batch, if it comes after the period, else those of the period, which has
    the last batch in its last repetition.
    """
    if not any(period.last_batch):
        outliving = {storage.id for index, storage in enumerate(period.storages) if period.accumulates(index)}
        return _shares(trace, span, period.storages, outliving, period.batches)
    last = _allocated_between(trace, *period.last_batch)
    outliving = {storage.id for storage in last if _outlives(storage, period.last_batch[1])}
    loaded = list(_last_loaded(trace, period.start, period.last_batch[0])) if period.loads_ahead else []
    return _shares(trace, span, last, outliving) | _shares(trace, span, loaded, set())


def _shares(
    trace: Trace, span: PhaseSpan, storages: Sequence[Storage], outliving: Set[int], batches: int = 1
) -> dict[int, float]:
    """Return by storage the share of its bytes in a batch as small as the last.

    Storages proportional to the batch size are smaller by as much. Where an op has allocated as many storages as there
    are samples, such as the boxes that a detector finds in each image, those of the missing samples have 0 bytes.

    ``outliving``: ids of the storages that outlive their batch. ``batches``: number of batches that allocated
    ``storages``.
    """
    samples = span.batch_size
    shares = {storage.id: span.last_share for storage in storages if _is_proportional(storage, samples)}
    if samples is None:
        return shares
    by_op: dict[tuple[object, ...], list[int]] = {}
    for storage in storages:
        if storage.id in outliving and storage.id not in shares and storage.op is not None:
            op = trace.ops[storage.op]
            by_op.setdefault((op.name, op.layer, op.where), []).append(storage.id)
    for numbers in by_op.values():
        if len(numbers) % (samples * batches) == 0:
            missing = round(len(numbers) / batches * (1 - span.last_share))
            shares |= dict.fromkeys(numbers[len(numbers) - missing :], 0.0)
    return shares


def _repeat_loads(use: LoaderUse, period: _Period, copies: int, later: _Shift) -> LoaderUse:
    """Return the use of a loader in a trace with copies of a period. ``later``: shifts a tick after the period."""
    loads = [(later(start + 1) - 1, later(end)) for start, end in use.loads]
    loads += [
        (start + repeat * period.ticks, end + repeat * period.ticks)
        for start, end in use.loads if period.start <= start and end <= period.end
        for repeat in range(1, copies + 1)
    ]  # fmt: skip
    end = None if use.end is None else later(use.end)
    return replace(
        use, start=later(use.start), end=end, loads=tuple(sorted(loads)), exhausted=tuple(map(later, use.exhausted))
    )


def _is_proportional(storage: Storage, samples: int | None) -> bool:
    """Return whether a storage's size is proportional to the number of samples in a batch.

    Temporaries and workspaces without a shape are assumed to be.
    """
    if not storage.shape:
        return storage.cause in _SCRATCH
    return storage.cause not in _OF_WEIGHTS and storage.shape[0] == samples


def _concatenated_sizes(trace: Trace, span: PhaseSpan, period: _Period, repeats: int) -> dict[int, int]:
    """Return by storage the new bytes of results of ops after the last batch that grow with the number of batches.

    These concatenate a tensor of each batch, or have the same leading dimension as such a result.
    """
    first, last = trace.steps[span.parts[0]], period.end
    of_batches = {s.id for s in trace.storages if first < s.born <= last and _outlives(s, last)}
    ops = trace.ops[bisect_right(trace.ops, last, key=lambda op: op.end) :]
    results = {storage.op: storage for storage in trace.storages if storage.born > last and storage.op is not None}
    count = len(span.batches)  # recorded
    further = repeats * period.batches - 1 + span.last_share  # batches that are not, the last as a share
    missing = round((span.batch_size or 0) * (1 - span.last_share))
    factors = dict[int, float]()  # by storage: new bytes over recorded bytes
    for op in ops:
        result = results.get(op.index)
        if result is None or not result.shape:
            continue
        operands = [trace.storages[operand.storage] for operand in op.reads]
        pieces = {operand.id for operand in operands}
        scaled = [number for number in pieces & factors.keys() if trace.storages[number].shape[:1] == result.shape[:1]]
        rows = sum(storage.shape[0] for storage in operands if storage.shape)
        concatenates = len(pieces & of_batches) >= min(count, 2)  # it reads a tensor of each batch
        if scaled:
            factors[result.id] = factors[scaled[0]]
        elif concatenates and result.shape[0] in (rows, len(operands)):
            factors[result.id] = (count + further) / count
        elif concatenates and result.shape[0] == rows - missing:  # the script cut the last batch, as Accelerate does
            factors[result.id] = (count + further) / (count - 1 + span.last_share)
    return {number: round(trace.storages[number].bytes * factor) for number, factor in factors.items()}
