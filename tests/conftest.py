"""What all tests share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _older_objects_frozen() -> None:
    """Exclude what was there before a file's tests from Python's collections.

    In a worker that has imported all tests a collection takes a second, and line profiles, watches and measurements
    begin with one.
    """
    gc.collect()
    gc.freeze()
