"""Processes that a script would start."""

from __future__ import annotations

import os

import pytest

from memplan.integrations.scripts.one_process import in_one_process


def test_where_there_is_no_fork_none_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: libraries look whether there is one."""
    monkeypatch.delattr(os, "fork", raising=False)
    with in_one_process("folder", values=True):
        assert not hasattr(os, "fork")
    assert not hasattr(os, "fork")
