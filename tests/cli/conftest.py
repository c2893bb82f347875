"""What several tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.scripts.script_runs import run_here

from memplan.integrations.scripts import process


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the test file's ``MODELS`` as models.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(request.module.MODELS, encoding="utf-8")
    return tmp_path


@pytest.fixture
def scripts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run in the test's process: another one takes four seconds to import torch and memplan."""
    monkeypatch.setattr(process, "run_script", run_here)
