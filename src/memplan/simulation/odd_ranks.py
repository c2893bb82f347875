"""Compare the memory of ranks with the median of all ranks, in total and by owner (a line of code, a layer)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_RANK = re.compile(r"rank[_-]?(\d{1,6})", re.IGNORECASE)
_LEAST, _SHARE = 1 << 20, 0.01


def median(sizes: Sequence[int]) -> int:
    """Return the lower median: for two ranks the smaller size, so that the larger is `is_odd`."""
    return statistics.median_low(sizes)


def is_odd(size: int, median_size: int) -> bool:
    """Return whether a rank's bytes are at least 1 MiB and 1 % above the median of all ranks."""
    return size - median_size >= max(_LEAST, _SHARE * median_size)


def beyond_median(sizes: Mapping[int, Mapping[_Key, int]]) -> dict[int, list[tuple[_Key, int, int]]]:
    """Return the owners of memory (lines, layers) whose bytes on a rank differ from the median of all ranks.

    Args:
        sizes: rank -> owner -> bytes.

    Returns:
        Rank -> (owner, bytes, bytes minus the median), the largest difference first; negative below the median.

    Example:
        >>> beyond_median({0: {"a.py:3": 10}, 1: {"a.py:3": 10}, 2: {"a.py:3": 10, "a.py:9": 7}})[2]
        [('a.py:9', 7, 7)]
    """
    owners = dict.fromkeys(owner for by_owner in sizes.values() for owner in by_owner)
    medians = {owner: median([by_owner.get(owner, 0) for by_owner in sizes.values()]) for owner in owners}
    result: dict[int, list[tuple[_Key, int, int]]] = {}
    for rank, by_owner in sizes.items():
        rows = [(owner, by_owner.get(owner, 0), by_owner.get(owner, 0) - usual) for owner, usual in medians.items()]
        result[rank] = sorted((row for row in rows if row[2]), key=lambda row: (-row[2], str(row[0])))
    return result


def rank_in_name(path: Path) -> int | None:
    """Return the rank in a file's name (3 for ``rank3_memory_snapshot.pickle``), or None."""
    numbers = _RANK.findall(path.name)
    return int(numbers[-1]) if numbers else None
