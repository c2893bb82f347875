"""The report of a replay, read as a user reads it; the figures are those of the history worked out by hand."""

from __future__ import annotations

from typing import Any

from simulation.histories import MIB, A, block, event, frame, freed, out_of_memory, segment

from memplan.reports.replay import report as report_of
from memplan.reports.terminal import text_of
from memplan.simulation.allocator.settings import parse_settings
from memplan.simulation.replays.out_of_memory import REMEDIES
from memplan.simulation.replays.replay import replay
from memplan.simulation.replays.side_by_side import cases


def report(data: dict[str, Any], *settings: str, capacity: int | None = None, top: int = 10) -> str:
    text = text_of(report_of(cases(replay(data), [parse_settings(text) for text in settings], capacity), top))
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def row(text: str, begin: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(begin)).split()


def test_an_out_of_memory() -> None:
    text = report(out_of_memory(), "expandable_segments:True", "max_split_size_mb:64")
    assert "Replayed: every address and every segment as recorded." in text
    assert " ".join(row(text, "recorded (default)")) == (
        "recorded (default) 96.00 MiB 96.00 MiB 0 bytes out at event 16"
    )
    assert " ".join(row(text, "expandable_segments:True")) == (
        "expandable_segments:True 100.00 MiB 96.00 MiB 4.00 MiB no"
    )
    assert row(text, "max_split_size_mb:64")[-4:] == ["out", "at", "event", "16"]
    for line in (
        "  asked for: 40.00 MiB, /home/me/train.py:7 forward",
        "  needed from the card: 40.00 MiB; the card had 4.00 MiB left of 100.00 MiB",
        "  held: 96.00 MiB, of it 48.00 MiB in blocks in use, 48.00 MiB in free blocks",
        "  largest free block: 24.00 MiB, 16.00 MiB too small",
        "Would have helped, each replayed from the start on a card that gives 100.00 MiB:",
        "  expandable_segments:True: peak 100.00 MiB reserved",
        "Tried, and of no help:",
        "  max_split_size_mb:64",
    ):
        assert line in text.splitlines()
    assert " ".join(row(text, "large, 20-100 MiB")) == "large, 20-100 MiB 2 48.00 MiB 24.00 MiB 16.00 MiB too small"
    assert " ".join(row(text, "/home/me/train.py")) == "/home/me/train.py:7 forward 2 48.00 MiB 100 %"
    assert " ".join(row(text, "all")) == "all 2 96.00 MiB 48.00 MiB 48.00 MiB 24.00 MiB"


def test_a_card_of_another_size() -> None:
    text = report(out_of_memory(), "expandable_segments:True", capacity=120 * MIB)
    assert "in 120.00 MiB" in text
    assert row(text, "as recorded (default)")[-4:] == ["out", "at", "event", "16"]
    assert row(text, "expandable_segments:True")[-1] == "fits"
    assert "fits" in report(out_of_memory(), capacity=140 * MIB)


def test_where_nothing_helps() -> None:
    data = out_of_memory()
    data["device_traces"][0][-1]["size"] = 60 * MIB
    text = " ".join(report(data).split())
    assert "No setting can help: blocks in use and the request exceed 100.00 MiB by 8.00 MiB." in text
    assert f"The card lacked 56.00 MiB for this request. Tried: {' '.join(REMEDIES)}" in text


def test_a_card_that_is_not_known_and_a_process_held_to_less() -> None:
    data = out_of_memory()
    data["device_traces"][0][-1]["device_free"] = 1 << 40
    assert "held to less (a memory fraction)" in " ".join(report(data).split())
    del data["device_traces"][0][-1]["device_free"]
    text = report(data, "expandable_segments:True")
    assert row(text, "expandable_segments:True")[-2:] == ["not", "known"]
    assert "give --capacity" in " ".join(text.split())


def test_without_history() -> None:
    data = out_of_memory()
    del data["device_traces"]
    text = report(data)
    assert "no history" in text
    assert "_record_memory_history" in text
    assert "Replayed" not in text
    assert row(text, "all")[:5] == ["all", "2", "96.00", "MiB", "48.00"]
    assert "Who holds it at the end" in text


def test_differences_are_told_loudly_and_counted() -> None:
    data = out_of_memory()
    data["device_traces"][0] = [*data["device_traces"][0], *[event("alloc", A + 77 * MIB + k, 5) for k in range(7)]]
    text = report(data)
    count = len(replay(data).mismatches)
    assert count > 7
    assert f"Replayed with {count} differences from the recording; what follows is not exact." in text
    assert text.count("  event ") == 3
    assert "as recorded." not in text


def test_a_cached_start_is_told() -> None:
    trace = [*freed(A, 2 * MIB), event("segment_free", A, 20 * MIB)]
    text = " ".join(report({"segments": [], "device_traces": [trace]}, "expandable_segments:True").split())
    assert "without the 18.00 MiB that were held besides" in text


def test_top_and_the_rest_together() -> None:
    stacks = [[frame(f"f{k}.py", k, "f")] for k in range(30)]
    live = [block(512 * (k + 1), "active_allocated", frames=stacks[k]) for k in range(30)]
    rest = 2 * MIB - sum(row["size"] for row in live)
    data = {"segments": [segment(A, *live, block(rest))]}
    text = report(data, top=3)
    assert " ".join(row(text, "f29.py")) == "f29.py:29 f 1 15.00 KiB 6 %"
    assert row(text, "... 27 more")[2:4] == ["more", "27"]
    assert "f0.py:0 f" in report(data, top=0)
