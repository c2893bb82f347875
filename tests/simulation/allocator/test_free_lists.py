"""Keys in order, against Python's own sorting."""

from __future__ import annotations

import random

import pytest

from memplan.simulation.allocator.free_lists import SortedKeys


@pytest.mark.parametrize("span", [40, 3000, 10**20])
def test_sorted_keys(span: int) -> None:
    draw = random.Random(span)
    keys, expected = SortedKeys(), set[int]()
    for turn in range(12_000):
        key = draw.randrange(span)
        # It grows over many buckets, and shrinks to nothing again.
        if key not in expected and draw.random() < (0.9 if turn < 6000 else 0.1):
            keys.add(key)
            expected.add(key)
        elif expected and (key in expected or draw.random() < 0.5):
            gone = key if key in expected else min(expected, key=lambda other: abs(other - key))
            keys.remove(gone)
            expected.remove(gone)
        if turn % 50 == 0:
            assert list(keys) == sorted(expected)
            key = draw.randrange(span)
            assert keys.at_least(key) == min((other for other in expected if other >= key), default=None)


def test_sorted_keys_in_rising_and_falling_order() -> None:
    for order in (range(7000), range(6999, -1, -1)):
        keys = SortedKeys()
        for key in order:
            keys.add(key)
        assert list(keys) == list(range(7000))
        assert (keys.at_least(3500), keys.at_least(7000)) == (3500, None)
        for key in order:
            keys.remove(key)
        assert list(keys) == []
        assert keys.at_least(0) is None
