"""Points in other processes: what cannot be sent, what Ctrl-C leaves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import InputError
from memplan.studies.axes.subject import Subject
from memplan.studies.sweeps import parallel
from memplan.studies.sweeps.parallel import Task, record_points
from memplan.studies.sweeps.points import Outcome, record_point
from memplan.trace.recording.session import Target
from memplan.trace.step import StepOptions


def tasks(count: int, what: Any = None) -> list[Task]:
    what = what or (lambda: nn.Linear(4, 4))
    return [(Subject(what, StepOptions((f"{n + 1}x4",)).checked()), Target("cpu"), None) for n in range(count)]


def test_what_cannot_be_sent_is_refused_where_processes_were_asked_for() -> None:
    lock = threading.Lock()

    def make() -> nn.Module:
        with lock:
            return nn.Linear(4, 4)

    with pytest.raises(InputError, match=r"make cannot be sent to another process \(TypeError: .*jobs=1"):
        record_points(tasks(2, make), 2, lambda done, total: None)


def test_without_a_number_of_jobs_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def make() -> nn.Module:
        with lock:
            return nn.Linear(4, 4)

    monkeypatch.setattr(parallel, "STARTING", 0.0)  # as if there were much to do
    outcomes = record_points(tasks(3, make), None, lambda done, total: None)
    assert [outcomes[n] for n in range(3)] == [record_point(*task) for task in tasks(3)]


def test_progress_is_told_of_every_point() -> None:
    seen: list[tuple[int, int]] = []
    record_points(tasks(3), 1, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def stop(done: int, total: int) -> None:
    if done == 2:
        raise KeyboardInterrupt


def test_interrupted_it_keeps_what_is_done() -> None:
    found = record_points(tasks(6), 1, stop)
    assert found == {number: record_point(*task) for number, task in enumerate(tasks(2))}


def test_processes_give_what_this_one_gives_with_its_threads_and_keep_what_is_done() -> None:
    """oneDNN's scratch goes by the number of threads. Starting processes is what takes long: these are started once."""
    width, before = 4, torch.get_num_threads()  # a closure, which another process has to be sent
    convolutions = [
        (Subject(lambda: nn.Conv2d(3, 4, 5), StepOptions((f"{n}x3x64x64",)).checked()), Target("cpu"), None)
        for n in (1, 3)
    ]
    given = [*convolutions, *tasks(4, lambda: nn.Linear(width, width))]
    try:
        torch.set_num_threads(3)
        whole = {number: record_point(*task) for number, task in enumerate(given)}
        assert record_points(given, 2, lambda done, total: None) == whole
        found = record_points(given, 2, stop)  # in the same processes
        assert 2 <= len(found) <= 6
        assert all(found[number] == whole[number] for number in found)
        torch.set_num_threads(1)
        assert {number: record_point(*task) for number, task in enumerate(given)} != whole
    finally:
        torch.set_num_threads(before)


def test_interrupted_before_anything_is_done_it_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*task: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "record_point", stopped)
    with pytest.raises(KeyboardInterrupt):
        record_points(tasks(2), 1, lambda done, total: None)
