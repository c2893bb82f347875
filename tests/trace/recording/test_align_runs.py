"""Equal items of two sequences are paired in order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memplan import _torch
from memplan.trace.recording.align_runs import aligned, matched_calls

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


def _run(*names: str, allocating: str) -> _torch.Profile:
    """A run of these calls, one after the other, each that is called ``allocating`` with an allocation in it."""
    calls = [_torch.Call(name, 10 * n, 10 * n + 5, -1, "", False) for n, name in enumerate(names)]
    events = [_torch.MemoryEvent(n, 8, 10 * n + 1, "", n) for n, name in enumerate(names) if name == allocating]
    return _torch.Profile(events, calls, {})


def test_what_allocates_pairs_in_order_whatever_views_are_called_between() -> None:
    """Copies of three parameters: a mode also sees the view that is copied. The longest common part alone, "detach
    clone detach empty", would pair the first two copies of one run with the last two of the other."""
    under_a_mode = ("detach", "clone", "detach") * 3 + ("empty", "set_")
    without = ("clone", "detach") * 3 + ("empty", "set_")
    pairs = matched_calls(_run(*under_a_mode, allocating="clone"), _run(*without, allocating="clone"))
    assert [pairs[call] for call in (1, 4, 7)] == [0, 2, 4]
