"""Cases beside each other, by hand."""

from __future__ import annotations

from simulation.histories import MIB, A, B, C, block, out_of_memory, segment

from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.side_by_side import SegmentGroup, cases, group_segments

EXPANDABLE = AllocatorSettings(expandable_segments=True)
SPLIT = AllocatorSettings(max_split_size=64 * MIB)


def test_it_fits_where_one_of_the_settings_fits() -> None:
    base = replay(out_of_memory())
    assert cases(base).all_fit is False
    assert cases(base, [SPLIT]).all_fit is False
    assert cases(base, [SPLIT, EXPANDABLE]).all_fit is True
    assert cases(base, [], 200 * MIB).all_fit is True
    assert cases(base, [EXPANDABLE], 90 * MIB).all_fit is False


def test_nobody_can_say_whether_it_fits_on_a_card_that_is_not_known() -> None:
    data = out_of_memory()
    del data["device_traces"][0][-1]["device_free"]
    assert cases(replay(data), [EXPANDABLE]).all_fit is None
    assert cases(replay(data)).all_fit is False


def test_the_last_failure_is_explained() -> None:
    found = cases(replay(out_of_memory()))
    assert found.base is found.replay
    assert found.explanation is not None
    assert found.explanation.oom is found.replay.ooms[-1]
    assert cases(found.replay, [], 200 * MIB).explanation is None


def test_segments_by_kind() -> None:
    live = "active_allocated"
    data = {
        "segments": [
            segment(A, block(2 * MIB)),
            segment(B, block(20 * MIB, live), block(4 * MIB), block(10 * MIB, "active_pending_free")),
            segment(C, block(30 * MIB, live), block(7 * MIB)),
            segment(C + (1 << 30), block(3 * MIB, live), stream=3),
        ]
    }
    assert group_segments(replay(data).timeline.segments) == [
        SegmentGroup(False, 0, (0, 0), False, 2, 71 * MIB, 50 * MIB, 7 * MIB),
        SegmentGroup(False, 3, (0, 0), False, 1, 3 * MIB, 3 * MIB, 0),
        SegmentGroup(True, 0, (0, 0), False, 1, 2 * MIB, 0, 2 * MIB),
    ]
    assert group_segments(replay(data).timeline.segments)[0].free == 21 * MIB
