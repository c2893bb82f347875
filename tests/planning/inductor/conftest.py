"""What all tests of Inductor's kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _older_objects_frozen(older_objects_frozen: None) -> None: ...
