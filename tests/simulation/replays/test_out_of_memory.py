"""An out-of-memory explained, against the same worked out by hand."""

from __future__ import annotations

import pytest
from simulation.histories import MIB, A, B, block, event, frame, out_of_memory, segment

from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.replays.out_of_memory import REMEDIES, FreeBlocks, Holder, explain_oom, holders, innermost
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.what_if import Capacity, what_if
from memplan.simulation.snapshots.read import Frame

LINE = Frame("/home/me/train.py", 7, "forward")


def test_by_hand() -> None:
    why = explain_oom(replay(out_of_memory()))
    assert (why.oom.index, why.oom.requested, why.needed) == (16, 40 * MIB, 40 * MIB)
    assert why.capacity == Capacity(100 * MIB, True)
    assert why.frame == LINE
    assert why.free == (FreeBlocks((0, 0), 0, False, 20 * MIB, 2, 48 * MIB, 24 * MIB, "16.00 MiB too small"),)
    assert (why.largest_free, why.largest_why) == (24 * MIB, "16.00 MiB too small")
    assert why.holders == (Holder(LINE, 2, 48 * MIB),)
    assert (why.shortfall, why.beyond, why.waiting) == (36 * MIB, 0, 0)
    assert [(str(remedy.settings), remedy.peak_reserved) for remedy in why.remedies] == [
        ("expandable_segments:True", 100 * MIB),
        ("roundup_power2_divisions:8,expandable_segments:True", 100 * MIB),
    ]


def test_a_remedy_is_proven_by_replay() -> None:
    base = replay(out_of_memory())
    for remedy in explain_oom(base).remedies:
        assert what_if(base, remedy.settings).fits
    helped = {remedy.settings for remedy in explain_oom(base).remedies}
    for text in REMEDIES:
        assert what_if(base, parse_settings(text)).fits == (parse_settings(text) in helped)


def test_no_setting_helps_where_the_blocks_in_use_are_too_much() -> None:
    data = out_of_memory()
    data["device_traces"][0][-1]["size"] = 60 * MIB
    why = explain_oom(replay(data))
    assert why.remedies == ()
    assert why.tried == REMEDIES
    assert (why.beyond, why.shortfall) == (8 * MIB, 56 * MIB)


def test_every_reason_that_a_free_block_does_not_serve() -> None:
    live = "active_allocated"
    segments = [
        segment(A, block(4 * MIB, live), block(30 * MIB), stream=7),
        segment(B, block(4 * MIB, live), block(30 * MIB), segment_pool_id=(0, 5)),
        segment(B + (1 << 30), block(MIB, live), block(MIB)),
        segment(B + (2 << 30), block(8 * MIB, live), block(12 * MIB)),
        segment(B + (3 << 30), block(8 * MIB, "active_pending_free"), block(8 * MIB, live), block(4 * MIB)),
    ]
    trace = [{"action": "oom", "device_free": 0, "size": 20 * MIB, "stream": 0}]
    why = explain_oom(replay({"segments": segments, "device_traces": [trace]}))
    assert [(row.bytes, row.why) for row in why.free] == [
        (12 * MIB, "8.00 MiB too small"),  # what could nearly have served stands first
        (4 * MIB, "16.00 MiB too small"),
        (30 * MIB, "of another stream"),
        (30 * MIB, "of a private memory pool"),
        (MIB, "kept for requests up to 1 MiB"),
    ]
    assert why.waiting == 8 * MIB
    assert why.largest_free == 30 * MIB
    assert why.largest_why == "of another stream"
    assert why.frame is None
    assert why.holders == (Holder(None, 6, 33 * MIB),)


def test_a_request_of_a_private_pool_and_a_small_one() -> None:
    segments = [segment(A, block(4 * MIB, "active_allocated"), block(30 * MIB))]
    trace = [{"action": "oom", "device_free": 0, "size": 20 * MIB, "stream": 0, "pool_id": (0, 1)}]
    assert explain_oom(replay({"segments": segments, "device_traces": [trace]})).largest_why == "of another memory pool"
    trace = [{"action": "oom", "device_free": 0, "size": 512, "stream": 0}]
    why = explain_oom(replay({"segments": segments, "device_traces": [trace]}))
    assert (why.largest_why, why.needed, why.shortfall) == ("kept for requests above 1 MiB", 2 * MIB, 2 * MIB)


