"""Interpolate traces between recorded lengths: the bytes of each storage as a polynomial of the length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from memplan.trace.records import ExpectedSize, Storage
from memplan.trace.trace import Trace

MOST_RECORDED = 6
"""Number of lengths to record if there are more."""


def lengths_to_record(lengths: Sequence[int]) -> list[int]:
    """Return the distinct lengths; if these are many, the shortest, the longest and a few in between."""
    distinct = sorted(set(lengths))
    if len(distinct) <= MOST_RECORDED:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(part * last / (MOST_RECORDED - 1))] for part in range(MOST_RECORDED)]


def interpolated(recorded: Mapping[int, Trace], length: int) -> Trace | None:
    """Return the trace at a length from traces recorded at other lengths; None if the nearest has ops of its own.

    It is the trace recorded at the nearest length, with other bytes: those of each storage are on the quadratic (or
    line) through the three (or two) nearest recordings with the same ops. A storage that a recording lacks, such as the
    temporary of a reduction in two passes, keeps its bytes.
    """
    nearest = sorted(recorded, key=lambda known: (abs(known - length), known))
    base = recorded[nearest[0]]
    ops = _op_names(base)
    same_ops = [known for known in nearest if _op_names(recorded[known]) == ops][:3]
    if len(same_ops) < 2:
        return None
    weights = _lagrange_weights(same_ops, length)
    storages_by_key = [_storages_by_key(recorded[known]) for known in same_ops]
    expected = [{size.storage: size for size in recorded[known].expected} for known in same_ops]

    def interpolate(sizes: Sequence[int | None]) -> int | None:
        """Return the size at ``length`` from those at ``same_ops``; the nearest if any is unknown."""
        known = [size for size in sizes if size is not None]
        if len(known) < len(same_ops):
            return sizes[0]
        return max(round(sum(weight * size for weight, size in zip(weights, known, strict=True))), 0)

    storages, expected_sizes = list(base.storages), list[ExpectedSize]()
    for key, storage in storages_by_key[0].items():
        row = [by_key.get(key) for by_key in storages_by_key]
        size = interpolate([None if other is None else other.bytes for other in row])
        low = interpolate([None if other is None else other.low for other in row])
        storages[storage.id] = replace(storage, bytes=storage.bytes if size is None else size, low=low)
        expectation = expected[0].get(storage.id)
        if expectation is not None:  # the same for the bounds of an expected workspace
            others = [
                None if other is None else known.get(other.id) for other, known in zip(row, expected, strict=True)
            ]
            lower = interpolate([None if other is None else other.low for other in others])
            upper = interpolate([None if other is None else other.high for other in others])
            expected_sizes.append(replace(expectation, low=lower or 0, high=upper or 0))
    return replace(base, storages=tuple(storages), expected=tuple(expected_sizes), engines=())


def _op_names(trace: Trace) -> list[tuple[str, int]]:
    return [(op.name, op.step) for op in trace.ops]


def _storages_by_key(trace: Trace) -> dict[tuple[object, ...], Storage]:
    """Return the storages by keys that are equal at two lengths for corresponding storages: the op that allocates it,
    whether it is a temporary, how many such storages the op allocates, and its number among them."""
    by_op = dict[tuple[int | None, bool], list[Storage]]()
    for storage in trace.storages:
        by_op.setdefault((storage.op, storage.cause == "temporary"), []).append(storage)
    return {
        (op, temporary, len(storages), number): storage
        for (op, temporary), storages in by_op.items()
        for number, storage in enumerate(storages)
    }


def _lagrange_weights(known: Sequence[int], length: int) -> list[Fraction]:
    """Return the weights with which values at known lengths add up to the interpolated value at ``length``."""
    return [
        math.prod((Fraction(length - other, node - other) for other in known if other != node), start=Fraction(1))
        for node in known
    ]
