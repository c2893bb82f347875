"""The note on expandable segments, beside the allocator that follows every request of the planned step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memplan.devices import find
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.placement import Home
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.plan.segments_note import segments_note
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.schedule.to_trace import reserved_bytes, timeline_of, trace_of
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.simulate import simulate

EXPANDABLE = AllocatorSettings(expandable_segments=True)
OUTSIDE = OutsideMemory(home=Home("cuda:0", find("rtx4090")))


def shrinking() -> Schedule:
    """Activations of many sizes, the largest first: free blocks are cut for smaller ones, and serve none as large."""
    layers = [layer for width in range(9, 1, -1) for layer in (nn.Linear(width * 64, (width - 1) * 64), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(16384, 576)
    return schedule(capture(model, call_of((x,), {})).graph, Choices())


def test_the_note_says_what_both_reserve() -> None:
    """`simulate` runs the trace of the step by either setting; the note has its own run of the requests."""
    planned = shrinking()
    trace = trace_of(planned, OUTSIDE)
    fixed, other = (simulate(trace, settings=conf).peak_reserved for conf in (None, "expandable_segments:True"))
    assert other < 0.95 * fixed
    (note,) = segments_note(planned, OUTSIDE)
    assert note.startswith("with PYTORCH_ALLOC_CONF=expandable_segments:True the allocator would reserve ")
    assert f"{other / 2**20:.1f} MiB instead of {fixed / 2**20:.1f} MiB" in note


def test_where_segments_are_expandable_already_nothing_is_said() -> None:
    planned = shrinking()
    outside = replace(OUTSIDE, home=replace(OUTSIDE.home, allocator=EXPANDABLE))
    assert not list(segments_note(planned, outside))
    expected = simulate(trace_of(planned, OUTSIDE), settings="expandable_segments:True").peak_reserved
    assert timeline_of(planned, outside).peak_reserved == expected == reserved_bytes(planned, outside)


@pytest.mark.parametrize("allocator", [AllocatorSettings(), EXPANDABLE])
def test_pages_of_20_mib_cost_a_small_step_more(allocator: AllocatorSettings) -> None:
    """By hand: the only large request is the input, in a segment of its size or in a page of 20 MiB."""
    model, x = nn.Linear(64, 1), torch.randn(49152, 64)  # 12 MiB
    planned = schedule(capture(model, call_of((x,), {})).graph, Choices())
    outside = replace(OUTSIDE, home=replace(OUTSIDE.home, allocator=allocator))
    notes = list(segments_note(planned, outside))
    large = 20 << 20 if allocator.expandable_segments else 12 << 20
    assert reserved_bytes(planned, outside) == large + (2 << 20)  # with the segment of the small pool
    assert bool(notes) == allocator.expandable_segments
    assert not notes or "expandable_segments:False" in notes[0]


def test_the_setting_to_set_has_the_others_of_the_process() -> None:
    """Setting the variable replaces what it had: the note's setting is the one that is simulated."""
    planned = shrinking()
    own = AllocatorSettings(max_split_size=1 << 30, garbage_collection_threshold=0.8)
    (note,) = segments_note(planned, replace(OUTSIDE, home=replace(OUTSIDE.home, allocator=own)))
    setting = note.removeprefix("with PYTORCH_ALLOC_CONF=").partition(" ")[0]
    assert parse_settings(setting) == replace(own, expandable_segments=True)
    reserved = simulate(trace_of(planned, OUTSIDE), settings=setting).peak_reserved
    assert f"would reserve {reserved / 2**20:.1f} MiB instead of" in note


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_nothing_is_said_of_another_allocator(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "backend:cudaMallocAsync")
    assert not list(segments_note(shrinking(), OUTSIDE))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")  # the newer name counts
    assert list(segments_note(shrinking(), OUTSIDE))