def test_a_block_above_the_split_limit_serves_only_what_is_nearly_as_large() -> None:
    segments = [segment(A, block(4 * MIB, "active_allocated")), segment(B, block(80 * MIB))]
    trace = [{"action": "oom", "device_free": 0, "size": 30 * MIB, "stream": 0}]
    data = {"segments": segments, "device_traces": [trace], "allocator_settings": {"max_split_size": 64 * MIB}}
    assert explain_oom(replay(data)).largest_why.startswith("above max_split_size")


def test_what_if_it_runs_out_only_on_a_smaller_card() -> None:
    """The oom is not the recorded one: a block of 48 MiB, where 40 are all that there is."""
    data = out_of_memory()
    data["device_traces"][0].pop()
    base = replay(data)
    assert base.fits
    why = explain_oom(what_if(base, capacity=40 * MIB))
    assert (why.oom.index, why.oom.requested, why.capacity) == (1, 48 * MIB, Capacity(40 * MIB, True))
    assert (why.shortfall, why.beyond) == (8 * MIB, 8 * MIB)
    assert why.holders == ()


def test_nothing_is_tried_where_the_cards_memory_is_not_known() -> None:
    data = out_of_memory()
    del data["device_traces"][0][-1]["device_free"]
    why = explain_oom(replay(data))
    assert (why.capacity, why.remedies, why.tried) == (None, (), ())


def test_expandable_segments_take_whole_pages() -> None:
    trace = [{"action": "oom", "device_free": 5 * MIB, "size": 30 * MIB, "stream": 0}]
    data = {"segments": [], "device_traces": [trace], "allocator_settings": {"expandable_segments": True}}
    why = explain_oom(replay(data))
    assert (why.needed, why.shortfall) == (40 * MIB, 35 * MIB)
    assert AllocatorSettings(expandable_segments=True) not in [remedy.settings for remedy in why.remedies]


@pytest.mark.parametrize(
    ("stack", "found"),
    [
        (["/v/site-packages/torch/nn/a.py", "/v/site-packages/transformers/m.py", "/me/train.py"], 1),
        (["/usr/lib/python3/dist-packages/torch/a.py", "/home/me/torch/train.py"], 1),
        (["torch/aten", "net.py"], 1),
        (["c10/cuda/a.cpp", "??", "train.py"], 2),
        (["/src/pytorch/torch/nn/a.py", "C:\\v\\site-packages\\torch\\a.py", "train.py"], 2),
        (["c10/cuda/a.cpp", "torch/csrc/autograd/engine.cpp"], 0),  # backward: no line of Python
    ],
)
def test_the_innermost_line_of_ones_own(stack: list[str], found: int) -> None:
    frames = [Frame(name, at, "f") for at, name in enumerate(stack)]
    assert innermost(frames) == frames[found]


def test_no_stack_is_no_line() -> None:
    assert innermost([]) is None


def test_who_holds_the_most_stands_first() -> None:
    def stack(line: int) -> list[dict[str, object]]:
        return [frame("/v/site-packages/torch/a.py", 9, "g"), frame("net.py", line, "f")]

    trace = [
        event("segment_alloc", A, 2 * MIB),
        event("alloc", A, 512, frames=stack(1)),
        event("alloc", A + 512, 1000, frames=stack(2)),
        event("alloc", A + 1536, 512, frames=stack(1)),
        event("alloc", A + 2048, 512),
    ]
    live = "active_allocated"
    blocks = [block(512, live), block(1024, live, 1000), block(512, live), block(512, live), block(2 * MIB - 2560)]
    done = replay({"segments": [segment(A, *blocks)], "device_traces": [trace]})
    assert done.mismatches == []
    assert holders(done, done.timeline.segments) == [
        Holder(Frame("net.py", 1, "f"), 2, 1024),
        Holder(Frame("net.py", 2, "f"), 1, 1024),
        Holder(None, 1, 512),
    ]
