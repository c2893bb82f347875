"""How few looks a search takes where the bytes that it counts are not those that count."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.inductor.candidate_search import TargetBounds

ROOM = 100


def looks(budget: int, code: Callable[[int], int], known: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """Targets and what came of each, until one is at most `ROOM` under the budget; the search finds what it aims
    for."""
    aims, seen = TargetBounds(budget, ROOM), list[tuple[int, int]]()
    aim = aims.first_target(known)
    while len(seen) < 500:  # where all fits, it goes on to no end: `Fusing` ends it
        peak = code(aim)
        seen.append((aim, peak))
        if budget - ROOM <= peak <= budget:
            break
        aims = aims.narrowed(aim, aim, peak)
        later = aims.next_target_after(aim, aim, peak)
        if later is None:
            break
        aim = later
    return seen


@given(st.integers(-3000, 3000))
def test_two_looks_where_the_difference_is_the_same_everywhere(less: int) -> None:
    seen = looks(10_000, lambda aim: aim - less)
    assert len(seen) == (1 if 0 <= less <= ROOM else 2)
    assert 10_000 - ROOM <= seen[-1][1] <= 10_000


@given(st.integers(-3000, 3000), st.integers(-40, 40))
def test_a_little_more_than_expected_is_not_over_the_budget(less: int, more: int) -> None:
    seen = looks(10_000, lambda aim: aim - less + (more if aim != 10_000 else 0))
    assert len(seen) <= 2
    assert seen[-1][1] <= 10_000


@given(st.integers(-3000, 3000))
def test_one_look_where_a_budget_near_it_was_looked_at(less: int) -> None:
    assert len(looks(10_000, lambda aim: aim - less, known=(9_000 + less, 9_000))) == 1


@given(st.lists(st.integers(0, 400), min_size=40, max_size=40), st.integers(0, 10_000))
def test_whatever_comes_of_an_aim_the_looks_end_next_to_the_budget(steps: list[int], budget: int) -> None:
    """What comes of more is never less here, and otherwise anything: then it ends near enough, or between two aims
    that are next to each other of which the one keeps the budget and the other does not, or at all that there is."""

    def code(aim: int) -> int:
        return sum(steps[: max(0, min(40, aim // 250))])

    seen = looks(budget, code)
    fits, over = ([aim for aim, peak in seen if (peak <= budget) == kept] for kept in (True, False))
    near = budget - ROOM <= seen[-1][1] <= budget
    assert fits, "nothing at all is within every budget"
    assert near or (min(over) - max(fits) <= ROOM if over else seen[-1][1] == sum(steps))


def test_what_the_search_cannot_reach_is_not_asked_for_again() -> None:
    """It found 8,000 for 9,500, which is over the budget: what is below 8,000 alone can be another answer."""
    aims = TargetBounds(7_000, ROOM).narrowed(9_500, 8_000, 7_200)
    assert aims.smallest_over == 8_000
    assert aims.next_target_after(9_500, 8_000, 7_200) == 8_000 - 200 - ROOM // 2


def test_what_takes_more_than_was_asked_for_and_keeps_the_budget_tells_of_what_it_takes() -> None:
    """The least that the search can do is 8,000; the code of that takes 5,000, and so would that for 9,950 take."""
    assert TargetBounds(7_000, ROOM).next_target_after(7_000, 8_000, 5_000) == 8_000 + 2_000 - ROOM // 2
