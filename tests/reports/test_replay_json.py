"""The JSON of a replay against the history worked out by hand."""

from __future__ import annotations

import json

from simulation.histories import MIB, out_of_memory

from memplan.reports.replay import dumps
from memplan.simulation.allocator.settings import AllocatorSettings
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.side_by_side import cases


def test_everything_is_in_it() -> None:
    found = cases(replay(out_of_memory()), [AllocatorSettings(expandable_segments=True)])
    data = json.loads(dumps(found))
    assert data["format"] == "memplan.replay"
    assert (data["device"], data["events"], data["mismatches"], data["fits"]) == ("cuda:0", 17, [], True)
    oom = {"index": 16, "requested": 40 * MIB, "stream": 0, "pool": [0, 0], "free": 4 * MIB, "reserved": 96 * MIB,
           "allocated": 48 * MIB}  # fmt: skip
    assert data["recorded"] == {
        "settings": "", "capacity": None, "peak_reserved": 96 * MIB, "peak_allocated": 96 * MIB, "fragmentation": 0,
        "out_of_memory": [oom], "ended": False,
    }  # fmt: skip
    assert [(case["settings"], case["capacity"], case["peak_reserved"]) for case in data["cases"]] == [
        ("expandable_segments:True", 100 * MIB, 100 * MIB)
    ]
    why = data["out_of_memory"]
    assert {name: why[name] for name in oom} == oom
    assert why["capacity"] == {"bytes": 100 * MIB, "is_card": True}
    assert why["holders"] == [
        {"frame": {"filename": "/home/me/train.py", "line": 7, "name": "forward"}, "count": 2, "bytes": 48 * MIB}
    ]
    assert why["remedies"][0]["settings"] == "expandable_segments:True"
    assert data["segments"][0]["free"] == 48 * MIB


def test_a_difference_and_nothing_else() -> None:
    data = out_of_memory()
    data["device_traces"][0].pop()
    data["device_traces"][0][1]["size"] += 512
    found = json.loads(dumps(cases(replay(data))))
    assert {row["what"] for row in found["mismatches"]} <= {"segment", "address", "history"}
    assert found["mismatches"]
    assert found["out_of_memory"] is None
