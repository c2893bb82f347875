"""What is done around a step: Python's garbage collector is as it was before, and takes only what was made inside."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from memplan.trace.recording.session import collector_held


class _Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def _left() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """On, with nothing frozen, as in a process that does not touch it."""
    gc.enable()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_on_again_with_nothing_frozen_whatever_is_raised() -> None:
    with suppress(ValueError), collector_held():
        assert not gc.isenabled()
        assert gc.get_freeze_count()
        raise ValueError
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_off_stays_off() -> None:
    gc.disable()
    with collector_held():
        pass
    assert not gc.isenabled()


def test_garbage_of_before_is_collected_after_and_not_inside() -> None:
    left = _left()
    with collector_held():
        gc.collect()
        assert left() is not None  # what a step frees is its own
    gc.collect()
    assert left() is None


def test_garbage_made_inside_is_collected_when_asked_for() -> None:
    with collector_held():
        left = _left()
        gc.collect()
        assert left() is None


def test_inside_another_the_garbage_between_them_goes_first() -> None:
    with collector_held():
        left = _left()
        with collector_held():
            assert left() is None  # else it would stay to the end of the outer one
        assert gc.get_freeze_count()
        assert not gc.isenabled()
    assert not gc.get_freeze_count()
    assert gc.isenabled()


def test_what_the_user_froze_stays_frozen_and_nothing_joins_it() -> None:
    kept = [_Cycle()]
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_held(), collector_held():
        left = _left()
        assert gc.get_freeze_count() <= frozen  # frozen objects may go by their counts
        gc.collect()
        assert left() is None
    assert gc.get_freeze_count()
    del kept
