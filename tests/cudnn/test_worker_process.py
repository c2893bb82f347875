"""A worker that answers, crashes, hangs, talks nonsense or does not start: always an answer or a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cudnn.scripted_worker import ANSWERS, CRASHES, FORWARD, NOWHERE, START, needs_compiler, write_script

from memplan.cudnn import worker_process
from memplan.cudnn.questions import ExecutionPlan, Plans, Question
from memplan.cudnn.worker_process import WorkerError, ask_worker
from memplan.dry import progress

pytestmark = needs_compiler
Asked = Callable[..., list[tuple[int, Plans | str]]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Asks a script about batches, and returns each with its answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_process, "ANSWER", 0.5)

    def ask(text: str, *batches: int, start: str = START) -> list[tuple[int, Plans | str]]:
        monkeypatch.setattr(worker_process, "SCRIPT", write_script(tmp_path, text, start))
        questions = [at(batch) for batch in batches]
        return [(question.x[0], answer) for question, answer in ask_worker(NOWHERE, {}, questions)]

    return ask


def at(batch: int) -> Question:
    return replace(FORWARD, x=(batch, *FORWARD.x[1:]))


def plans(batch: int) -> Plans:
    return ExecutionPlan("eng1", 1000 * batch), ExecutionPlan("eng2", 0)


def test_answers_come_in_order(asked: Asked) -> None:
    assert asked(ANSWERS, 4, 2, 9) == [(4, plans(4)), (2, plans(2)), (9, plans(9))]


def test_after_a_crash_another_process_goes_on(asked: Asked) -> None:
    found = asked(CRASHES + ANSWERS, 2, 3, 4)
    assert found == [(2, plans(2)), (3, "its process ended by SIGSEGV"), (4, plans(4))]


def test_a_process_that_always_crashes_is_given_up(asked: Asked) -> None:
    found = asked(CRASHES, 3, 3, 3, 3, 3)
    assert [answer for _, answer in found] == ["its process ended by SIGSEGV"] * 3 + [
        "the process had ended too often"
    ] * 2


def test_a_hang_is_given_up_after_some_time(asked: Asked) -> None:
    found = asked("    if question['x'][0] == 3: time.sleep(60)\n" + ANSWERS, 2, 3, 4)
    assert found == [(2, plans(2)), (3, "no answer within 0 s"), (4, plans(4))]


def test_one_that_hangs_while_it_loads_is_an_error(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STALLED", 0.6)
    with pytest.raises(WorkerError, match="its process hangs"):
        asked("", 2, start="import time\ntime.sleep(60)\n")


@pytest.mark.parametrize("text", ["    print('hello', flush=True)\n", "    print('[1]', flush=True)\n"])
def test_what_is_no_json_is_no_answer(asked: Asked, text: str) -> None:
    assert asked(text, 2) == [(2, "it answered with something else than JSON")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("{'plans': [['eng1']]}", "its answer is not what was asked for"),
        ("{'other': 1}", "its answer is not what was asked for"),
        ("{'plans': []}", "cuDNN has no engine for it"),
        ("{'error': 'cuDNN status 3000: no'}", "cuDNN status 3000: no"),
    ],
)
def test_an_answer_without_plans_is_a_reason(asked: Asked, answer: str, reason: str) -> None:
    text = f"    if question['x'][0] == 2: say({answer}); continue\n" + ANSWERS
    assert asked(text, 2, 4) == [(2, reason), (4, plans(4))]


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("raise SystemExit(3)\n", "its process ended with exit code 3"),
        ("import json; print(json.dumps({'error': 'libnvrtc.so: not found'}))\n", "libnvrtc.so: not found"),
    ],
)
def test_one_that_does_not_start_is_an_error(asked: Asked, start: str, reason: str) -> None:
    with pytest.raises(WorkerError, match=reason):
        asked("", 2, start=start)
