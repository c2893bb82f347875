"""Sequences are matched as a table of all their common subsequences would match them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memplan.trace.recording import align_runs
from memplan.trace.recording.align_runs import aligned

letters = st.lists(st.sampled_from("abc"), max_size=12)


def longest(first: Sequence[str], second: Sequence[str]) -> int:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(letters, letters)
def test_as_many_equal_items_as_can_be_in_order(first: list[str], second: list[str]) -> None:
    pairs = aligned(first, second)
    assert all(first[i] == second[j] for i, j in pairs)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(pairs))
    assert len(pairs) == longest(first, second)


def test_what_hardly_has_anything_in_common_is_given_up() -> None:
    many = align_runs._MAX_EDITS
    first, second = ["head", *(f"a{i}" for i in range(many)), "tail"], ["head", *(f"b{i}" for i in range(many)), "tail"]
    assert aligned(first, second) == [(0, 0), (many + 1, many + 1)]
