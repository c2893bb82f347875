"""What all tests of integrations share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _older_objects_frozen() -> Iterator[None]:
    """Exclude what was there before a file's tests from Python's collections.

    In a worker that has imported all tests a collection takes a second, and line profiles and watches begin with one.
    In other tests nothing is frozen: to count frozen objects, as each recording does, takes as long as to search them.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
