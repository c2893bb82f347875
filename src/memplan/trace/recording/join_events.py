"""What the allocator saw, joined to what the dispatch mode saw."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memplan import _torch
from memplan.trace.recording.causes import Finished
from memplan.trace.recording.ledger import Entry
from memplan.trace.records import Form, Layer, Op, Operand, Returned, Storage, View


@dataclass(frozen=True, slots=True)
class Joined:
    """The parts of a measured Trace. ``lost`` are bytes of allocations that no op and no tensor explains."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    layers: tuple[Layer, ...]
    steps: tuple[int, ...]
    end: int
    lost: int
    forms: tuple[Form, ...]
    returned: tuple[Returned, ...]


def join(parts: Finished, entries: list[Entry], record: _torch.Profile, steps: int) -> Joined:
    """Return one storage for each of the allocator's allocations, on the clock of the allocator's events.

    Identity and cause come from the ledger's entry that lay at the same address at the same time.
    """
    events = _Events(record)
    ops = _on_clock(parts.ops, events, record)
    number_of = _numbers(entries, ops, events)
    tick = [events.tick(record.ranges[f"step{number}"][0]) for number in range(steps)]
    known = {number: parts.storages[entry] for entry, number in reversed(number_of.items())}
    storages: list[Storage] = []
    lost = 0
    for number, allocation in enumerate(events.allocations):
        op = int(allocation.mark) if allocation.mark.isdigit() else None
        storage = known.get(number)
        if storage is None:
            inside = op is not None and allocation.died is not None and allocation.died <= ops[op].end
            lost += 0 if inside else allocation.bytes
            storage = Storage(number, 0, "temporary", 0, None, op)
        cause = storage.cause
        if cause == "input" and allocation.died is not None and allocation.died <= tick[0]:
            cause = "temporary"
        storages.append(
            replace(
                storage,
                id=number,
                cause=cause,
                bytes=allocation.bytes,
                born=allocation.born,
                died=allocation.died,
            )
        )
    return Joined(
        tuple(_renumbered(op, number_of) for op in ops),
        tuple(storages),
        tuple(
            replace(layer, weights=_all(layer.weights, number_of), buffers=_all(layer.buffers, number_of))
            for layer in parts.layers
        ),
        tuple(tick),
        len(events.times),
        lost,
        tuple(_form(form, number_of) for form in parts.forms),
        tuple(replace(one, tensors=_views(one.tensors, number_of)) for one in parts.returned),
    )


@dataclass(slots=True)
class _Allocation:
    """One allocation as the allocator saw it; ticks are positions among all of its events, from 1."""

    number: int
    born: int
    bytes: int
    mark: str
    died: int | None = None


class _Events:
    """The allocator's events, numbered from 1, without the release of what was there before."""

    def __init__(self, record: _torch.Profile) -> None:
        self.allocations: list[_Allocation] = []
        self.times: list[int] = []
        self._by_address: dict[int, list[_Allocation]] = {}
        live: dict[int, _Allocation] = {}
        for address, size, time, mark in record.events:
            if size < 0 and address not in live:
                continue
            self.times.append(time)
            tick = len(self.times)
            if size < 0:
                live.pop(address).died = tick
            else:
                live[address] = _Allocation(len(self.allocations), tick, size, mark)
                self.allocations.append(live[address])
                self._by_address.setdefault(address, []).append(live[address])

    def tick(self, time: int) -> int:
        """Tick of the last event before a time in ns."""
        return bisect_right(self.times, time)

    def find(self, address: int, tick: int) -> int | None:
        """Return the allocation that lies at an address after a tick."""
        for allocation in reversed(self._by_address.get(address, ())):
            if allocation.born <= tick:
                return allocation.number if allocation.died is None or allocation.died > tick else None
        return None


def _on_clock(ops: list[Op], events: _Events, record: _torch.Profile) -> list[Op]:
    result: list[Op] = []
    tick = 0
    for op in ops:
        span = record.ranges.get(str(op.index))
        start, tick = (events.tick(span[0]), events.tick(span[1])) if span is not None else (tick, tick)
        result.append(replace(op, start=start, end=tick))
    return result


def _numbers(entries: list[Entry], ops: list[Op], events: _Events) -> dict[int, int]:
    """Entry -> allocation."""
    first_read: dict[int, int] = {}
    for op in ops:
        for read in op.reads:
            first_read.setdefault(read.storage, op.index)
    result: dict[int, int] = {}
    for entry in entries:
        # an entry without an op was first seen as the operand of an op, and was there before it
        op = entry.op if entry.op is not None else first_read.get(entry.id)
        if op is None:
            continue
        number = events.find(entry.address, ops[op].end if entry.op is not None else ops[op].start)
        if number is not None:
            result[entry.id] = number
    return result


def _renumbered(op: Op, number_of: dict[int, int]) -> Op:
    reads = tuple(Operand(r.name, number_of[r.storage]) for r in op.reads if r.storage in number_of)
    return replace(op, reads=reads, writes=_all(op.writes, number_of))


def _form(form: Form, number_of: dict[int, int]) -> Form:
    names, views = [name for name, _ in form.reads], _views([view for _, view in form.reads], number_of)
    return replace(form, reads=tuple(zip(names, views, strict=True)), writes=_views(form.writes, number_of))


def _views(views: Iterable[View], number_of: dict[int, int]) -> tuple[View, ...]:
    return tuple(replace(view, storage=number_of.get(view.storage, -1 - view.storage)) for view in views)


def _all(entries: tuple[int, ...], number_of: dict[int, int]) -> tuple[int, ...]:
    return tuple(number_of[entry] for entry in entries if entry in number_of)
