"""Replays against an independent allocator, real recordings and recordings worked out by hand."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from environment import examples, thinned
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from simulation.histories import (
    MIB,
    REAL,
    A,
    B,
    C,
    Program,
    block,
    event,
    freed,
    out_of_memory,
    recorded,
    segment,
    written,
)

import memplan
from memplan.errors import UnitError, UsageError
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.replays.replay import replay

real = pytest.mark.skipif(not REAL.is_dir(), reason="the real snapshots are not here")
FILES = sorted(REAL.glob("*.json.gz")) if REAL.is_dir() else []


def peaks(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> int:
    """The most reserved, counted backwards from the end by the events of segments alone."""
    level = most = sum(row["total_size"] for row in segments)
    for row in reversed(trace):
        change = {"segment_alloc": -1, "segment_map": -1, "segment_free": 1, "segment_unmap": 1}.get(row["action"], 0)
        level += change * row["size"]
        most = max(most, level)
    return most


@real
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_real_snapshot_is_replayed_exactly(file: Path) -> None:
    raw = json.loads(gzip.decompress(file.read_bytes()))
    done = memplan.replay(file)
    assert done.mismatches == []
    assert done.compared
    assert done.timeline.events[-1][2] == sum(row["total_size"] for row in raw["segments"])
    assert done.timeline.events[-1][1] == sum(row["allocated_size"] for row in raw["segments"])
    assert done.peak_reserved == peaks(raw["device_traces"][0], raw["segments"])
    held = [
        (s.address, s.size, s.small, [(b.address, b.size, b.state) for b in s.blocks]) for s in done.timeline.segments
    ]
    assert held == [
        (row["address"], row["total_size"], row["segment_type"] == "small",
         [(b["address"], b["size"], b["state"]) for b in row["blocks"]])
        for row in raw["segments"]
    ]  # fmt: skip


@real
def test_twenty_thousand_events_take_less_than_a_second() -> None:
    file = max(FILES, key=lambda found: found.stat().st_size)
    best = min(timed(file) for _ in range(3))
    assert best < 1.0


def timed(file: Path) -> float:
    begin = time.process_time()
    memplan.replay(file)
    return time.process_time() - begin


@real
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_real_snapshot_that_was_changed_is_found_out(file: Path) -> None:
    """Exactness is no accident: move one block, or one segment, or take one request out, and it is told."""
    raw = json.loads(gzip.decompress(file.read_bytes()))
    trace = raw["device_traces"][0]
    allocs = [index for index, row in enumerate(trace) if row["action"] == "alloc"]
    middle = allocs[len(allocs) // 2]
    address = trace[middle]["addr"]
    freed_later = next(row for row in trace[middle + 1 :] if row["addr"] == address)
    freed_later["addr"] = trace[middle]["addr"] = address + 512
    assert replay(raw).mismatches != []


confs = st.sampled_from(
    ["", "", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4",
     "large_segment_size_mb:40", "expandable_segments:True,large_segment_size_mb:12",
     "max_split_size_mb:20,max_non_split_rounding_mb:64,roundup_power2_divisions:[4:2,>:8]"]
)  # fmt: skip


@profile(max_examples=examples(100), deadline=None)
@given(confs, st.integers(0, 10_000), st.booleans(), st.integers(1, 300))
def test_what_a_reference_did_is_replayed_exactly(conf: str, seed: int, pools: bool, length: int) -> None:
    """No memory runs out; the pool of each request is recorded, or only that of the segments."""
    settings = parse_settings(conf) if conf else AllocatorSettings()
    program = Program(settings, seed, length)
    allocator = program.run()
    done = replay(written(allocator.log, allocator.segments(), recorded(settings), pools=pools))
    assert done.mismatches == []
    assert done.settings == settings
    assert done.peak_allocated == max(level[0] for level in program.levels)
    assert done.timeline.events[-1][1:] == program.levels[-1]
    assert [event[:6] for event in done.timeline.log] == [renamed(event, allocator.log) for event in allocator.log]


def renamed(event: Any, log: list[Any]) -> tuple[Any, ...]:
    """The owner of a block is the index of the event that allocated it."""
    owners = {row.owner: index for index, row in enumerate(log) if row.action == "alloc"}
    return (*event[:5], owners.get(event.owner))


@profile(max_examples=examples(100), deadline=None)
@given(confs, st.integers(0, 10_000), st.floats(0, 1))
def test_the_end_of_what_a_reference_did_is_replayed_exactly(conf: str, seed: int, share: float) -> None:
    """The recording begins anywhere, as when the older events were dropped, but between requests."""
    settings = parse_settings(conf) if conf else AllocatorSettings()
    program = Program(settings, seed, 250)
    allocator = program.run()
    begin = int(share * len(allocator.log))
    while begin and allocator.log[begin - 1].action in ("segment_alloc", "segment_map"):
        begin -= 1
    rest = allocator.log[begin:]
    done = replay(written(rest, allocator.segments(), recorded(settings)))
    assert done.mismatches == []
    if done.has_history:
        assert done.timeline.events[-1][1:] == program.levels[-1]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:40"])
@pytest.mark.parametrize("seed", thinned(range(1, 11), 5))
def test_a_reference_that_ran_out_is_replayed_exactly(conf: str, seed: int) -> None:
    """With releases and retries, and what was on the card each time it failed."""
    settings = parse_settings(conf) if conf else AllocatorSettings()
    allocator = Program(settings, seed, 300, capacity=400 * MIB, largest=27).run()
    ooms = [(index, event.address) for index, event in enumerate(allocator.log) if event.action == "oom"]
    assert ooms
    done = replay(written(allocator.log, allocator.segments(), recorded(settings)))
    assert done.mismatches == []
    assert [(oom.index, oom.free) for oom in done.ooms] == ooms
    assert all(oom.reserved + (oom.free or 0) == 400 * MIB for oom in done.ooms)


def test_collected_garbage_is_no_difference() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.5)
    allocator = Program(settings, 3, 400, limit=700 * MIB, largest=27).run()
    assert any(event.action == "segment_free" for event in allocator.log)
    assert replay(written(allocator.log, allocator.segments(), recorded(settings))).mismatches == []


# By hand


def small() -> dict[str, Any]:
    """Two blocks of 3 MiB in a segment of 20; the first is freed, and 2 MiB are put in its place."""
    trace = [
        event("segment_alloc", A, 20 * MIB),
        event("alloc", A, 3 * MIB),
        event("alloc", A + 3 * MIB, 3 * MIB - 100),
        *freed(A, 3 * MIB),
        event("alloc", A, 2 * MIB + 1),  # under 1 MiB would be left: the block keeps its 3 MiB
    ]
    live = "active_allocated"
    return {
        "segments": [
            segment(A, block(3 * MIB, live, 2 * MIB + 1), block(3 * MIB, live, 3 * MIB - 100), block(14 * MIB))
        ],
        "device_traces": [trace],
    }


def test_by_hand() -> None:
    done = replay(small())
    assert done.mismatches == []
    assert done.timeline.device == "cuda:0"
    assert done.timeline.events == (
        (0, 0, 0),
        (2, 3 * MIB, 20 * MIB),
        (3, 6 * MIB, 20 * MIB),
        (4, 3 * MIB, 20 * MIB),
        (6, 6 * MIB, 20 * MIB),
    )
    assert (done.peak_allocated, done.peak_reserved, done.fragmentation) == (6 * MIB, 20 * MIB, 14 * MIB)
    assert done.fragmentation_share == 0.7
    assert done.ooms == ()
    assert "every address and every segment as recorded" in str(done)


@pytest.mark.parametrize(
    ("index", "changes", "told"),
    [
        (2, {"addr": A + 4 * MIB}, "event 2, history: recorded the block at 0x7f0000400000"),
        (0, {"size": 22 * MIB}, "event 1, segment"),
        (1, {"size": 5 * MIB}, "event 2, address"),
    ],
)
def test_a_difference_is_told(index: int, changes: dict[str, Any], told: str) -> None:
    data = small()
    data["device_traces"][0][index] |= changes
    assert any(told in str(mismatch) for mismatch in replay(data).mismatches)


def test_a_segment_that_torch_took_and_we_did_not_is_told() -> None:
    data = small()
    data["segments"].append(segment(C, block(20 * MIB)))
    data["device_traces"][0].append(event("segment_alloc", C, 20 * MIB))
    assert [str(m) for m in replay(data).mismatches] == [
        "event 6, segment: recorded segment_alloc of 20971520 bytes at 0x7f0080000000, replayed none"
    ]


def test_memory_that_torch_kept_and_we_would_not_have_is_told() -> None:
    """`empty_cache` gives back all that is free: here torch is said to have kept one of two free segments."""
    trace = [event("segment_free", A, 20 * MIB)]
    assert replay({"segments": [], "device_traces": [trace]}).mismatches == []
    data = {"segments": [segment(B, block(20 * MIB))], "device_traces": [trace]}
    assert [str(m) for m in replay(data).mismatches] == [
        "event 0, segment: recorded nothing, replayed segment_free of 20971520 bytes at 0x7f0040000000"
    ]


def test_a_block_used_on_another_stream_is_free_when_it_was() -> None:
    trace = [
        event("segment_alloc", A, 20 * MIB),
        event("alloc", A, 8 * MIB),
        event("free_requested", A, 8 * MIB),
        event("alloc", A + 8 * MIB, 8 * MIB),  # the first is not free yet
        event("free_completed", A, 8 * MIB),
        event("alloc", A, 8 * MIB),
    ]
    live = block(8 * MIB, "active_allocated")
    data = {"segments": [segment(A, live, live, block(4 * MIB))], "device_traces": [trace]}
    done = replay(data)
    assert done.mismatches == []
    assert [level[1] for level in done.timeline.events] == [0, 8 * MIB, 0, 8 * MIB, 8 * MIB, 16 * MIB]
    trace[2], trace[4] = trace[4], trace[2]
    assert replay(data).mismatches != []


def test_streams_and_pools_are_apart() -> None:
    """The same request three times: another stream and a graph's pool have segments of their own."""
    live = block(2 * MIB, "active_allocated")
    trace = [
        event("segment_alloc", A, 20 * MIB),
        event("alloc", A, 2 * MIB),
        event("segment_alloc", B, 20 * MIB, stream=5),
        event("alloc", B, 2 * MIB, stream=5),
        event("segment_alloc", C, 20 * MIB),
        event("alloc", C, 2 * MIB),
        event("alloc", A + 2 * MIB, 2 * MIB),
    ]
    segments = [
        segment(A, live, live, block(16 * MIB)),
        segment(B, live, block(18 * MIB), stream=5),
        segment(C, live, block(18 * MIB), segment_pool_id=(0, 1)),
    ]
    assert replay({"segments": segments, "device_traces": [trace]}).mismatches == []
    del segments[2]["segment_pool_id"]
    assert replay({"segments": segments, "device_traces": [trace]}).mismatches != []


