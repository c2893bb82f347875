"""What is common to all tests."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

LINES = [
    line
    for line in (Path(__file__).parent / "long.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
LONG = tuple(line for line in LINES if not line.startswith("1/"))
SAMPLED = [(int(share[2:]), start) for share, _, start in (line.partition(" ") for line in LINES if line[:2] == "1/")]


def is_slow(nodeid: str) -> bool:
    """Return whether long.txt leaves a test to `make test-all`; which cases are sampled follows from their ids."""
    if nodeid.startswith(LONG):
        return True
    one_of = next((share for share, start in SAMPLED if nodeid.startswith(start)), 1)
    return "[" in nodeid and zlib.crc32(nodeid.encode()) % one_of > 0


@pytest.hookimpl(tryfirst=True)  # before those of a mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is listed in long.txt."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
