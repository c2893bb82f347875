"""What a peak on a card costs beside the step."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from memplan.verification.measurement.cuda_peak import older_objects_frozen


class Cycle:
    """Refers to itself, so that only Python's collector frees it."""

    freed = 0

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        Cycle.freed += 1


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    Cycle.freed = 0
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def test_older_objects_are_not_scanned_and_newer_ones_are_freed() -> None:
    Cycle()
    with older_objects_frozen():
        gc.collect()
        assert Cycle.freed == 0
        Cycle()
        gc.collect()
        assert Cycle.freed == 1
    gc.collect()
    assert Cycle.freed == 2


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    with older_objects_frozen():
        pass
    assert gc.get_freeze_count() > 0
