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
    # any two that overlap do so when the later one begins
    for time in sorted({buffer.first_action for buffer in buffers}):
        live = [
            (offsets[n], offsets[n] + b.bytes, n)
            for n, b in enumerate(buffers)
            if b.first_action <= time <= b.last_action
        ]
        previous_end = 0
        for begin, end, number in sorted(live):
            if begin < previous_end or end > size or begin % 4:
                raise ScheduleError(
                    f"buffer {number} lies from {begin} to {end} in an arena of {size} bytes, where {previous_end} "
                    f"bytes are taken at action {time}",
                    expected="buffers that share no byte while both are there",
                )
            previous_end = end
