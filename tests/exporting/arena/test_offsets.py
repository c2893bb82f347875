"""Addresses of buffers: none overlap, by a map of bytes; small cases are as small as any order makes them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import ScheduleError
from memplan.exporting.arena.lifetimes import Buffer, Lifetimes
from memplan.exporting.arena.offset_check import check_offsets
from memplan.exporting.arena.offsets import choose_offsets
from memplan.exporting.arena.stacking import Stacking


def buffer(words: int, first: int, length: int) -> Buffer:
    return Buffer(4 * words, first, first + length)


BUFFERS = st.lists(
    st.builds(buffer, st.integers(1, 12), st.integers(0, 20), st.integers(0, 12)), min_size=1, max_size=24
)


def peak(buffers: list[Buffer]) -> int:
    """Most bytes that are there at once, action by action."""
    return max(sum(one.bytes for one in buffers if one.first_action <= at <= one.last_action) for at in range(40))


def overlap(buffers: list[Buffer], offsets: tuple[int, ...]) -> bool:
    """Whether two share a byte at some action: every byte of every action is marked."""
    taken = set[tuple[int, int]]()
    for one, offset in zip(buffers, offsets, strict=True):
        cells = set(itertools.product(range(one.first_action, one.last_action + 1), range(offset, offset + one.bytes)))
        if cells & taken:
            return True
        taken |= cells
    return False


@settings(max_examples=40, deadline=None)
@given(BUFFERS)
def test_no_two_buffers_share_a_byte(buffers: list[Buffer]) -> None:
    least = Lifetimes(tuple(buffers), ()).peak_bytes
    assert least == peak(buffers)
    found = choose_offsets(buffers, least)
    assert not overlap(buffers, found.offsets)
    assert found.bytes == max(at + one.bytes for at, one in zip(found.offsets, buffers, strict=True)) >= least
    check_offsets(buffers, found.offsets, found.bytes)
    assert choose_offsets(buffers, least) == found, "the same every time"


@settings(max_examples=40, deadline=None)
@given(BUFFERS, st.integers(0, 9), st.integers(0, 1 << 16))
def test_a_stack_ends_within_its_target(buffers: list[Buffer], room: int, seed: int) -> None:
    stacking, least = Stacking.from_buffers(buffers), peak(buffers)
    found = stacking.offsets_within(least + 4 * room, stacking.random_rank(seed, None))
    if found is not None:
        assert not overlap(buffers, found)
        assert max(at + one.bytes for at, one in zip(found, buffers, strict=True)) <= least + 4 * room
    assert stacking.offsets_within(least - 1, stacking.random_rank(seed, None)) is None


@settings(max_examples=60, deadline=None)
@given(BUFFERS, st.lists(st.integers(0, 40), min_size=24, max_size=24))
def test_the_check_finds_every_overlap(buffers: list[Buffer], places: list[int]) -> None:
    offsets = tuple(4 * place for place in places[: len(buffers)])
    end = max(at + one.bytes for at, one in zip(offsets, buffers, strict=True))
    if overlap(buffers, offsets):
        with pytest.raises(ScheduleError, match="share no byte"):
            check_offsets(buffers, offsets, end)
    else:
        check_offsets(buffers, offsets, end)
        with pytest.raises(ScheduleError, match="in an arena of"):
            check_offsets(buffers, offsets, end - 1)
        with pytest.raises(ScheduleError, match="lies from 2 to"):
            check_offsets([Buffer(4, 0, 1)], (2,), 8)


def lowest(buffers: list[Buffer], order: tuple[int, ...]) -> int:
    """End of the arena where each buffer in turn lies as low as it can: some order makes the smallest one."""
    offsets: dict[int, int] = {}
    for number in order:
        one, at = buffers[number], 0
        while any(
            other.first_action <= one.last_action
            and one.first_action <= other.last_action
            and at < offsets[k] + other.bytes
            and offsets[k] < at + one.bytes
            for k, other in ((k, buffers[k]) for k in offsets)
        ):
            at += 4
        offsets[number] = at
    return max(at + buffers[k].bytes for k, at in offsets.items())


@pytest.mark.parametrize("seed", range(12))
def test_few_buffers_take_the_smallest_arena(seed: int) -> None:
    drawn = random.Random(seed)
    buffers = [buffer(drawn.randint(1, 5), drawn.randint(0, 6), drawn.randint(0, 4)) for _ in range(6)]
    smallest = min(lowest(buffers, order) for order in itertools.permutations(range(6)))
    assert choose_offsets(buffers, peak(buffers)).bytes == smallest


def cut(count: int, seed: int) -> list[Buffer]:
    """An arena of 64 words over 64 actions, cut into pieces: no arena is smaller, and one of that size holds them."""
    drawn, whole = random.Random(seed), [(0, 64, 0, 64)]
    while len(whole) < count:
        whole.sort(key=lambda one: (one[1] - one[0]) * (one[3] - one[2]))
        low, high, first, end = whole.pop()
        if high - low >= end - first:
            at = drawn.randrange(low + 1, high)
            whole += [(low, at, first, end), (at, high, first, end)]
        else:
            at = drawn.randrange(first + 1, end)
            whole += [(low, high, first, at), (low, high, at, end)]
    return [buffer(high - low, first, end - first - 1) for low, high, first, end in drawn.sample(whole, count)]


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_a_whole_arena_fit_nearly_into_it(seed: int) -> None:
    buffers = cut(40, seed)
    assert Lifetimes(tuple(buffers), ()).peak_bytes == 4 * 64
    assert choose_offsets(buffers, 4 * 64).bytes <= 1.1 * 4 * 64
