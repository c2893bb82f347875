"""Tests are skipped without the toolchain for boards, but not where it is required."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from environment import skip_without

ROOT = Path(__file__).parents[1]


def test_missing_tools_fail_where_they_are_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skip_without("python3", str(tmp_path))
    monkeypatch.delenv("MEMPLAN_REQUIRE_TOOLCHAIN", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-gcc not found"):
        skip_without("python3", "no-such-gcc")
    monkeypatch.setenv("MEMPLAN_REQUIRE_TOOLCHAIN", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-gcc not found"):
        skip_without("no-such-gcc")


def test_ci_installs_the_toolchain_before_tests() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert 'MEMPLAN_REQUIRE_TOOLCHAIN: "1"' in workflow
    jobs = [job for job in re.split(r"\n  (?=\w+:\n    )", workflow) if "run: make test" in job]
    assert len(jobs) == 2
    assert all(job.index("run: sudo make toolchain") < job.index("run: make test") for job in jobs)
