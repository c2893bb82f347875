"""What all tests of scripts share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _earlier_tests_frozen(_older_objects_frozen: None) -> None:  # pyright: ignore[reportUnusedFunction]
    """Exclude what earlier tests of the file left from Python's collections, too: modules that they were the first to
    import are hundreds of thousands of objects, and a plan of a script collects fifty times."""
    gc.freeze()
