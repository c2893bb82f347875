"""Questions for a card: from the cache, else from cuDNN, else by the model, and what is said of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cudnn.scripted_worker import ANSWERS, CRASHES, FORWARD, NOWHERE, needs_compiler, write_script
from environment import ENVIRONMENT, needs_cuda_torch

from memplan.cudnn import ask as asking
from memplan.cudnn import worker_process
from memplan.cudnn.ask import ask
from memplan.cudnn.cudnn_library import Cudnn, find_cudnn
from memplan.cudnn.questions import ExecutionPlan, Question
from memplan.devices import find

CARD, REAL = find("a100-80gb"), worker_process.SCRIPT
THIRD = replace(FORWARD, x=(3, 63, 56, 56), y=(3, 128, 56, 56))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_process, "SCRIPT", write_script(tmp_path, CRASHES + ANSWERS))
    return tmp_path


@needs_compiler
def test_what_was_answered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(NOWHERE, CARD, [FORWARD, FORWARD, THIRD])
    assert first.plans == {FORWARD: (ExecutionPlan("eng1", 16000), ExecutionPlan("eng2", 0))}
    assert first.notes == (
        "cuDNN 9.19.0 did not answer for 1 of 2 convolutions, whose workspaces are expected by a model of its choice: "
        "its process ended by SIGSEGV",
    )
    assert list(first.expected) == [THIRD]
    asked: list[Sequence[Question]] = []

    def noted(library: Cudnn, card: dict[str, Any], questions: Sequence[Question]) -> Iterator[Any]:
        asked.append(questions)
        yield from ()

    monkeypatch.setattr(asking, "ask_worker", noted)
    assert ask(NOWHERE, CARD, [FORWARD, THIRD]).plans == first.plans
    assert asked == [[THIRD]]
    assert ask(NOWHERE, CARD, [FORWARD]).notes == ()
    assert len(asked) == 1


@needs_compiler
def test_a_library_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "SCRIPT", worker_process.SCRIPT.parent / "absent.py")
    found = ask(NOWHERE, CARD, [FORWARD, THIRD])
    assert found.plans == {}
    assert len(found.notes) == 1
    assert "did not answer for 2 of 2" in found.notes[0]
    assert "its process ended with exit code" in found.notes[0]


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    found = ask(NOWHERE, CARD, [FORWARD])
    assert found.plans == {}
    assert len(found.notes) == 1
    assert "there is no C compiler here" in found.notes[0]


def test_a_card_that_cannot_be_described_is_said() -> None:
    found = ask(NOWHERE, replace(CARD, name="unheard", bandwidth=None), [FORWARD])
    assert found.plans == {}
    assert found.notes[0].startswith(
        "cuDNN 9.19.0 did not answer for 1 of 1 convolutions, whose workspaces are expected by a model of its choice: "
        "it was not queried: the clocks of unheard"
    )
    assert list(found.expected) == [FORWARD]


@needs_cuda_torch
@needs_compiler
def test_a_published_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#95024, an A100 of 80 GB: a peak of 12,874,233,344 bytes, of which input, result, weight and bias take
    6,437,117,296 in blocks of 512."""
    monkeypatch.setattr(worker_process, "SCRIPT", REAL)
    library = find_cudnn(ENVIRONMENT)
    assert library is not None
    question = Question(
        "forward", (1, 64, 361, 370, 251), (32, 64, 3, 3, 3), (1, 32, 361, 370, 251), False, "float16", (1, 1, 1),
        (1, 1, 1), (1, 1, 1), (32, 32, 32), True, False,
    )  # fmt: skip
    blocks = [
        -(-size // 512) * 512 for size in (64 * 361 * 370 * 251 * 2, 32 * 361 * 370 * 251 * 2, 32 * 64 * 27 * 2, 64)
    ]
    plan = ask(library, find("a100-80gb"), [question]).plans[question][0]
    assert sum(blocks) + -(-plan.workspace // 512) * 512 == 12_874_233_344


# What is stored


def test_the_version_alone_gives_what_is_stored_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ask_worker", None)
    library = find_cudnn("9.19")
    assert library == Cudnn(None, 91900)
    assert library is not None
    known = Question(
        "forward", (32, 3, 224, 224), (64, 3, 7, 7), (32, 64, 112, 112), False, "float32", (3, 3), (2, 2), (1, 1),
        (32, 32, 32), True, False,
    )  # fmt: skip
    found = ask(library, CARD, [known, FORWARD])
    assert list(found.plans) == [known]
    assert list(found.expected) == [FORWARD]
    assert found.measured == {}
    assert found.notes == ()
    near = ask(Cudnn(None, 92000), CARD, [known])
    assert near.plans == {known: found.plans[known]}, "9.20 chooses as 9.19 does"


def test_a_version_that_nothing_is_stored_of_has_expected_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ask_worker", None)
    library = find_cudnn("9.25.1")
    assert library is not None
    found = ask(library, replace(CARD, name="another"), [FORWARD])
    assert found.plans == found.measured == {}
    assert list(found.expected) == [FORWARD]


def test_versions_before_those_that_were_learned_from_keep_the_interval() -> None:
    library = find_cudnn("9.10.2")
    assert library is not None
    found = ask(library, CARD, [FORWARD])
    assert found.plans == found.expected == {}
    assert found.notes[0].endswith("whose workspaces stay intervals: there is no model of its choice before 9.19")


@pytest.mark.parametrize(
    ("card", "library", "title"),
    [("gtx1080ti", Cudnn(None, 92000, is_default=True), "9.10.2"), ("gtx1080ti", Cudnn(None, 91900), "9.19.0")],
)
def test_cards_older_than_those_with_a_model_keep_the_interval(card: str, library: Cudnn, title: str) -> None:
    """The oldest that has one is 7.0; cards of the Pascal series are 6.0 and 6.1."""
    found = ask(library, find(card), [FORWARD, THIRD])
    assert found.plans == found.measured == found.expected == {}
    assert found.notes == (
        f"cuDNN {title} did not answer for 2 of 2 convolutions, whose workspaces stay intervals: there is no model of "
        "its choice for compute capability 6.1, for which the last cuDNN is 9.10 and the last builds of torch are "
        "those with CUDA 12.6",
    )


def test_a_newer_compute_capability_without_a_model_is_said() -> None:
    found = ask(Cudnn(None, 92600), replace(CARD, architecture=(13, 0)), [FORWARD])
    assert found.notes[0].endswith("stay intervals: there is no model of its choice for compute capability 13.0")


def test_what_a_real_card_took_is_of_that_card_and_version_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(card: str, version: int, *, exactly: bool) -> dict[str, int]:
        return {FORWARD.key: 77} if version == 91900 or (version == 92000 and not exactly) else {}

    monkeypatch.setattr(asking, "measured", took)
    monkeypatch.setattr(asking, "ask_worker", lambda *_: iter(()))
    assert ask(NOWHERE, CARD, [FORWARD, THIRD]).measured == {FORWARD: 77}
    assert ask(replace(NOWHERE, version=92000), CARD, [FORWARD, THIRD]).measured == {}
    assert ask(Cudnn(None, 92000), CARD, [FORWARD, THIRD]).measured == {FORWARD: 77}, "what is not installed"
