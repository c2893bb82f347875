"""A recorded run with its shortened loaders at their full length: what grows with each batch, grows to the end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from memplan.studies.runs.phases import PhaseSpan
from memplan.trace.program_facts import RunPart
from memplan.trace.records import HOST, HostKind, HostStorage, LoaderUse, Storage
from memplan.trace.trace import Trace

_MOST = 1_000_000
"""Storages at most that are added for a phase; those of more batches are joined to one each."""
_SCRATCH = ("temporary", "workspace")
_OF_WEIGHTS = ("weight", "buffer", "parameter_gradient", "optimizer_state")


@dataclass(frozen=True)
class _Period:
    """The last batches of a phase that make an update, or the last batch: what each further batch repeats."""

    start: int
    end: int
    """Ticks: it is ``start < tick <= end``."""
    recorded: tuple[tuple[Storage, ...], ...]
    """Storages allocated in it, in the period before, and so on: each at the same place. At least two periods."""
    batches: int
    last_batch: tuple[int, int]
    """Ticks ``start < tick <= end`` of the part that uses the last batch, if it comes after the period; else (0, 0)."""
    loads_ahead: bool
    """Whether that part uses a batch which was loaded before it began."""

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Return the storages allocated in it, in order."""
        return self.recorded[0]

    @property
    def length(self) -> int:
        """Return its ticks."""
        return self.end - self.start

    def size(self, place: int, repeat: int) -> int:
        """Return the bytes of a storage in a later period: constant, but where it grew by the same bytes twice."""
        last, before, *earlier = (period[place].bytes for period in self.recorded)
        grows = last > before and earlier and before - earlier[0] == last - before
        return last + repeat * (last - before) if grows else last

    def death(self, place: int, repeat: int, last: int) -> int | None:
        """Return when a storage is freed in the trace with ``last`` further periods.

        A storage that n periods follow is freed as the one which n recorded periods followed; if there were fewer, as
        the first recorded one.

        Args:
            place: of the storage in its period.
            repeat: number of its period: 0 for the last recorded one, -1 for the one before.
            last: number of the last period.
        """
        back = min(last - repeat, len(self.recorded) - 1)
        died = self.recorded[back][place].died
        if died is None or died > self.end:
            return None if died is None else died + last * self.length
        return died + (repeat + back) * self.length

    def is_kept(self, place: int) -> bool:
        """Return whether a storage of each period is kept beyond those recorded."""
        return _lives_after(self.recorded[-1][place], self.end)

    @property
    def kept(self) -> list[Storage]:
        """Return the storages that the first recorded period left and that are still allocated."""
        return [storage for place, storage in enumerate(self.recorded[-1]) if self.is_kept(place)]

    @property
    def growth(self) -> int:
        """Return their bytes."""
        return sum(storage.bytes for storage in self.kept)

    @property
    def grows(self) -> bool:
        """Return whether later periods keep more, or take more."""
        places = range(len(self.storages))
        return self.growth > 0 or any(self.size(place, 1) > self.storages[place].bytes for place in places)