def test_a_left_over_that_only_later_events_show() -> None:
    """A block of 2 MiB may be up to 1 MiB larger, and 5 MiB behind it free, or less. Torch passes that over: less."""
    end = [
        segment(A, block(2 * MIB + 5 * MIB), block(13 * MIB, "active_allocated")),
        segment(B, block(20 * MIB)),
    ]
    trace = [event("alloc", B, 4 * MIB + 512), *freed(B, 4 * MIB + 512), *freed(A, 2 * MIB)]
    done = replay({"segments": end, "device_traces": [trace]})
    assert done.mismatches == []
    assert done.start.segments[0].blocks[0].size == 3 * MIB


def test_without_history() -> None:
    data = out_of_memory()
    del data["device_traces"]
    done = replay(data)
    assert not done.has_history
    assert (done.mismatches, done.ooms) == ([], ())
    assert (done.peak_reserved, done.peak_allocated) == (96 * MIB, 48 * MIB)
    assert done.timeline.events == ((0, 48 * MIB, 96 * MIB),)
    assert "no history" in str(done)


def test_a_history_that_makes_no_sense_ends_in_differences() -> None:
    trace = [*freed(A, 5 * MIB), *freed(A, 5 * MIB), event("alloc", A, MIB), event("alloc", A, MIB),
             event("free_requested", A, 5), event("free_requested", A, 5), event("free_completed", B, 7),
             event("segment_free", C, 512), event("segment_alloc", C, 2 * MIB), event("segment_alloc", C, 2 * MIB),
             event("segment_unmap", C, 7), event("segment_map", C, 7),
             event("oom", 5, 5)]  # fmt: skip
    done = replay({"segments": [segment(A, block(20 * MIB))], "device_traces": [trace]})
    assert done.mismatches != []
    assert any(mismatch.what == "history" for mismatch in done.mismatches)


