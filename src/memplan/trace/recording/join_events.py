"""Joins the allocator's events of an unmodified run of a step to ops and storages of a run under a dispatch mode."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count, takewhile

from memplan import _torch
from memplan.trace.recording.align_runs import aligned, matched_calls, without_mode
from memplan.trace.recording.causes import StepParts
from memplan.trace.recording.followed.line_marks import on_events, time_of
from memplan.trace.recording.ledger import Entry
from memplan.trace.records import Form, FunctionLines, Op, Operand, Storage, View


@dataclass(frozen=True, slots=True)
class Joined:
    """The parts of a measured Trace, and what could not be joined.

    ``lost``: bytes of allocations that belong to no op and no tensor. ``outside``: bytes of tensors that existed
    before and that the step read. ``differing_calls``: names of calls that allocate differently under a dispatch mode.
    ``unpaired``: bytes that they allocate only without one.
    """

    parts: StepParts
    lost: int
    outside: int
    differing_calls: tuple[str, ...]
    unpaired: int


def join(
    parts: StepParts,
    entries: list[Entry],
    under_mode: _torch.Profile,
    unmodified: _torch.Profile,
    libraries: Callable[[str], bool] = lambda call: False,
    lines: tuple[FunctionLines, ...] = (),
) -> Joined:
    """Return a storage for each allocation of the unmodified run, with ticks of its allocator's events.

    Identity and cause come from the ledger entry at the same address and time in the run under a dispatch mode, as far
    as calls and allocations of the two runs match.

    Args:
        parts: of the run under the mode.
        entries: of its ledger.
        under_mode: its profile, with a mark for each op.
        unmodified: the profile of the run without a mode.
        libraries: returns whether a call's allocation without a tensor is a library's workspace.
        lines: followed functions of the unmodified run, on the clock of its marks.
    """
    under_mode = without_mode(under_mode)
    calls = matched_calls(under_mode, unmodified)
    events_under_mode, events = _Events(under_mode), _Events(unmodified)
    same = _same_allocations(events_under_mode, under_mode, events, unmodified, calls)
    numbers_under_mode = _allocation_numbers(
        entries, _on_clock(parts.ops, events_under_mode, under_mode.ranges), events_under_mode
    )
    # id of a ledger entry -> number of its allocation in the unmodified run, which becomes the storage's id
    number_of = {entry: same[number] for entry, number in numbers_under_mode.items() if number in same}
    ops = _on_clock(parts.ops, events, _op_ranges_of_unmodified_run(under_mode, unmodified, calls))
    op_of = _ops_of_calls(under_mode, unmodified, calls)
    steps = [events.tick(start) for start in _starts_of_steps(unmodified)]
    known = {number: parts.storages[entry] for entry, number in reversed(number_of.items())}  # the first entry counts
    paired, read = set(same.values()), {operand.storage for op in parts.ops for operand in op.reads}
    starts = [op.start for op in ops]
    storages: list[Storage] = []
    lost = 0
    for number, allocation in enumerate(events.allocations):
        storage = known.get(number)
        if storage is None:  # of no tensor that the dispatch mode saw
            next_op = bisect_left(starts, allocation.born)
            op = op_of.get(allocation.call, next_op if next_op < len(ops) else None)
            is_part_of_op = op is not None and events.is_freed_before_next(allocation, ops[op])
            is_workspace = allocation.call >= 0 and libraries(unmodified.calls[allocation.call].name)
            if not is_part_of_op and not is_workspace:
                lost += allocation.bytes
            storage = Storage(
                number, bytes=0, cause="workspace" if is_workspace else "temporary", born=0, died=None, op=op
            )
        storages.append(_with_allocation(storage, number, allocation, steps[0]))
    unpaired = [allocation for number, allocation in enumerate(events.allocations) if number not in paired]
    outside = [
        entry for entry in entries if entry.id in read and entry.op is None and entry.id not in numbers_under_mode
    ]
    joined = StepParts(
        ops=tuple(_renumbered(op, number_of) for op in ops),
        storages=tuple(storages),
        layers=tuple(
            replace(
                layer,
                weights=_renumbered_ids(layer.weights, number_of),
                buffers=_renumbered_ids(layer.buffers, number_of),
            )
            for layer in parts.layers
        ),
        steps=tuple(steps),
        end=len(events.times),
        forms=tuple(_renumbered_form(form, number_of) for form in parts.forms),
        returned=tuple(
            replace(module, tensors=_renumbered_views(module.tensors, number_of)) for module in parts.returned
        ),
        lines=on_events(lines, lambda mark: events.tick(time_of(unmodified, mark))),
    )
    return Joined(
        joined, lost, sum(entry.bytes for entry in outside), _names_of(unpaired, unmodified.calls),
        sum(allocation.bytes for allocation in unpaired),
    )  # fmt: skip


STEP = "step"
"""Prefix of the profiler mark at which a step begins; the step's number follows."""


