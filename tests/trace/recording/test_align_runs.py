"""Equal items of two sequences are paired in order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memplan.trace.recording.align_runs import aligned

letters = st.lists(st.sampled_from("abc"), max_size=12)


@given(letters, letters)
def test_pairs_are_equal_and_in_order(first: list[str], second: list[str]) -> None:
    pairs = aligned(first, second)
    assert all(first[i] == second[j] for i, j in pairs)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(pairs))


@given(letters, letters, letters)
def test_what_is_inserted_leaves_the_rest_paired(before: list[str], inserted: list[str], after: list[str]) -> None:
    assert len(aligned([*before, *after], [*before, *inserted, *after])) == len(before) + len(after)


def test_what_only_one_run_does_first_pairs_with_nothing() -> None:
    """By hand: "a", which one run does before all else, as an import does, is not the "a" that both do."""
    assert sorted(aligned("acab", "ab")) == [(2, 0), (3, 1)]