def extended(
    trace: Trace, parts: Sequence[RunPart], spans: Sequence[PhaseSpan]
) -> tuple[Trace, dict[int, int]]:  # fmt: skip
    """Return the trace of a run with the batches that its shortened loaders left out.

    A further batch does what the last recorded one did: what that keeps, each keeps; a tensor that grew with every
    batch (predictions, concatenated) goes on growing. What is made of all batches after the last, by ops that keep
    their leading dimension, grows with their number.

    Args:
        trace: of the run, with a step a part.
        parts: of the run.
        spans: its phases.

    Returns:
        The trace, with the further batches at the end of the last recorded one of each phase; and number of a phase
        -> bytes by which it grows with each batch.
    """
    grown = dict[int, int]()
    for number, span in reversed(list(enumerate(spans))):  # the ticks of what comes before stay as they are
        period = _last_period(trace, parts, span) if span.is_cut else None
        if period is None or span.length is None:
            continue
        repeats = -((len(span.batches) - span.length) // period.batches)  # rounded up
        if not period.grows:
            repeats = min(repeats, int(span.last_share < 1))  # the last batch leaves less
        if repeats:
            trace = _inserted(trace, span, period, repeats)
        if period.grows and repeats:
            on_device = [s for s in period.kept if trace.device == HOST or s.device != HOST]
            grown[number] = sum(storage.bytes for storage in on_device) // period.batches
    return trace, grown


def _last_period(trace: Trace, parts: Sequence[RunPart], span: PhaseSpan) -> _Period | None:
    """Return the last period of a phase that its further batches repeat.

    The part of the last batch can include what the script does next: where the loader fetches one batch ahead, or the
    loop stops at the loader's length. Then the period before it is the last that others repeat.

    Returns:
        The period, or None if fewer than two were recorded, or batches differ.
    """
    updating = [place for place, number in enumerate(span.active) if parts[number].updates]
    size = updating[-1] - ([-1, *updating][-2]) if updating else 1
    last = updating[-1] if updating else len(span.active) - 1
    candidates = (_period_at(trace, parts, span, place, size) for place in (last, last - size))
    return next((period for period in candidates if period is not None), None)


def _period_at(trace: Trace, parts: Sequence[RunPart], span: PhaseSpan, last: int, size: int) -> _Period | None:
    """Return the period of ``size`` active parts that ends with the one at ``last``; None if it is not alike the one
    before."""
    active = span.active
    if last + 1 < 2 * size or parts[active[last]].exhausted:
        return None
    interrupting = set(range(active[last + 1 - 2 * size], active[last] + 1)) - set(span.parts)
    if any(parts[number].kind != "generate" for number in interrupting):
        return None
    places = [place for place in range(last, -2, -size) if last - place <= 3 * size]
    ticks = [_end(trace, active[place]) if place >= 0 else trace.steps[active[0]] for place in places]
    periods = [_born(trace, start, end) for end, start in pairwise(ticks)]
    alike = list(takewhile(lambda period: _alike(trace, periods[0], period), periods))
    if len(alike) < 2:
        return None
    after = active[last - size] if last >= size else -1
    batches = sum(after < number <= active[last] for number in span.batches)
    is_ahead = parts[active[-1]].exhausted and len(active) == len(span.batches)  # the request that finds none is early
    repeats_nothing = last < len(active) - 1 and (is_ahead or not parts[active[-1]].exhausted)
    last_batch = (trace.steps[active[-1]], _end(trace, active[-1])) if repeats_nothing else (0, 0)
    return _Period(ticks[1], ticks[0], tuple(alike), max(batches, 1), last_batch, is_ahead)


def _end(trace: Trace, part: int) -> int:
    """Return the tick at which a part ends."""
    return trace.steps[part + 1] if part + 1 < len(trace.steps) else trace.end


def _of_last_load(trace: Trace, start: int, end: int) -> Iterator[Storage]:
    """Yield the storages that were allocated while the last batch before ``end`` was loaded, and those computed
    from them, all at ticks ``start < tick <= end``."""
    batch = set[int]()
    loads = [max((load for load in use.loads if load[1] <= end), default=(0, 0)) for use in trace.loaders]
    for storage in _born(trace, start, end):
        read = () if storage.op is None else trace.ops[storage.op].reads
        is_loaded = any(begun < storage.born <= done for begun, done in loads)
        if is_loaded or any(operand.storage in batch for operand in read):
            batch.add(storage.id)
            yield storage


def _born(trace: Trace, start: int, end: int) -> tuple[Storage, ...]:
    """Return the storages allocated at ticks ``start < tick <= end``, in order."""
    return tuple(sorted((s for s in trace.storages if start < s.born <= end), key=lambda storage: storage.born))


def _alike(trace: Trace, one: Sequence[Storage], other: Sequence[Storage]) -> bool:
    """Return whether the same ops allocated them, in the same order."""
    name = lambda storage: None if storage.op is None else trace.ops[storage.op].name  # noqa: E731
    return len(one) == len(other) and all(name(a) == name(b) for a, b in zip(one, other, strict=True))


def _lives_after(storage: Storage, tick: int) -> bool:
    return storage.died is None or storage.died > tick


def _inserted(trace: Trace, span: PhaseSpan, period: _Period, repeats: int) -> Trace:
    """Return the trace with further periods after the last: storages and calls of the allocator, no ops."""
    length = period.length
    shown = min(repeats, _MOST // max(len(period.storages), 1))
    shift = shown * length
    later = lambda tick: tick + shift if tick > period.end else tick  # noqa: E731
    storages = [
        replace(s, born=later(s.born), died=None if s.died is None else later(s.died)) for s in trace.storages
    ]  # fmt: skip
    if any(period.last_batch):
        last = _born(trace, *period.last_batch)
        kept = {storage.id for storage in last if _lives_after(storage, period.last_batch[1])}
        loaded = list(_of_last_load(trace, period.start, period.last_batch[0])) if period.loads_ahead else []
        shares = _last_shares(trace, span, last, kept) | _last_shares(trace, span, loaded, set())
        smaller = {number: share for number, share in shares.items() if trace.storages[number].born <= period.end}
        for number, share in shares.items():
            if number not in smaller:
                storages[number] = replace(storages[number], bytes=round(storages[number].bytes * share))
    else:
        kept = {storage.id for place, storage in enumerate(period.storages) if period.is_kept(place)}
        smaller = _last_shares(trace, span, period.storages, kept, period.batches)
    for back, recorded in enumerate(period.recorded[:-1]):
        for place, storage in enumerate(recorded):
            storages[storage.id] = replace(storages[storage.id], died=period.death(place, -back, shown))
    added: list[Storage] = []
    expected = {size.storage: size for size in trace.expected}
    more_expected = []
    kinds: dict[int, HostKind] = {entry.storage: entry.kind for entry in trace.host}
    more_host: list[HostStorage] = []
    for place, storage in enumerate(period.storages):
        for repeat in range(1, shown + 1):
            died = period.death(place, repeat, shown)
            size = period.size(place, repeat)
            if repeat == shown == repeats:
                size = round(size * smaller.get(storage.id, 1))
            new = len(trace.storages) + len(added)
            added.append(replace(storage, id=new, bytes=size, born=storage.born + repeat * length, died=died))
            if storage.id in kinds:
                more_host.append(HostStorage(new, kinds[storage.id]))
            if storage.id in expected:
                more_expected.append(replace(expected[storage.id], storage=new))
    for place, first in enumerate(period.recorded[-1]) if shown < repeats else ():
        if period.is_kept(place):  # as long as the first: variables of the script hold the last batch for longer
            size, end = (repeats - shown) * first.bytes, None if first.died is None else later(first.died)
            new = len(trace.storages) + len(added)
            added.append(replace(first, id=new, bytes=size, born=period.end + shift, died=end))
            if first.id in kinds:
                more_host.append(HostStorage(new, kinds[first.id]))
    gathered = _gathered(trace, span, period, repeats)
    for number, size in gathered.items():
        storages[number] = replace(storages[number], bytes=size)
    calls = [replace(call, tick=later(call.tick)) for call in trace.calls]
    calls += [
        replace(call, tick=call.tick + repeat * length)
        for call in trace.calls if period.start < call.tick <= period.end
        for repeat in range(1, shown + 1)
    ]  # fmt: skip
    return replace(
        trace,
        storages=(*storages, *added),
        ops=tuple(
            replace(op, start=later(op.start + 1) - 1, end=later(op.end)) if op.end > period.end else op
            for op in trace.ops
        ),
        steps=tuple(tick + shift if tick >= period.end else tick for tick in trace.steps),
        end=trace.end + shift,
        calls=tuple(sorted(calls, key=lambda call: call.tick)),
        passes=tuple(
            replace(entry, start=later(entry.start), end=later(entry.end)) for entry in trace.passes
        ),
        collected=tuple(map(later, trace.collected)),
        expected=(*trace.expected, *more_expected),
        host=(*trace.host, *more_host),
        loaders=tuple(_longer_use(use, period, shown, later) for use in trace.loaders),
        lines=(),
    )  # fmt: skip


def _last_shares(
    trace: Trace, span: PhaseSpan, storages: Sequence[Storage], kept: Set[int], batches: int = 1
) -> dict[int, float]:
    """Return storages -> share of their bytes that a smaller last batch allocates.

    What is proportional to the number of samples is smaller by as much. Of what is kept of each sample alone, such as
    the boxes that a detector finds in an image, there is nothing of the samples that are missing.
    """
    samples = span.batch_size
    shares = {storage.id: span.last_share for storage in storages if _of_batch(storage, samples)}
    if samples is None:
        return shares
    alike: dict[tuple[object, ...], list[int]] = {}
    for storage in storages:
        if storage.id in kept and storage.id not in shares and storage.op is not None:
            op = trace.ops[storage.op]
            alike.setdefault((op.name, op.layer, op.where), []).append(storage.id)
    for numbers in alike.values():
        if len(numbers) % (samples * batches) == 0:
            missing = round(len(numbers) / batches * (1 - span.last_share))
            shares |= dict.fromkeys(numbers[len(numbers) - missing :], 0.0)
    return shares


def _longer_use(use: LoaderUse, period: _Period, shown: int, later: Callable[[int], int]) -> LoaderUse:
    """Return what a loader holds, with the batches of ``shown`` further periods."""
    loads = [(later(start + 1) - 1, later(end)) for start, end in use.loads]
    loads += [
        (start + repeat * period.length, end + repeat * period.length)
        for start, end in use.loads if period.start <= start and end <= period.end
        for repeat in range(1, shown + 1)
    ]  # fmt: skip
    end = None if use.end is None else later(use.end)
    return replace(
        use, start=later(use.start), end=end, loads=tuple(sorted(loads)), exhausted=tuple(map(later, use.exhausted))
    )


def _of_batch(storage: Storage, samples: int | None) -> bool:
    """Return whether a storage's size is proportional to the number of samples in a batch."""
    if not storage.shape:
        return storage.cause in _SCRATCH
    return storage.cause not in _OF_WEIGHTS and storage.shape[0] == samples


def _gathered(trace: Trace, span: PhaseSpan, period: _Period, repeats: int) -> dict[int, int]:
    """Return storages -> bytes of what ops after the last batch make of the tensors that each batch kept: with all
    batches, their leading dimension is that much longer."""
    first, last = trace.steps[span.parts[0]], period.end
    kept = {s.id: s for s in trace.storages if first < s.born <= last and _lives_after(s, last)}
    ops = trace.ops[bisect_right(trace.ops, last, key=lambda op: op.end) :]
    made = {storage.op: storage for storage in trace.storages if storage.born > last and storage.op is not None}
    count = len(span.batches)
    further = repeats * period.batches - 1 + span.last_share
    missing = round((span.batch_size or 0) * (1 - span.last_share))
    sizes = dict[int, int]()
    shares = dict[int, float]()
    for op in ops:
        result = made.get(op.index)
        if result is None or not result.shape:
            continue
        pieces = {operand.storage for operand in op.reads}
        whole = [number for number in pieces & shares.keys() if trace.storages[number].shape[:1] == result.shape[:1]]
        joined = [trace.storages[operand.storage] for operand in op.reads]
        rows = sum(storage.shape[0] for storage in joined if storage.shape)
        joins = len(pieces & kept.keys()) >= min(count, 2)
        if whole:
            shares[result.id] = shares[whole[0]]
        elif joins and result.shape[0] in (rows, len(joined)):
            shares[result.id] = (count + further) / count
        elif joins and result.shape[0] == rows - missing:  # the script cut the last batch, as Accelerate does
            shares[result.id] = (count + further) / (count - 1 + span.last_share)
        if result.id in shares:
            sizes[result.id] = round(result.bytes * shares[result.id])
    return sizes
