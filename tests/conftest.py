"""What is common to all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = tuple(
    line
    for line in (Path(__file__).parent / "long.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


@pytest.hookimpl(tryfirst=True)  # before those of a mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is listed in long.txt."""
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.slow)
