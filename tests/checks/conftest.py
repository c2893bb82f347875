"""What several tests of checks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memplan.checks.registry import CHECKS


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one, torch convolves 1x1 by a kernel of its own, whose copies hang on what else is mended."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def this_check_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `memplan.check` run the check that the test's file is about: others record a sharded step again and again."""
    alone = [one for one in CHECKS if one.id == request.module.ID]
    assert alone
    monkeypatch.setattr("memplan.checks.check.CHECKS", alone)
