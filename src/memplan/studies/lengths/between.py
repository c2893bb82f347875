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
    """Return the trace at a length that was not recorded: that of the nearest, with the bytes of each storage from the
    quadratic, or the line, through the nearest that allocate the same in the same order. None if these are too few: one
    where bytes do not depend on it, two for a line.
    """
    nearest = sorted(recorded, key=lambda known: (abs(known - length), known))
    base = recorded[nearest[0]]
    form = _form_of(base)
    alike = [known for known in nearest if _form_of(recorded[known]) == form][:3]
    if len(alike) < 2:
        return None
    shares = _shares(alike, length)
    traces = [recorded[known] for known in alike]

    def bytes_of(sizes: Sequence[int]) -> int:
        return max(round(sum(share * size for share, size in zip(shares, sizes, strict=True))), 0)

    def storage_of(number: int) -> Storage:
        row = [trace.storages[number] for trace in traces]
        lows = [storage.low for storage in row if storage.low is not None]
        return replace(
            row[0],
            bytes=bytes_of([storage.bytes for storage in row]),
            low=bytes_of(lows) if len(lows) == len(row) else row[0].low,
        )

    def expected_of(number: int) -> ExpectedSize:
        row = [trace.expected[number] for trace in traces]
        return replace(row[0], low=bytes_of([size.low for size in row]), high=bytes_of([size.high for size in row]))

    return replace(
        base,
        storages=tuple(map(storage_of, range(len(base.storages)))),
        expected=tuple(map(expected_of, range(len(base.expected)))),
        engines=(),
    )


def _form_of(trace: Trace) -> tuple[object, ...]:
    """Return all of a recording that does not depend on bytes: what is allocated and freed when, by which ops."""
    storages = tuple(
        (s.born, s.died, s.name, s.device, s.stream, "" if s.op is None else trace.ops[s.op].name)
        for s in trace.storages
    )
    return (storages, trace.steps, trace.end, trace.calls, tuple(size.storage for size in trace.expected))


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
