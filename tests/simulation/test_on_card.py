"""A step for a card through the caching allocator: bytes as CUDA counts them, intervals, streams, what fits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.cudnn.questions import ExecutionPlan
from memplan.errors import UsageError
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.on_card import drive, fits
from memplan.trace.records import Call, Engines, Storage
from memplan.trace.trace import Trace

MIB = 1 << 20


def trace_of(*storages: Storage, calls: tuple[Call, ...] = (), end: int | None = None) -> Trace:
    ticks = [t for s in storages for t in (s.born, s.died or 0)] + [c.tick for c in calls]
    return Trace(
        origin="recorded",
        device="h100",
        torch="2.13",
        ops=(),
        storages=storages,
        layers=(),
        steps=(0,),
        end=end or max(ticks),
        calls=calls,
    )


def storage(number: int, size: int, born: int, died: int | None = None, **more: object) -> Storage:
    values: dict[str, object] = {"device": "cuda:0", "cause": "activation", "op": None, **more}
    return Storage(number, size, born=born, died=died, **values)  # pyright: ignore[reportArgumentType]


def test_blocks_are_multiples_of_512_bytes_and_segments_of_2_mib() -> None:
    timeline = memplan.simulate(trace_of(storage(0, 1, 1), storage(1, 513, 2), storage(2, 3 * MIB, 3, 4)))
    assert [allocated for _, allocated, _ in timeline.events] == [512, 1536, 1536 + 3 * MIB, 1536]
    assert [reserved for _, _, reserved in timeline.events] == [2 * MIB, 2 * MIB, 22 * MIB, 22 * MIB]
    assert (timeline.peak_tick, timeline.reserved_tick) == (3, 3)


def test_the_hosts_storages_take_nothing_of_the_card() -> None:
    timeline = memplan.simulate(trace_of(storage(0, 4 * MIB, 1, device="cpu"), storage(1, 512, 2)))
    assert (timeline.peak_allocated, timeline.peak_reserved) == (512, 2 * MIB)


def test_a_workspace_known_as_an_interval() -> None:
    trace = trace_of(storage(0, 64 * MIB, 1, 2, low=0, cause="workspace"), storage(1, 512, 3))
    assert memplan.simulate(trace, workspace="high").peak_allocated == 64 * MIB
    assert memplan.simulate(trace, workspace="low").peak_allocated == 512
    with pytest.raises(UsageError, match="was not measured"):
        memplan.simulate(trace, workspace="measured")
    assert memplan.simulate(trace_of(storage(0, 512, 1)), workspace="measured").peak_allocated == 512


def test_where_there_is_no_room_for_a_workspace_that_of_the_next_plan_is_taken() -> None:
    plans = tuple(ExecutionPlan(f"eng{size}", size * MIB) for size in (64, 32, 16))
    trace = trace_of(storage(0, 20 * MIB, 1), storage(1, 64 * MIB, 2, 3, cause="workspace"), storage(2, 40 * MIB, 4))
    trace = dataclasses.replace(trace, engines=(Engines(1, plans),))
    assert memplan.simulate(trace).peak_allocated == 84 * MIB, "as where there is room"
    fitting = [room for room in range(20, 100) if fits(trace, room * MIB, AllocatorSettings(), low=False)]
    # 20 and 40 MiB at once: the last is no smaller than 60, and all plans are tried on the way
    assert fitting == list(range(60, 100))
    only = dataclasses.replace(trace, engines=())
    assert next(room for room in range(20, 100) if fits(only, room * MIB, AllocatorSettings(), low=False)) == 84


def test_settings_change_what_is_reserved() -> None:
    """11 MiB, freed, then 13: a segment for each, unless one can grow."""
    trace = trace_of(storage(0, 11 * MIB, 1, 2), storage(1, 13 * MIB, 3))
    assert memplan.simulate(trace).peak_reserved == (12 + 14) * MIB  # rounded up to 2 MiB
    grown = memplan.simulate(trace, settings="expandable_segments:True")
    assert grown.peak_reserved == 20 * MIB  # one segment, mapped 20 MiB at a time, serves both


def test_settings_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(UsageError, match=r"expandable_segment.*expandable_segments"):
        memplan.simulate(trace_of(storage(0, 512, 1)), settings="expandable_segment:True")


def test_what_fits_is_tried_with_all_that_the_allocator_does_before_it_gives_up() -> None:
    """Two blocks of 30 MiB, one after the other, sizes that no block serves twice: the first segment is given back."""
    trace = trace_of(storage(0, 30 * MIB, 1, 2), storage(1, 40 * MIB, 3, 4))
    assert memplan.simulate(trace).peak_reserved == 70 * MIB
    assert fits(trace, 70 * MIB, AllocatorSettings(), low=False)
    assert fits(trace, 40 * MIB, AllocatorSettings(), low=False)
    assert not fits(trace, 39 * MIB, AllocatorSettings(), low=False)


def test_without_its_log_the_allocator_does_the_same() -> None:
    trace = trace_of(storage(0, 30 * MIB, 1, 3), storage(1, 4 * MIB, 2, 6), storage(2, 3 * MIB, 4, 5))
    kept, levels = drive(trace, AllocatorSettings(), low=False)
    forgotten, same = drive(trace, AllocatorSettings(), low=False, log=False)
    assert same == levels
    assert forgotten.segments() == kept.segments()
    assert (len(kept.log) > 0, forgotten.log) == (True, [])


@given(st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 40), st.booleans()), min_size=1, max_size=40))
def test_allocated_is_what_is_live_in_blocks_and_reserved_never_less(lives: list[tuple[int, int, bool]]) -> None:
    """Against the obvious count: every live storage in blocks of 512 bytes, and at most 1 MiB that a block keeps."""
    deaths = sorted((2 * i + 2 * length + 2, i) for i, (_, length, dies) in enumerate(lives) if dies)
    order = sorted([(2 * i + 1, "birth", i) for i in range(len(lives))] + [(t, "death", i) for t, i in deaths])
    ticks = {(kind, i): tick for tick, (_, kind, i) in enumerate(order, 1)}
    storages = tuple(
        storage(i, size, ticks["birth", i], ticks.get(("death", i))) for i, (size, _, _) in enumerate(lives)
    )
    timeline = memplan.simulate(trace_of(*storages))
    for tick, allocated, reserved in timeline.events:
        live = [s for s in storages if s.born <= tick and (s.died is None or s.died > tick)]
        least = sum(-(-s.bytes // 512) * 512 for s in live)
        assert least <= allocated <= least + MIB * sum(s.bytes > MIB for s in live)
        assert reserved >= allocated
