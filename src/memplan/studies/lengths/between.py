"""Recordings at a few lengths, and what lies between them: bytes as polynomials of the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from memplan.trace.records import ExpectedSize, Storage
from memplan.trace.trace import Trace

MOST_RECORDED = 6
"""Lengths that are recorded where there are more."""


def lengths_to_record(lengths: Sequence[int]) -> list[int]:
    """Return all of a few distinct lengths; of many, the shortest, the longest and some in between."""
    distinct = sorted(set(lengths))
    if len(distinct) <= MOST_RECORDED:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(part * last / (MOST_RECORDED - 1))] for part in range(MOST_RECORDED)]


def between(recorded: Mapping[int, Trace], length: int) -> Trace | None:
    """Return the trace at a length that was not recorded: that of the nearest one, with bytes from the quadratic, or
    the line, through the nearest with the same ops.

    A storage that is not allocated at all of these lengths, such as the temporary of a reduction in two passes, keeps
    its bytes at the nearest. None if only one recording has these ops.
    """
    nearest = sorted(recorded, key=lambda known: (abs(known - length), known))
    base = recorded[nearest[0]]
    ops = _ops_of(base)
    alike = [known for known in nearest if _ops_of(recorded[known]) == ops][:3]
    if len(alike) < 2:
        return None
    shares = _shares(alike, length)
    rows = [_by_place(recorded[known]) for known in alike]
    expected = [{size.storage: size for size in recorded[known].expected} for known in alike]

    def bytes_of(sizes: Sequence[int | None]) -> int | None:
        """Return the value at the length; where there is none at a recorded one, that of the nearest."""
        known = [size for size in sizes if size is not None]
        if len(known) < len(alike):
            return sizes[0]
        return max(round(sum(share * size for share, size in zip(shares, known, strict=True))), 0)

    storages, sizes = list(base.storages), list[ExpectedSize]()
    for place, storage in rows[0].items():
        row = [storages_at.get(place) for storages_at in rows]
        size = bytes_of([None if other is None else other.bytes for other in row])
        low = bytes_of([None if other is None else other.low for other in row])
        storages[storage.id] = replace(storage, bytes=storage.bytes if size is None else size, low=low)
        if (expectation := expected[0].get(storage.id)) is not None:
            others = [
                None if other is None else known.get(other.id) for other, known in zip(row, expected, strict=True)
            ]
            low = bytes_of([None if other is None else other.low for other in others])
            high = bytes_of([None if other is None else other.high for other in others])
            sizes.append(replace(expectation, low=low or 0, high=high or 0))
    return replace(base, storages=tuple(storages), expected=tuple(sizes), engines=())


def _ops_of(trace: Trace) -> list[tuple[str, int]]:
    """Return the names of the ops, and their steps."""
    return [(op.name, op.step) for op in trace.ops]


def _by_place(trace: Trace) -> dict[tuple[object, ...], Storage]:
    """Return the storages by what allocates them: the op, and a number among its temporaries or its other storages.
    Places at two lengths are equal only if the op allocates as many."""
    of_ops = dict[tuple[int | None, bool], list[Storage]]()
    for storage in trace.storages:
        of_ops.setdefault((storage.op, storage.cause == "temporary"), []).append(storage)
    return {
        (op, temporary, len(storages), number): storage
        for (op, temporary), storages in of_ops.items()
        for number, storage in enumerate(storages)
    }


def _shares(known: Sequence[int], length: int) -> list[Fraction]:
    """Return Lagrange's weights of the values at known lengths for the value at another length."""
    shares = list[Fraction]()
    for one in known:
        share = Fraction(1)
        for other in known:
            if other != one:
                share *= Fraction(length - other, one - other)
        shares.append(share)
    return shares
