"""Which of several ranks holds more than the others, and what it holds more of."""

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
    """Return the lower median: of two ranks the smaller one, so that the other is the odd one."""
    return statistics.median_low(sizes)


def is_odd(size: int, usual: int) -> bool:
    """Return whether a rank holds at least 1 MiB and 1 % more than the median of all."""
    return size - usual >= max(_LEAST, _SHARE * usual)


def beyond_median(held: Mapping[int, Mapping[_Key, int]]) -> dict[int, list[tuple[_Key, int, int]]]:
    """Return what each rank holds otherwise than the median of all, the most beyond it first.

    Args:
        held: the bytes of each owner (a line, a layer), by rank.

    Returns:
        (owner, bytes, bytes beyond the median) by rank; negative where it holds less.

    Example:
        >>> beyond_median({0: {"a.py:3": 10}, 1: {"a.py:3": 10}, 2: {"a.py:3": 10, "a.py:9": 7}})[2]
        [('a.py:9', 7, 7)]
    """
    usual = {owner: median([own.get(owner, 0) for own in held.values()]) for own in held.values() for owner in own}
    rows = {
        rank: [(owner, own.get(owner, 0), own.get(owner, 0) - size) for owner, size in usual.items()]
        for rank, own in held.items()
    }
    return {
        rank: sorted((row for row in own if row[2]), key=lambda row: (-row[2], str(row[0])))
        for rank, own in rows.items()
    }


def rank_in_name(path: Path) -> int | None:
    """Return the rank in a file's name (``rank3_memory_snapshot.pickle``); None without one."""
    numbers = _RANK.findall(path.name)
    return int(numbers[-1]) if numbers else None
