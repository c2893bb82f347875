"""The file of a rank's watch, written while the watch runs, so that it exists if the rank is killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from memplan.errors import MemplanError
from memplan.studies.watched.watched import RankWatch, files_in, name_of, summary, watched_ranks

_INTERVAL = 10.0
"""Seconds between two writes at least, except at events (a prediction, an error, the end)."""


class RankFile:
    """Writes the results of a rank's watch to ``rank3.json`` in a folder. The file is replaced as a whole."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the folder if it does not exist."""
        self.folder = folder
        self._path = folder / name_of(rank)
        """The file of this rank."""
        self._written = 0.0
        """Monotonic time of the last write."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, content: Callable[[], RankWatch], *, now: bool = False) -> None:
        """Write the result of ``content``, unless the last write was less than 10 s ago and it need not be ``now``.

        A folder that can no longer be written to (a full disk) does not end the training.
        """
        if now or time.monotonic() - self._written >= _INTERVAL:
            with contextlib.suppress(OSError):
                content().save(self._path)
            self._written = time.monotonic()

    def others(self) -> list[str]:
        """Return the summary of all ranks, as sentences, if this rank is the last to end; else []."""
        try:
            ranks = watched_ranks(self.folder)
        except (MemplanError, OSError):  # a file of an earlier training
            return []
        complete = len(ranks.rows) == ranks.world > 1 and all(row.watch.state != "running" for row in ranks.rows)
        if not complete:
            return []
        last = max(files_in(self.folder), key=lambda path: (path.stat().st_mtime_ns, path))
        return summary(ranks) if last == self._path else []
