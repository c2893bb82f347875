"""`memplan cache` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from cudnn.scripted_worker import FORWARD

from memplan.cli import main
from memplan.cudnn.answer_cache import AnswerCache
from memplan.cudnn.questions import ExecutionPlan


def test_it_lists_and_removes_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    empty = CliRunner().invoke(main, ["cache"])
    assert (empty.exit_code, empty.stdout, empty.stderr) == (0, "nothing is kept\n", "")
    cache = AnswerCache("h100", 91900, {})
    cache.add({FORWARD: (ExecutionPlan("eng38", 13139984),)})
    told = CliRunner().invoke(main, ["cache", "--json", "-"])
    (row,) = json.loads(told.stdout)["kept"]
    size = cache.file.stat().st_size
    assert row == {"what": "answers of cuDNN", "number": 1, "bytes": size, "path": str(cache.file)}
    table = CliRunner().invoke(main, ["cache"]).stdout.splitlines()
    assert table[0].split() == ["what", "number", "bytes", "where"]
    assert table[-1].split()[:5] == ["answers", "of", "cuDNN", "1", f"{size}"]
    assert max(map(len, table)) <= 80
    assert CliRunner().invoke(main, ["cache", "--clear"]).stdout == "nothing is kept\n"
    assert not cache.file.exists()
