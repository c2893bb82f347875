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


def _run(*allocations: tuple[str, int]) -> _torch.Profile:
    """A run of calls, one after the other, each with the bytes that it allocates."""
    calls = [_torch.Call(name, 10 * n, 10 * n + 5, -1, "", False) for n, (name, _) in enumerate(allocations)]
    events = [_torch.MemoryEvent(n, size, 10 * n + 1, "", n) for n, (_, size) in enumerate(allocations) if size]
    return _torch.Profile(events, calls, {})


def test_what_allocates_pairs_in_order_whatever_views_are_called_between() -> None:
    """Copies of three parameters: a mode also sees the view that is copied. The longest common part alone, "detach
    clone detach empty", would leave out the copy in the middle, and pair the first with the last."""
    under_a_mode = [("detach", 0), ("clone", 8), ("detach", 0)] * 3 + [("empty", 0), ("set_", 0)]
    without = [("clone", 8), ("detach", 0)] * 3 + [("empty", 0), ("set_", 0)]
    pairs = matched_calls(_run(*under_a_mode), _run(*without))
    assert [pairs[call] for call in (1, 4, 7)] == [0, 2, 4]


def test_what_only_the_first_run_makes_is_known_by_its_bytes() -> None:
    """Two constants of a library, then the weights of a model, all made by `empty`; later the runs differ once more."""
    weights = [("empty", 4096), ("empty", 1024), ("empty", 1024)]
    first, second = [("empty", 8), ("empty", 16), *weights, ("add_", 0)], [*weights, ("mul_", 0)]
    pairs = matched_calls(_run(*first), _run(*second))
    assert [pairs.get(call) for call in range(5)] == [None, None, 0, 1, 2]


def test_calls_match_by_name_where_bytes_differ() -> None:
    pairs = matched_calls(_run(("cat", 100), ("relu", 8)), _run(("cat", 200), ("relu", 8)))
    assert pairs == {-1: -1, 0: 0, 1: 1}
