"""What a session sees of a stretch of a program, against the tensors' own sizes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from environment import ENVIRONMENT, needs_cuda_torch
from torch import nn

from memplan import _torch
from memplan.devices import find
from memplan.dry.cuda_torch import find_torch
from memplan.dry.library import library_for
from memplan.integrations.line_profiles.line_session import Session
from memplan.trace.dry_run.process import process_variables
from memplan.trace.recording.followed.line_watch import code_of, following

ROOT = Path(__file__).resolve().parents[3]

MODEL = nn.Linear(1000, 1000)


@pytest.fixture(autouse=True, scope="module")
def _unfrozen(_older_objects_frozen: None) -> None:
    """A session finds the tensors that Python's collector knows: frozen ones are unknown to it."""
    MODEL.weight = nn.Parameter(MODEL.weight.detach().clone())
    MODEL.bias = nn.Parameter(MODEL.bias.detach().clone())


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


class Card:
    """A card's allocator as torch tells of it: a history, and counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[_torch.HistoryEvent] = [_torch.HistoryEvent("alloc", 1, 4096, 0, (0, 0))]  # from before
        self.counts = {"allocation.all.allocated": 7, "allocation.all.freed": 3}
        for name, answer in (
            ("is_available", True), ("is_initialized", True), ("memory_allocated", 8192),
            ("get_device_name", "a card"), ("memory_stats", self.counts),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
        monkeypatch.setattr(_torch, "record_history", lambda *, stacks: None)
        monkeypatch.setattr(_torch, "history", lambda: list(self.rows))
        monkeypatch.setattr(_torch, "end_history", lambda: None)

    def alloc(self, *blocks: tuple[int, int]) -> None:
        self.rows += [_torch.HistoryEvent("alloc", address, size, 0, (0, 0)) for address, size in blocks]
        self.counts["allocation.all.allocated"] += len(blocks)

    def free(self, address: int, size: int) -> None:
        for action in ("free_requested", "free_completed"):
            self.rows.append(_torch.HistoryEvent(action, address, size, 0, (0, 0)))
        self.counts["allocation.all.freed"] += 1


def on_card(card: Card) -> None:
    card.alloc((2, 1500), (3, 1024))
    card.free(3, 1024)
    card.free(1, 4096)


def test_on_a_card_what_its_allocator_held_is_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 KiB in blocks of 512 bytes come and stay, 1 KiB comes and goes, 4 KiB from before are freed."""
    card, session = Card(monkeypatch), Session()
    with following((), [code_of(on_card, "")]):
        session.begin()
        on_card(card)
    measured = session.end()
    assert (measured.device, measured.before, measured.peak, measured.after) == ("a card", 8192, 10752, 5632)
    (profile,) = measured.profiles()
    assert [(row.held, row.added, row.freed, row.peak) for row in profile.rows if row.hits] == [
        (10752, 2560, 0, 10752), (9728, 0, 1024, 10752), (5632, 0, 4096, 9728),
    ]  # fmt: skip


def test_a_card_that_is_used_first_within_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    with following((), [code_of(three, "")]):
        session.begin()
        three()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    (profile,) = session.end().profiles()
    assert profile.notes == ("CUDA was used first within it: what lies on the card was not measured",)


def three() -> int:
    return 3


SCRIPT = """
import json, sys, torch, memplan
from torch import nn

model = nn.Linear(512, 512, bias=False).cuda()
x = torch.randn(256, 512, device="cuda")

@memplan.profile
def step():
    y = model(x)
    y = torch.relu(y)
    y.sum().backward()
    model.zero_grad()
    del y
    said.append(torch.cuda.memory_allocated())

said = []
torch.cuda.reset_peak_memory_stats()
step()
rows = [(row.held, row.added, row.freed, row.peak) for row in step.lines.rows if row.hits]
print(json.dumps({"rows": rows, "end": said[0], "peak": torch.cuda.max_memory_allocated()}))
"""


@needs_cuda_torch
def test_torchs_own_counters_of_an_emulated_card_say_the_same(tmp_path: Path) -> None:
    assert ENVIRONMENT is not None
    cuda_torch = find_torch(ENVIRONMENT)
    variables = process_variables(os.environ, find("h100"), library_for(cuda_torch), tmp_path / "log")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [str(cuda_torch.python), str(tmp_path / "script.py")]
    variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (ROOT / "src", os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[0])
    assert max(peak for *_, peak in said["rows"]) == said["peak"]
    assert said["rows"][-2][0] == said["end"]
    assert said["rows"][3][2] == 512 * 512 * 4  # zero_grad frees the gradient
