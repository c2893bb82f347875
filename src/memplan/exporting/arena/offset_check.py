"""Check the offsets of buffers independently of the search that chose them."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.errors import ScheduleError
from memplan.exporting.arena.lifetimes import Buffer


def check_offsets(buffers: Sequence[Buffer], offsets: Sequence[int], size: int) -> None:
    """Check that buffers lie in an arena of `size` bytes, aligned, and share no byte while both are live.

    Raises:
        ScheduleError: they do not.
    """
    for time in sorted({buffer.first for buffer in buffers}):
        live = [(offsets[n], offsets[n] + b.bytes, n) for n, b in enumerate(buffers) if b.first <= time <= b.last]
        end = 0  # of the buffer before
        for begin, stop, number in sorted(live):
            if begin < end or stop > size or begin % 4:
                raise ScheduleError(
                    f"buffer {number} lies from {begin} to {stop} in an arena of {size} bytes, where {end} bytes are "
                    f"taken at action {time}",
                    expected="buffers that share no byte while both are there",
                )
            end = stop
