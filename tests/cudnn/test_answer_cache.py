"""Answers that are kept: a file for each card and version, whole or moved aside."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cudnn.scripted_worker import FORWARD

from memplan.cudnn.answer_cache import AnswerCache, answers_folder, clear, kept
from memplan.cudnn.questions import ExecutionPlan

PLANS = (ExecutionPlan("eng38", 13139984), ExecutionPlan("eng28", 0))
OTHER = replace(FORWARD, kind="input gradient")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "memplan" / "cudnn"


def test_answers_are_read_back_and_added_to(folder: Path) -> None:
    assert AnswerCache("h100", 91900, {"a": 1}).read() == {}
    AnswerCache("h100", 91900, {"a": 1}).add({FORWARD: PLANS})
    AnswerCache("h100", 91900, {"a": 1}).add({OTHER: PLANS[1:]})
    assert AnswerCache("h100", 91900, {"a": 1}).read() == {FORWARD.key: PLANS, OTHER.key: PLANS[1:]}
    assert answers_folder() == folder
    assert [(one.path.parent, one.number, one.bytes) for one in kept()] == [
        (folder, 2, next(folder.iterdir()).stat().st_size)
    ]


def test_another_card_version_or_description_has_a_file_of_its_own() -> None:
    AnswerCache("h100", 91900, {"a": 1}).add({FORWARD: PLANS})
    for other in (("a100", 91900, {"a": 1}), ("h100", 92600, {"a": 1}), ("h100", 91900, {"a": 2})):
        assert AnswerCache(*other).read() == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '["memplan.cudnn 0", {}]',
        '["memplan.cudnn 1", {"a": [["eng1", -1]]}]',
        '["memplan.cudnn 1", {"a": []}]',
        '["memplan.cudnn 1", 3]',
    ],
)
def test_a_damaged_file_is_moved_aside_and_said(text: str) -> None:
    cache = AnswerCache("h100", 91900, {})
    cache.add({FORWARD: PLANS})
    cache.file.write_text(text)
    assert [one.number for one in kept()] == [0]
    assert cache.read() == {}
    assert len(cache.notes) == 1
    assert "was damaged" in cache.notes[0]
    assert cache.file.with_suffix(".damaged").read_text() == text
    again = AnswerCache("h100", 91900, {})
    assert again.read() == {}
    assert again.notes == ()


def test_bytes_that_are_no_text_are_damage() -> None:
    cache = AnswerCache("h100", 91900, {})
    cache.add({FORWARD: PLANS})
    cache.file.write_bytes(b"\xff\xfe")
    assert cache.read() == {}
    assert "was damaged" in cache.notes[0]


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    cache = AnswerCache("h100", 91900, {})
    cache.add({FORWARD: PLANS})
    assert any("cannot be kept" in line for line in cache.notes)


def test_what_is_kept_is_removed(folder: Path) -> None:
    other = folder.parent / "of another program"
    AnswerCache("h100", 91900, {}).add({FORWARD: PLANS})
    library = folder.parent / "dry" / "somewhere" / "libdry.so"
    for path in (library, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    assert [(one.what, one.number) for one in kept()] == [("answers of cuDNN", 1), ("libraries of emulated cards", 1)]
    assert kept()[1].bytes == 5
    clear()
    assert kept() == []
    assert list(folder.parent.iterdir()) == [other]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes by name")
def test_a_pipe_in_the_folder_is_no_file(folder: Path) -> None:
    cache = AnswerCache("h100", 91900, {})
    folder.mkdir(parents=True)
    os.mkfifo(cache.file)
    assert [(one.path, one.number) for one in kept()] == [(cache.file, 0)]
    assert cache.read() == {}
    assert "no file" in cache.notes[0]
