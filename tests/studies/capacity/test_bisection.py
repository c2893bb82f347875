"""The last position that fits, by recordings whose law is known: right, and few of them."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.studies.capacity.bisection import SearchResult, last_fitting, step_of
from memplan.studies.capacity.extrapolation import Sample, roundest, roundness
from memplan.trace.records import Storage
from memplan.trace.trace import Trace

Law = Callable[[int], int]
"""Bytes at a position."""
SEGMENT = 2 << 20


def search(
    law: Law, limit: int, start: int = 8, most: int = 1 << 40, works: Callable[[int], bool] | None = None
) -> SearchResult:
    """By needs alone, without steps."""
    asked: list[int] = []

    def probe(position: int) -> Sample | None:
        assert 1 <= position <= most
        asked.append(position)
        if works is not None and not works(position):
            return None
        return Sample(position, float(position), law(position), law(position) <= limit)

    found = last_fitting(probe, float, limit, start, most)
    assert len(set(asked)) == len(asked), "no position is recorded twice"
    assert sorted(asked) == sorted([*(one.position for one in found.samples), *found.failed])
    return found


def in_segments(size: int) -> int:
    """What an allocator takes for a storage: whole blocks, and whole segments of a large one."""
    unit = 512 if size < 1 << 20 else SEGMENT
    return -(-size // unit) * unit


Sizes = Callable[[int], list[int]]
"""Bytes of each storage of a step at a position."""
Total = Callable[[list[int]], int]
"""What an allocator takes for them."""


def search_steps(sizes: Sizes, limit: int, start: int, total: Total) -> SearchResult:
    """By whole steps that hold storages of such sizes."""

    def needed(trace: Trace) -> int:
        return total([storage.bytes for storage in trace.storages])

    def probe(position: int) -> Sample | None:
        found = sizes(position)
        if max(found) >= 1 << 62:
            return None  # no tensor is that large
        storages = tuple(Storage(number, size, "saved", number, None) for number, size in enumerate(found))
        trace = Trace(
            origin="recorded",
            device="cpu",
            torch="",
            ops=(),
            storages=storages,
            layers=(),
            steps=(0,),
            end=len(storages),
        )
        return Sample(position, float(position), needed(trace), needed(trace) <= limit, trace)

    return last_fitting(probe, float, limit, start, fits=lambda trace: needed(trace) <= limit)


def last_of(fits: Callable[[int], bool]) -> int:
    return bisect.bisect_left(range(1, 1 << 45), True, key=lambda position: not fits(position))


LAWS: dict[str, Law] = {
    "a line": lambda n: 500 + 31 * n,
    "a kink": lambda n: max(40_000, 500 + 31 * n),
    "a square": lambda n: 500 + 31 * n + 7 * n * n,
    "rounding": lambda n: 512 * -(-(90 * n) // 512) + 512 * -(-(7 * n) // 512),
    "segments": lambda n: -(-(500 + 3100 * n) // 20_000) * 20_000,
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("limit", [3_000, 100_000, 7_654_321])
@pytest.mark.parametrize("start", [1, 8, 1000])
def test_needs_alone_lead_to_the_last_place(name: str, limit: int, start: int) -> None:
    law = LAWS[name]
    found = search(law, limit, start)
    assert found.last == bisect.bisect_right(range(1, 1 << 30), limit, key=law)
    assert found.following == found.last + 1
    # where bytes go in steps several positions have the same need, and nothing tells which is the last of them
    assert len(found.samples) < (10 if name in ("a line", "a kink", "a square") else 15), found.samples


@st.composite
def steps_in_a_budget(draw: st.DrawFn) -> tuple[list[Law], int, int]:
    """Storages that are fixed, in proportion, padded, squares; and one that is the larger of two lines."""

    def line(fixed: int, slope: int) -> Law:
        return lambda n: fixed + slope * n

    def padded(slope: int, to: int) -> Law:
        return lambda n: slope * -(-n // to) * to

    def square(slope: int, by: int) -> Law:
        return lambda n: slope * n + by * n * n

    each = st.one_of(
        st.builds(line, st.integers(0, 10**8), st.just(0)),
        st.builds(line, st.just(0), st.integers(1, 4096)),
        st.builds(padded, st.integers(1, 4096), st.sampled_from([8, 32, 64, 100, 128, 256, 512, 1000])),
        st.builds(square, st.integers(1, 4096), st.integers(1, 64)),
    )
    laws = [line(0, draw(st.integers(4, 400))), *draw(st.lists(each, min_size=1, max_size=12))]
    if draw(st.booleans()):
        one, other = line(0, draw(st.integers(1, 4096))), line(draw(st.integers(1, 10**8)), draw(st.integers(1, 4096)))
        laws.append(lambda n: max(one(n), other(n)))
    return laws, draw(st.integers(10**7, 10**11)), draw(st.sampled_from([1, 2, 8, 32, 100, 128, 1000, 1024]))


@settings(deadline=None, max_examples=150)
@given(steps_in_a_budget(), st.sampled_from([in_segments, lambda size: size, lambda size: -(-size // 512) * 512]))
def test_steps_lead_to_the_last_place_in_few_recordings(
    case: tuple[list[Law], int, int], rounded: Callable[[int], int]
) -> None:
    laws, limit, start = case
    found = search_steps(
        lambda position: [law(position) for law in laws], limit, start, lambda sizes: sum(map(rounded, sizes))
    )
    right = last_of(lambda position: sum(rounded(law(position)) for law in laws) <= limit)
    assert (found.last, found.following) == (right, right + 1)
    assert {right, right + 1} - {0} <= {one.position for one in found.samples}
    # by doubling and halving alone it would be up to twice the 30 bits of the largest position
    assert len(found.samples) <= 60, [(one.position, one.fits) for one in found.samples]


def in_pools(sizes: list[int]) -> int:
    """Small storages share segments of 2 MiB, larger ones of 20 MiB, and the largest have their own."""
    small = sum(size for size in sizes if size <= 1 << 20)
    middle = sum(size for size in sizes if 1 << 20 < size < 10 << 20)
    own = sum(-(-size // SEGMENT) * SEGMENT for size in sizes if size >= 10 << 20)
    return -(-small // SEGMENT) * SEGMENT + -(-middle // (20 << 20)) * (20 << 20) + own


TOTALS: list[Total] = [sum, lambda sizes: sum(map(in_segments, sizes)), in_pools]


@dataclass(frozen=True)
class Looped:
    """A model that runs over chunks of positions: a + b * ceil(n / c) + d * n + e * n^2 bytes, or in other steps."""

    chunk: int
    fixed: int
    each: int
    squared: int
    slope: int
    square: int
    padded: bool

    def sizes(self, position: int) -> list[int]:
        turns = -(-position // self.chunk)
        last = self.chunk if self.padded else position - (turns - 1) * self.chunk
        made = [self.each * self.chunk + self.squared * self.chunk**2] * (turns - 1)
        made.append(self.each * last + self.squared * last * self.chunk)
        whole = [self.fixed, self.slope * position, self.square * position**2]
        return [*(size for size in whole if size), *made[:1000], *([sum(made[1000:])] if len(made) > 1000 else [])]


def a_loop(number: Callable[[int, int], int], one_of: Callable[[Sequence[Any]], Any]) -> tuple[Looped, int, int, Total]:
    """A loop, a limit that its answer is up to 600 turns within, where the search begins, and an allocator."""
    loop = Looped(
        one_of([8, 32, 64, 100, 128, 256, 512, 1000, 1024, 4096]), number(0, 10**8), number(1, 4096),
        one_of([0, 0, number(1, 16)]), one_of([0, number(1, 4096)]), one_of([0, 0, number(1, 64)]),
        one_of([False, True]),
    )  # fmt: skip
    total = one_of(TOTALS)
    limit = total(loop.sizes(number(loop.chunk // 2, 600 * loop.chunk)))
    return loop, limit, one_of([1, 8, 32, 100, 512, 1000, 1024, 4096]), total


def recorded(loop: Looped, limit: int, start: int, total: Total) -> int:
    """How many recordings a search took, after its answer is checked."""
    found = search_steps(loop.sizes, limit, start, total)
    if found.following is None:  # it is said that nothing grows, as far as it was looked
        assert len({one.need for one in found.samples}) == 1
        return len(found.samples)
    assert found.following == found.last + found.step == found.last + 1
    assert limit < total(loop.sizes(found.following))
    assert found.last == 0 or total(loop.sizes(found.last)) <= limit  # 0 stands for "none fits", and is no value
    return len(found.samples)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_model_that_runs_in_chunks_has_an_answer_that_is_right(data: st.DataObject) -> None:
    case = a_loop(lambda low, high: data.draw(st.integers(low, high)), lambda some: data.draw(st.sampled_from(some)))
    assert recorded(*case) <= 48


def test_none_fits_where_the_fixed_part_alone_is_too_much() -> None:
    loop = Looped(chunk=1000, fixed=1048577, each=1, squared=11, slope=0, square=0, padded=False)
    limit = in_pools(loop.sizes(1)) - 1
    assert search_steps(loop.sizes, limit, 1, in_pools).last == 0
    assert recorded(loop, limit, 1, in_pools) <= 48


def test_most_models_that_run_in_chunks_take_few_recordings() -> None:
    generator = random.Random(0)
    counts = sorted(recorded(*a_loop(generator.randint, generator.choice)) for _ in range(100))
    assert counts[50] < 10
    assert counts[90] <= 20
    assert counts[-1] <= 30


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 1500), st.integers(1, 90))
def test_it_is_right_for_any_law_that_does_not_fall(steps: list[int], limit: int, start: int) -> None:
    needs = [0]
    for step in steps:
        needs.append(needs[-1] + step)
    law = lambda n: needs[n] if n < len(needs) else needs[-1] + 100 * (n - len(needs) + 1)  # noqa: E731
    assert search(law, limit, start).last == next(n for n in range(10_000) if law(n + 1) > limit)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 60))
def test_where_needs_go_up_and_down_the_answer_is_the_last_that_was_recorded_to_fit(
    needs: list[int], start: int
) -> None:
    law = lambda n: needs[n - 1] if n <= len(needs) else 1000 * n  # noqa: E731
    found = search(law, 50, start)
    assert found.last == max((one.position for one in found.samples if law(one.position) <= 50), default=0)
    assert found.following == found.last + 1
    assert law(found.following) > 50


def test_it_stops_at_the_most() -> None:
    found = search(LAWS["a line"], 10**9, 8, most=100)
    assert (found.last, found.following) == (100, None)
    assert len(found.samples) <= 3


def test_nothing_fits() -> None:
    found = search(LAWS["a line"], 10, 8)
    assert (found.last, found.following) == (0, 1)


def test_nothing_grows() -> None:
    found = search(lambda n: 100, 1000)
    assert all(one.fits for one in found.samples)
    assert len(found.samples) <= 4


def test_two_places_on_a_plateau_are_not_taken_for_nothing_that_grows() -> None:
    law = lambda n: -(-(n * 15_000) // (1 << 30)) << 30  # noqa: E731  # 71 583 positions have the same need
    found = search(law, 20 << 30, 1)
    assert found.last == last_of(lambda n: law(n) <= 20 << 30)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 30), st.integers(0, 3))
def test_the_step_in_which_places_work_is_found(step: int, times: int, lowest: int) -> None:
    asked: set[int] = set()

    def works(position: int) -> bool:
        assert position > 0
        asked.add(position)
        return position % step == 0 and position >= lowest * step

    start = step * (lowest + times)
    assert step_of(works, start) == step
    assert len(asked) <= 4 * start.bit_length()


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 100), st.integers(1, 20), st.integers(10, 10**6))
def test_only_multiples_that_work_are_answers(step: int, times: int, limit: int) -> None:
    law = lambda n: 3 * n + 7  # noqa: E731
    found = search(law, limit, step * times, works=lambda position: position % step == 0)
    right = (limit - 7) // 3 // step * step
    assert found.last == right
    if found.failed:
        assert found.step == step
    assert found.following == right + found.step
    assert law(found.following) > limit or found.following in found.failed


@pytest.mark.parametrize("end", [1000, 4096, 5000, 777])
def test_places_that_fail_from_one_on_end_the_search(end: int) -> None:
    found = search(lambda n: n, 10**9, 64, works=lambda position: position <= end)
    assert (found.last, found.following) == (end, end + 1)
    assert found.following in found.failed
    assert len(found.samples) + len(found.failed) < (15 if end != 777 else 30)


def test_below_places_that_fail_nothing_is_an_answer() -> None:
    law = lambda n: 10 * n  # noqa: E731
    found = search(law, 5, 8, works=lambda position: position > 1)
    assert (found.last, found.following) == (0, 2)
    assert 1 in found.failed
    found = search(law, 20, 1, works=lambda position: position > 1)
    assert (found.last, found.following, found.failed) == (2, 3, (1,))


def test_where_the_start_fails_the_powers_of_two_around_it_are_tried() -> None:
    found = search(lambda n: n, 1000, 100, works=lambda position: position % 32 == 0)
    assert (found.last, found.following) == (992, 1024)
    none = search(lambda n: n, 1000, 100, works=lambda position: False)
    assert none.samples == ()
    assert none.failed == (100, 128, 64, 256, 32, 512, 16, 1024, 8)


@given(st.integers(0, 10**6), st.integers(2, 10**5))
def test_the_roundest_number_is_as_round_as_any(low: int, width: int) -> None:
    high = low + width
    found = roundest(low, high)
    assert low < found < high
    step = max(1, width // 3000)
    assert all(roundness(found) >= roundness(number) for number in range(low + 1, high, step))


def test_roundness() -> None:
    assert [roundness(n) for n in (7, 12, 1000, 1024, 3000, 6144)] == [1, 4, 1000, 1024, 1000, 2048]
