"""The last place that fits, by recordings whose law is known: right, and few of them."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.studies.guess import Sample, guess
from memplan.studies.search import bracket, last_fitting


def search(law: Callable[[int], int], limit: int, start: int = 8, most: int = 1 << 40) -> tuple[int, list[Sample]]:
    def probe(place: int) -> Sample:
        assert 1 <= place <= most
        return Sample(place, float(place), law(place), law(place) <= limit)

    samples = last_fitting(probe, float, limit, start, most)
    assert len({one.place for one in samples}) == len(samples), "no place is recorded twice"
    return bracket(samples)[0], samples


LAWS: dict[str, Callable[[int], int]] = {
    "a line": lambda n: 500 + 31 * n,
    "a kink": lambda n: max(40_000, 500 + 31 * n),
    "a square": lambda n: 500 + 31 * n + 7 * n * n,
    "segments": lambda n: -(-(500 + 3100 * n) // 20_000) * 20_000,
    "rounding": lambda n: 512 * -(-(90 * n) // 512) + 512 * -(-(7 * n) // 512),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("limit", [3_000, 100_000, 7_654_321])
@pytest.mark.parametrize("start", [1, 8, 1000])
def test_it_finds_the_last_place_in_less_than_ten_recordings(name: str, limit: int, start: int) -> None:
    law = LAWS[name]
    found, samples = search(law, limit, start)
    assert found == bisect.bisect_right(range(1, 1 << 30), limit, key=law)
    # a kink misleads, and where bytes go in segments several places are alike, of which the last has to be looked for
    assert len(samples) < (10 if name in ("a line", "a square") else 18), [(one.place, one.need) for one in samples]
    assert {found + 1} <= {one.place for one in samples}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 1500), st.integers(1, 90))
def test_it_is_right_for_any_law_that_does_not_fall(steps: list[int], limit: int, start: int) -> None:
    needs = [0]
    for step in steps:
        needs.append(needs[-1] + step)
    law = lambda n: needs[n] if n < len(needs) else needs[-1] + 100 * (n - len(needs) + 1)  # noqa: E731
    found, _ = search(law, limit, start)
    assert found == next(n for n in range(10_000) if law(n + 1) > limit)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 60))
def test_where_needs_go_up_and_down_it_still_is_a_place_before_one_that_does_not_fit(
    needs: list[int], start: int
) -> None:
    law = lambda n: needs[n - 1] if n <= len(needs) else 1000 * n  # noqa: E731
    found, samples = search(law, 50, start)
    assert found == 0 or law(found) <= 50
    assert law(found + 1) > 50
    assert {found + 1} <= {one.place for one in samples}


def test_it_stops_at_the_most() -> None:
    found, samples = search(LAWS["a line"], 10**9, 8, most=100)
    assert found == 100
    assert len(samples) <= 3


def test_nothing_fits() -> None:
    found, samples = search(LAWS["a line"], 10, 8)
    assert found == 0
    assert {one.place for one in samples} >= {1}


def test_nothing_grows() -> None:
    _, samples = search(lambda n: 100, 1000)
    assert all(one.fits for one in samples)
    assert len(samples) <= 4


def test_a_guess_from_needs_goes_through_them() -> None:
    samples = [Sample(n, float(n), 100 + 10 * n, True) for n in (1, 2)]
    assert guess(samples, 1000, float) == 90
    assert guess(samples, 50, float) == 0
    flat = [Sample(n, float(n), 100, True) for n in (1, 2)]
    assert guess(flat, 1000, float) is None