@profile(max_examples=examples(100), deadline=None)
@given(st.integers(0, 1000), st.data())
def test_a_damaged_history_never_ends_in_an_error(seed: int, data: st.DataObject) -> None:
    settings = AllocatorSettings(expandable_segments=seed % 2 == 0)
    allocator = Program(settings, seed, 60, capacity=700 * MIB).run()
    raw = written(allocator.log, allocator.segments(), recorded(settings))
    trace = raw["device_traces"][0]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(trace) - 1))
        other = data.draw(st.integers(0, len(trace) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                del trace[at]
            case 1:
                trace[at], trace[other] = trace[other], trace[at]
            case 2:
                trace[at] = trace[at] | {"size": data.draw(st.integers(1, 1 << 40))}
            case _:
                trace.insert(at, trace[other])
        if not trace:
            return
    done = replay(raw)
    for text in ("", "expandable_segments:True"):
        replay(raw, settings=text, capacity=600 * MIB)
    assert isinstance(done.mismatches, list)


def test_settings_and_capacity_make_a_what_if() -> None:
    done = replay(small(), settings="expandable_segments:True", capacity="30 MiB")
    assert not done.compared
    assert done.mismatches == []
    assert done.capacity == 30 * MIB
    assert done.settings == AllocatorSettings(expandable_segments=True)
    assert done.recorded_settings == AllocatorSettings()
    assert replay(small(), settings=AllocatorSettings(), capacity=19 * MIB).ooms != ()


def test_bad_settings_and_capacities_are_refused_before_the_file_is_read() -> None:
    with pytest.raises(UsageError, match="expandable_segments"):
        replay("no such file", settings="expandable_segment:True")
    with pytest.raises(UnitError):
        replay("no such file", capacity="much")


def test_the_stack_of_each_block() -> None:
    done = replay(out_of_memory())
    owners = [b.owner for s in done.timeline.segments for b in s.blocks if b.requested]
    assert [done.stack_of(owner)[1].filename for owner in owners] == ["/home/me/train.py"] * 2
    assert done.stack_of(None) == done.stack_of(10**9) == ()
    late = out_of_memory()
    late["device_traces"][0] = late["device_traces"][0][-1:]
    done = replay(late)  # the blocks were there at the start, and say themselves where they came from
    owners = [b.owner for s in done.timeline.segments for b in s.blocks if b.requested]
    assert [done.stack_of(owner)[1].filename for owner in owners] == ["/home/me/train.py"] * 2
