"""Peaks of the allocator's events, worked out by hand."""

from __future__ import annotations

from memplan import _torch
from memplan.integrations.watching.first_steps import peaks_of
from memplan.trace.recording.ledger import Entry


def event(address: int, size: int, time: int) -> _torch.MemoryEvent:
    return _torch.MemoryEvent(address, size, time, "", -1)


def there(address: int, size: int) -> Entry:
    return Entry(0, size, 1, None, "float32", (), address=address)


def test_peaks_and_levels_by_hand() -> None:
    events = [
        event(10, 100, 1), event(20, 50, 2), event(10, -100, 3),  # step 1: from 1000 up to 1150, down to 1050
        event(20, -50, 11), event(99, -7, 12), event(30, 30, 13),  # step 2: 99 was there before, and nobody counts it
        event(10, 5, 21),  # step 3: 400 of the first are gone when it begins
    ]  # fmt: skip
    before = [(there(1, 600), None), (there(2, 400), 2)]
    assert peaks_of(events, [10, 20, 30], before) == [(1150, 1050), (1050, 1030), (635, 635)]


def test_a_release_that_the_profiler_sees_counts_once() -> None:
    assert peaks_of([event(1, -600, 1)], [10], [(there(1, 600), None)]) == [(600, 0)]
