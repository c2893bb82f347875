"""Check addresses independently: slow and obvious, by a map of the arena's bytes at every action."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.errors import ScheduleError
from memplan.exporting.arena.lifetimes import Buffer


def check_offsets(buffers: Sequence[Buffer], offsets: Sequence[int], size: int) -> None:
    """Raise ScheduleError where two buffers that are there at once share a byte, or one leaves the arena."""
    events = sorted({one.first for one in buffers})
    for at in events:
        there = [
            (offsets[n], offsets[n] + one.bytes, n) for n, one in enumerate(buffers) if one.first <= at <= one.last
        ]
        end = 0
        for begin, stop, number in sorted(there):
            if begin < end or stop > size or begin % 4:
                raise ScheduleError(
                    f"buffer {number} lies from {begin} to {stop} in an arena of {size} bytes, where {end} bytes are "
                    f"taken at action {at}",
                    expected="buffers that share no byte while both are there",
                )
            end = stop