def _starts_of_steps(unmodified: _torch.Profile) -> list[int]:
    """Return the times in ns at which the steps of the unmodified run begin: those of its marks."""
    names = takewhile(unmodified.ranges.__contains__, (f"{STEP}{number}" for number in count()))
    return [unmodified.ranges[name][0] for name in names][:-1]  # the last mark is the end of the last step


def _with_allocation(storage: Storage, number: int, allocation: _Allocation, first_step: int) -> Storage:
    """Return the storage with number, size and lifetime of its allocation. ``first_step``: tick of its beginning."""
    cause = storage.cause
    if cause == "input" and allocation.died is not None and allocation.died <= first_step:
        cause = "temporary"  # freed while building, in the unmodified run
    born, died = allocation.born, allocation.died
    return replace(storage, id=number, cause=cause, bytes=allocation.bytes, born=born, died=died)


@dataclass(slots=True)
class _Allocation:
    """An allocation in the allocator's record. Ticks are positions among all of its events, from 1."""

    number: int
    """Its position among all allocations."""
    born: int
    bytes: int
    call: int
    """Index of the innermost call around it in the profile; -1 for none."""
    address: int
    """Negative if another thread allocated it."""
    died: int | None = None

    @property
    def is_of_other_thread(self) -> bool:
        return self.address < 0


class _Events:
    """The allocator's events of a profile as a clock: ticks count them from 1, without frees of older allocations."""

    def __init__(self, record: _torch.Profile) -> None:
        """Count the allocator's events of a profile from 1; the numbers are ticks."""
        self.allocations: list[_Allocation] = []
        self.times: list[int] = []
        """Time of each event in ns: tick t is the event at position t - 1."""
        self._by_address: dict[int, list[_Allocation]] = {}
        """By address: the allocations there, in order."""
        live: dict[int, _Allocation] = {}
        for address, size, time, _, call in record.events:
            if size < 0 and address not in live:  # frees what was allocated before the profile began
                continue
            self.times.append(time)
            tick = len(self.times)
            if size < 0:
                live.pop(address).died = tick
            else:
                live[address] = _Allocation(len(self.allocations), tick, size, call, address)
                self.allocations.append(live[address])
                self._by_address.setdefault(address, []).append(live[address])
        self._born_ticks = [allocation.born for allocation in self.allocations]
        """Tick of each allocation, in order."""

    def tick(self, time: int) -> int:
        """Return the tick of the last event up to a time in ns."""
        return bisect_right(self.times, time)

    def is_freed_before_next(self, allocation: _Allocation, op: Op) -> bool:
        """Return whether an allocation is freed before anything else is allocated after an op, so that it is a part of
        that op, such as a wrapped scalar."""
        if allocation.died is None:
            return False
        allocations_up_to_op = bisect_right(self._born_ticks, op.end)
        return allocations_up_to_op >= bisect_left(self._born_ticks, allocation.died)

    def find(self, address: int, tick: int) -> int | None:
        """Return the number of the allocation that is live at an address right after a tick; None if none is."""
        for allocation in reversed(self._by_address.get(address, ())):
            if allocation.born <= tick:
                return allocation.number if allocation.died is None or allocation.died > tick else None
        return None


def _same_allocations(
    events_under_mode: _Events,
    under_mode: _torch.Profile,
    events: _Events,
    unmodified: _torch.Profile,
    calls: dict[int, int],
) -> dict[int, int]:
    """Return number of an allocation under the mode -> number of the same allocation in the unmodified run.

    Allocations within matched calls match by size, in order. A call without a match counts as part of its parent.
    ``calls``: call under the mode -> matching call of the unmodified run, both as indices of the profiles' calls.
    """
    grouped_under_mode = _grouped_by_call(events_under_mode, under_mode.calls, set(calls))
    grouped_unmodified = _grouped_by_call(events, unmodified.calls, set(calls.values()))
    same: dict[int, int] = {}
    for call_under_mode, unmodified_call in calls.items():
        first, second = grouped_under_mode.get(call_under_mode, []), grouped_unmodified.get(unmodified_call, [])
        matches = aligned([allocation.bytes for allocation in first], [allocation.bytes for allocation in second])
        for index, other in matches:
            same[first[index].number] = second[other].number
    return same


def _grouped_by_call(events: _Events, calls: list[_torch.Call], among: set[int]) -> dict[int, list[_Allocation]]:
    """Return call -> the allocations whose innermost call in ``among`` it is. Calls are indices; -1: outside of all."""
    grouped: dict[int, list[_Allocation]] = {}
    for allocation in events.allocations:
        call = allocation.call
        while call not in among:
            call = calls[call].parent
        grouped.setdefault(call, []).append(allocation)
    return grouped


