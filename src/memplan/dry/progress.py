"""Whether a process that has to load large libraries gets on, or hangs: by its time on processors and what it reads."""

from __future__ import annotations

import time
from pathlib import Path

STALLED = 10.0
"""Seconds without any progress after which a process counts as hanging: a slow disk or a busy machine is progress."""


class Progress:
    """Progress of a process, from the construction of this object on."""

    def __init__(self, process: int) -> None:
        """Read the counters of a process, named by its id, for the first time."""
        self._folder = Path("/proc", str(process))
        self._last_counts, self._changed_at = self._counts(), time.monotonic()
        """Counters of the process when it last made progress, and the monotonic time of that."""

    @property
    def hangs(self) -> bool:
        """Return whether nothing was counted for `STALLED` seconds, up to now."""
        counts, now = self._counts(), time.monotonic()
        if counts != self._last_counts:
            self._last_counts, self._changed_at = counts, now
        return now - self._changed_at > STALLED

    def _counts(self) -> tuple[str, ...]:
        """Return ticks in user mode, ticks in the kernel, and bytes read, as texts; () for a process that has ended.

        Source: proc_pid_stat(5), fields 14 and 15, and proc_pid_io(5), "rchar: BYTES" first.
        """
        try:
            from_third_field = (self._folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            read = (self._folder / "io").read_text(encoding="utf-8").split()
        except OSError:
            return ()
        return from_third_field[11], from_third_field[12], read[1]
