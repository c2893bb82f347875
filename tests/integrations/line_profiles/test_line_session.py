"""What a session sees of a stretch of a program, against the tensors' own sizes."""

from __future__ import annotations

import torch
from torch import nn

from memplan.integrations.line_profiles.line_session import Session

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