def _op_ranges_of_unmodified_run(
    under_mode: _torch.Profile, unmodified: _torch.Profile, calls: dict[int, int]
) -> dict[str, tuple[int, int]]:
    """Return mark of an op under the mode -> (start, end) of the op in the unmodified run, in ns. ``calls``: call under
    the mode -> matching call of the unmodified run, as indices."""
    ranges: dict[str, tuple[int, int]] = {}
    for number, call in enumerate(under_mode.calls):
        if call.at_mark and call.mark.isdigit() and number in calls and call.mark not in ranges:
            unmodified_call = unmodified.calls[calls[number]]
            ranges[call.mark] = unmodified_call.start, unmodified_call.end
    return ranges


def _ops_of_calls(under_mode: _torch.Profile, unmodified: _torch.Profile, calls: dict[int, int]) -> dict[int, int]:
    """Return call of the unmodified run -> index of the op that it is part of.

    A call that matches none of the run under the mode is part of its parent's op. ``calls``: call under the mode ->
    matching call of the unmodified run, both as indices of the profiles' calls.
    """
    op_of: dict[int, int] = {}
    for call_under_mode, unmodified_call in calls.items():
        if call_under_mode >= 0 and under_mode.calls[call_under_mode].mark.isdigit():
            op_of[unmodified_call] = int(under_mode.calls[call_under_mode].mark)
    for unmodified_call, record in enumerate(unmodified.calls):  # a call comes after its parent
        if unmodified_call not in op_of and record.parent in op_of:
            op_of[unmodified_call] = op_of[record.parent]
    return op_of


def _names_of(allocations: Iterable[_Allocation], calls: list[_torch.Call]) -> tuple[str, ...]:
    """Return the names of the allocations' outermost calls, most frequent first; of allocations outside of all calls,
    where they come from."""
    names: Counter[str] = Counter()
    for allocation in allocations:
        call = allocation.call
        while call >= 0 and calls[call].parent >= 0:
            call = calls[call].parent
        if call >= 0:
            names[calls[call].name.removeprefix("autograd::engine::evaluate_function: ")] += 1
        else:
            names["other threads" if allocation.is_of_other_thread else "Python"] += 1
    return tuple(name for name, _ in names.most_common())


def _on_clock(ops: Iterable[Op], events: _Events, ranges: dict[str, tuple[int, int]]) -> list[Op]:
    """Return the ops with start and end in ticks of ``events``.

    ``ranges``: mark of an op, its index -> (start, end) in ns. An op without a range spans no tick.
    """
    result: list[Op] = []
    end = 0
    for op in ops:
        start, range_of_op = end, ranges.get(str(op.index))
        if range_of_op is not None:
            start, end = events.tick(range_of_op[0]), events.tick(range_of_op[1])
        result.append(replace(op, start=start, end=end))
    return result


def _allocation_numbers(entries: list[Entry], ops: list[Op], events: _Events) -> dict[int, int]:
    """Return id of a ledger entry -> number of its allocation: that at its address when its op ended."""
    first_read: dict[int, int] = {}
    for op in ops:
        for read in op.reads:
            first_read.setdefault(read.storage, op.index)
    result: dict[int, int] = {}
    for entry in entries:
        # an entry without an op existed before the op that first read it
        op = entry.op if entry.op is not None else first_read.get(entry.id)
        if op is None:
            continue
        number = events.find(entry.address, ops[op].end if entry.op is not None else ops[op].start)
        if number is not None:
            result[entry.id] = number
    return result


def _renumbered(op: Op, number_of: dict[int, int]) -> Op:
    """Return the op with new numbers of its storages (``number_of``: old -> new), without those that have none."""
    reads = tuple(Operand(read.name, number_of[read.storage]) for read in op.reads if read.storage in number_of)
    return replace(op, reads=reads, writes=_renumbered_ids(op.writes, number_of))


def _renumbered_form(form: Form, number_of: dict[int, int]) -> Form:
    """Return the form with new numbers of its tensors' storages. ``number_of``: old -> new."""
    names = [name for name, _ in form.reads]
    views = _renumbered_views([view for _, view in form.reads], number_of)
    return replace(form, reads=tuple(zip(names, views, strict=True)), writes=_renumbered_views(form.writes, number_of))


def _renumbered_views(views: Iterable[View], number_of: dict[int, int]) -> tuple[View, ...]:
    """Return the views with new numbers of their storages (old -> new); a unique negative number if there is none."""
    return tuple(replace(view, storage=number_of.get(view.storage, -1 - view.storage)) for view in views)


def _renumbered_ids(storages: tuple[int, ...], number_of: dict[int, int]) -> tuple[int, ...]:
    """Return the new numbers of storages (old -> new), without those that have none."""
    return tuple(number_of[storage] for storage in storages if storage in number_of)
