"""The caching allocator on any requests: against the slow reference, and what must hold whatever is asked for."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from environment import examples, thinned
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from simulation.reference_allocator import ReferenceAllocator

from memplan.simulation.allocator.allocator import CachingAllocator, OutOfMemory
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.timeline import DEFAULT_POOL, AllocatorEvent, Pool, Segment

MIB = 1 << 20
PAGES = 20 * 11 * 12 * 30 * MIB
"""A multiple of every page used here."""
POOLS: list[Pool] = [DEFAULT_POOL, DEFAULT_POOL, (0, 1), (1, 0)]


class Step(NamedTuple):
    kind: str
    size: int
    which: int
    stream: int
    pool: Pool


class Card(NamedTuple):
    capacity: int | None
    limit: int | None
    total: int
    order: int
    """Of the addresses of segments."""


sizes = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, 1200, 5000, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB]),
    st.integers(1, 4096),
    st.integers(1, 12 * MIB),
    st.integers(MIB, 100 * MIB),
)
kinds = st.sampled_from(["malloc"] * 10 + ["free"] * 8 + ["record"] * 2 + ["complete", "wait", "empty", "retire"])
step = st.builds(Step, kinds, sizes, st.integers(0, 1000), st.integers(0, 2), st.sampled_from(POOLS))
steps = st.one_of(st.lists(step), st.lists(step, min_size=30, max_size=60))
mib = lambda *numbers: st.sampled_from([None if number is None else number * MIB for number in numbers])  # noqa: E731
tables = st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=16, max_size=16).map(
    lambda parts: tuple((1 << k, part) for k, part in enumerate(parts))
)
all_settings = st.builds(
    AllocatorSettings,
    max_split_size=mib(None, None, 20, 21, 32, 64),
    roundup_power2_divisions=st.just(()) | tables,
    garbage_collection_threshold=st.sampled_from([0.0, 0.0, 0.3, 0.6, 0.9]),
    expandable_segments=st.booleans(),
    large_segment_size=mib(20, 20, 11, 12, 30),
    max_non_split_rounding=mib(None, None, 20, 30, 64),
    reject_over_limit=st.sampled_from([False, False, True]),
)
cards = st.builds(
    Card, mib(None, None, 50, 100, 200, 400), mib(None, None, 60, 120, 300), mib(60, 256, 1000), st.integers(0, 99)
)


def places(order: int) -> Callable[[int], int]:
    """Addresses that never overlap, in no order."""
    slots = list(range(1, 400))
    random.Random(order).shuffle(slots)
    left = iter(slots)
    return lambda size: next(left) * PAGES


class Pair:
    """Both allocators, doing the same."""

    def __init__(self, settings: AllocatorSettings, card: Card) -> None:
        options: dict[str, Any] = {"capacity": card.capacity, "limit": card.limit, "total": card.total}
        self.card, self.options = card, options
        self.fast = CachingAllocator(settings, place=places(card.order), **options)
        self.slow = ReferenceAllocator(settings, places(card.order), **options)
        self.begun = 0
        self.tick = 0

    def do(self, step: Step) -> None:
        self.tick += 1
        live = [block.address for block in self.slow.blocks if not block.pending]
        waiting = [block.address for block in self.slow.blocks if block.pending]
        if step.kind == "malloc":
            self.malloc(step)
        elif step.kind == "free" and live:
            self.fast.free(live[step.which % len(live)], tick=self.tick)
            self.slow.free(live[step.which % len(live)], self.tick)
        elif step.kind == "record" and live:
            self.fast.record_stream(live[step.which % len(live)], step.stream)
            self.slow.record_stream(live[step.which % len(live)], step.stream)
        elif step.kind == "complete" and waiting:
            self.fast.complete(waiting[step.which % len(waiting)], tick=self.tick)
            self.slow.complete(waiting[step.which % len(waiting)], self.tick)
        elif step.kind == "wait":
            self.fast.synchronize(tick=self.tick)
            self.slow.synchronize(self.tick)
        elif step.kind == "empty":
            self.fast.empty_cache(tick=self.tick)
            self.slow.empty_cache(self.tick)
        elif step.kind == "retire":
            self.fast.retire(step.pool)
            self.slow.retire(step.pool)

    def malloc(self, step: Step) -> None:
        fast: Any
        slow: Any
        try:
            fast = self.fast.malloc(step.size, stream=step.stream, pool=step.pool, owner=self.tick, tick=self.tick)
        except OutOfMemory as error:
            fast = vars(error)
        try:
            slow = self.slow.malloc(step.size, step.stream, step.pool, self.tick, self.tick)
        except OutOfMemory as error:
            slow = vars(error)
        assert fast == slow

    def check(self) -> None:
        fast, slow = self.fast, self.slow
        assert fast.log == slow.log[self.begun :]
        assert fast.segments() == slow.segments()
        assert (fast.reserved, fast.allocated, fast.active, fast.requested) == (
            slow.reserved,
            slow.allocated,
            slow.active,
            slow.requested,
        )

    def switch(self, settings: AllocatorSettings) -> None:
        """Go on with other settings: torch's can be changed at any time, ours begin anew from the same state."""
        used = {region.address // PAGES for region in self.slow.regions}
        fresh = places(self.card.order + 100)

        def place(size: int) -> int:
            return next(address for address in iter(lambda: fresh(size), None) if address // PAGES not in used)

        again = places(self.card.order + 100)
        self.slow.place = lambda size: next(
            address for address in iter(lambda: again(size), None) if address // PAGES not in used
        )
        self.fast = CachingAllocator(settings, place=place, **self.options)
        self.fast.restore(self.slow.segments())
        self.slow.settings = settings
        self.begun = len(self.slow.log)
        # No snapshot has these: which streams a live block was used on, and in which order blocks began to wait.
        self.slow.waiting.sort(key=lambda entry: entry[1].address)
        for block in self.slow.blocks:
            block.streams.clear()
        for pool in self.slow.retired:
            self.fast.retire(pool)


@profile(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_settings, cards, steps)
def test_as_the_reference(settings: AllocatorSettings, card: Card, steps: list[Step]) -> None:
    pair = Pair(settings, card)
    for step in steps:
        pair.do(step)
        pair.check()


def drawn(number: random.Random) -> Step:
    kind = number.choices(
        ["malloc", "free", "record", "complete", "wait", "empty", "retire"], [50, 35, 7, 3, 1, 1, 0.3]
    )
    size = number.choice([number.randrange(1, 5000), int(2 ** number.uniform(9, 26.5)), 2 * MIB, 21 * MIB])
    return Step(kind[0], size, number.randrange(1000), number.choice([0, 0, 0, 1, 2]), number.choice(POOLS))


def drawn_settings(number: random.Random) -> AllocatorSettings:
    choice = number.choice
    parts = [choice([0, 1, 2, 4, 8]) for _ in range(16)]
    return AllocatorSettings(
        choice([None, None, 20 * MIB, 21 * MIB, 64 * MIB]),
        choice([(), (), tuple((1 << k, part) for k, part in enumerate(parts))]),
        choice([0.0, 0.3, 0.6]),
        choice([False, True]),
        choice([20, 20, 12, 30]) * MIB,
        choice([None, None, 64 * MIB]),
    )


def drawn_card(number: random.Random) -> Card:
    limits = [None, None, 60 * MIB, 120 * MIB, 300 * MIB]
    return Card(
        number.choice(limits), number.choice(limits), number.choice([60, 256, 1000]) * MIB, number.randrange(99)
    )


@pytest.mark.parametrize("seed", thinned(range(40), 4))
def test_as_the_reference_for_long(seed: int) -> None:
    number = random.Random(seed)
    pair = Pair(drawn_settings(number), drawn_card(number))
    for _ in range(200):
        pair.do(drawn(number))
    pair.check()


@pytest.mark.parametrize("seed", thinned(range(40), 4))
def test_going_on_with_other_settings(seed: int) -> None:
    """What a replay asks: this state, and then those settings. Ages of free blocks are in no state."""
    number = random.Random(1000 + seed)
    card = drawn_card(number)._replace(limit=None, total=1000 * MIB)
    before = drawn_settings(number)
    pair = Pair(before, card)
    for _ in range(80):
        pair.do(drawn(number))
    if any(region.expandable and region.address not in region.pages for region in pair.slow.regions):
        return  # where such a range begins cannot be seen
    after = drawn_settings(number)
    split = after.max_split_size and max(after.max_split_size, before.large_segment_size)
    pair.switch(
        AllocatorSettings(
            split,
            after.roundup_power2_divisions,
            0.0,
            after.expandable_segments,
            before.large_segment_size,
            after.max_non_split_rounding,
        )
    )
    pair.check()
    for _ in range(80):
        pair.do(drawn(number))
        pair.check()


# What holds for every state


def well_formed(segments: tuple[Segment, ...]) -> None:
    for before, after in pairwise(segments):
        assert before.address + before.size <= after.address
    for segment in segments:
        assert segment.blocks[0].address == segment.address
        assert sum(block.size for block in segment.blocks) == segment.size
        for before, after in pairwise(segment.blocks):
            assert before.address + before.size == after.address
            assert (before.state, after.state) != ("inactive", "inactive")
        for block in segment.blocks:
            assert block.size % 512 == 0
            assert block.size >= max(block.requested, 512)
            assert (block.requested > 0) is (block.state != "inactive")


def doing(settings: AllocatorSettings, card: Card, steps: list[Step]) -> tuple[CachingAllocator, list[int]]:
    """Requests and returns, without other streams; what is still held."""
    used = CachingAllocator(settings, place=places(card.order), capacity=card.capacity, total=card.total)
    live: dict[int, int] = {}
    for step in steps:
        if step.kind == "free" and live:
            address = sorted(live)[step.which % len(live)]
            used.free(address)
            del live[address]
        elif step.kind == "empty":
            used.empty_cache()
        else:
            try:
                address = used.malloc(step.size, stream=step.stream, pool=step.pool)
            except OutOfMemory:
                continue
            if address:
                for other, size in live.items():
                    assert address + step.size <= other or other + size <= address
                live[address] = step.size
        well_formed(used.segments())
    return used, list(live)


@profile(max_examples=examples(100), deadline=None)
@given(all_settings, cards, steps)
def test_live_blocks_never_overlap_and_segments_have_no_gaps(
    settings: AllocatorSettings, card: Card, steps: list[Step]
) -> None:
    doing(settings, card, steps)


@profile(max_examples=examples(100), deadline=None)
@given(all_settings, cards, steps)
def test_all_free_means_that_all_can_go_back(settings: AllocatorSettings, card: Card, steps: list[Step]) -> None:
    used, live = doing(settings, card, steps)
    for address in live:
        used.record_stream(address, 9)
        used.free(address)
    assert used.allocated == 0
    for pool in POOLS:
        used.retire(pool)
    used.empty_cache()
    assert (used.reserved, used.active, used.requested, used.segments()) == (0, 0, 0, ())


Kind = tuple[Pool, int, bool]
"""Pool, stream, and whether it is the small one."""


class Touched:
    """The pages that blocks were put in and that were not taken back, by the range of addresses they lie in."""

    def __init__(self, large_page: int) -> None:
        self.large_page = large_page
        self.kinds: dict[int, Kind] = {}
        self.pages: dict[int, set[int]] = defaultdict(set)

    def see(self, event: AllocatorEvent) -> None:
        place = event.address // PAGES
        size = -(-event.size // 512) * 512
        if event.action == "alloc":
            self.kinds[place] = event.pool, event.stream, size <= MIB
        elif event.action != "segment_unmap":
            return
        page = self.page(self.kinds[place])
        pages = set(range(event.address // page, (event.address + size - 1) // page + 1))
        if event.action == "alloc":
            self.pages[place] |= pages
        else:
            self.pages[place] -= pages

    def page(self, kind: Kind) -> int:
        return 2 * MIB if kind[2] else self.large_page

    def bytes(self) -> dict[Kind, int]:
        found: dict[Kind, int] = defaultdict(int)
        for place, pages in self.pages.items():
            if pages:
                found[self.kinds[place]] += len(pages) * self.page(self.kinds[place])
        return found


@profile(max_examples=examples(150), deadline=None)
@given(mib(20, 12, 30), steps)
def test_mapped_bytes_are_the_pages_touched_and_not_taken_back(page: int, steps: list[Step]) -> None:
    settings = AllocatorSettings(expandable_segments=True, large_segment_size=page)
    used = CachingAllocator(settings, place=places(0), total=1000 * MIB)
    live: list[int] = []
    touched, seen = Touched(page), 0
    for step in steps:
        if step.kind == "free" and live:
            used.free(live.pop(step.which % len(live)))
        elif step.kind in ("empty", "wait", "complete"):
            used.retire(step.pool)
            used.empty_cache()
        elif step.size:
            live.append(used.malloc(step.size, stream=step.stream, pool=step.pool))
        for event in used.log[seen:]:
            touched.see(event)
        seen = len(used.log)
        mapped: dict[Kind, int] = defaultdict(int)
        for segment in used.segments():
            mapped[segment.pool, segment.stream, segment.small] += segment.size
        assert mapped == touched.bytes()
