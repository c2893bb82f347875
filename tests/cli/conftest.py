"""What several tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the test file's ``MODELS`` as models.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(request.module.MODELS, encoding="utf-8")
    return tmp_path
