"""What a session sees of a stretch of a program, against the tensors' own sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memplan import _torch
from memplan.integrations.line_profiles.line_session import Session
from memplan.trace.recording.followed.line_watch import code_of, following

MODEL = nn.Linear(1000, 1000)


def test_peak_and_end_of_a_stretch() -> None:
    session = Session()
    session.begin()
    first = torch.ones(10_000)
    second = first.clone()
    del first
    measured = session.end()
    assert measured.after - measured.before == second.nbytes
    assert measured.peak - measured.before == 2 * second.nbytes
    assert measured.before >= sum(one.nbytes for one in MODEL.parameters())
    assert "measured on cpu: " in str(measured)
    assert measured.profiles() == ()


def test_gradients_and_views_from_before_count_once() -> None:
    def before() -> int:
        session = Session()
        session.begin()
        return session.end().before

    without = before()
    MODEL.weight.sum().backward()
    views = [MODEL.weight.detach()[number:] for number in range(5)]
    assert before() - without == MODEL.weight.nbytes
    assert len(views) == 5
    MODEL.zero_grad()
    assert before() == without


def test_memory_of_numpy_is_none_of_torchs() -> None:
    import numpy

    array = numpy.ones(1_000_000)
    session = Session()
    session.begin()
    without = session.end().before
    tensor = torch.from_numpy(array)
    session = Session()
    session.begin()
    assert session.end().before == without
    assert len(tensor) == 1_000_000


def test_what_ends_between_two_sessions_ends_once() -> None:
    session = Session()
    session.begin()
    kept = [torch.ones(1000), torch.ones(2000)]
    first = session.end()
    session = Session()
    session.begin()  # the profiler knows these from its first record, and the weak references know them too
    kept.pop()
    second = session.end()
    assert second.before == first.after
    assert second.after == first.after - 8000


def test_on_a_card_what_its_allocator_held_is_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 KiB from before are freed, 1.5 KiB come and stay, 1 KiB comes and goes."""
    of = _torch.Profile.of
    session = Session()
    for name, answer in (("is_available", True), ("is_initialized", True), ("memory_allocated", 8192),
                         ("get_device_name", "a card")):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    with following((), [code_of(three, "")]):
        session.begin()
        three()
    sizes = [(1, 1536), (2, 1024), (2, -1024), (3, -4096)]

    def on_card(profile: Any, device: str = "cpu") -> _torch.Profile:
        host = of(profile)
        if device == "cpu":
            return host
        times = [host.ranges[f"line{tick}"][0] for tick in range(4)]
        moments = [times[0] + 1, times[0] + 2, times[1] + 1, times[2] + 1]
        events = [_torch.MemoryEvent(*one, time, "", -1) for one, time in zip(sizes, moments, strict=True)]
        return replace(host, events=events)

    monkeypatch.setattr(_torch.Profile, "of", on_card)
    measured = session.end()
    assert (measured.device, measured.before, measured.peak, measured.after) == ("a card", 8192, 10752, 5632)
    (profile,) = measured.profiles()
    assert [(row.held, row.added, row.freed, row.peak) for row in profile.rows if row.hits] == [
        (10752, 2560, 0, 10752), (9728, 0, 1024, 10752), (5632, 0, 4096, 9728),
    ]  # fmt: skip


def three() -> None:
    one = 1
    two = one + 1
    del two
