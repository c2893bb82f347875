"""Live bytes of storages over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from memplan.trace.records import Storage


def live_bytes(
    storages: Iterable[Storage], size: Callable[[Storage], int] = lambda storage: storage.bytes
) -> Iterator[tuple[int, int]]:
    """Yield (tick, live bytes right after it) for each allocation and free of the storages, in order.

    ``size``: returns the bytes of a storage; by default as requested.
    """
    changes = list[tuple[int, int]]()
    for storage in storages:
        changes.append((storage.born, size(storage)))
        if storage.died is not None:
            changes.append((storage.died, -size(storage)))
    level = 0
    for tick, change in sorted(changes):
        level += change
        yield tick, level


def peak_live_bytes(storages: Iterable[Storage]) -> int:
    """Return the peak of the live (requested) bytes of storages."""
    return max((level for _, level in live_bytes(storages)), default=0)
