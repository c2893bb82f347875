"""What of a class counts as read."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable, Sequence

from memplan.planning.capture.reads.kinds import virtual_subclasses


def test_extension_types_registered_with_standard_classes_do_not_count() -> None:
    """Modules that Cython wrote register theirs when they are imported, which a call may do for the first time."""
    before = virtual_subclasses(Iterable)
    ABCMeta.register(Sequence, type(iter(b"")))
    assert virtual_subclasses(Iterable) == before

    class Own:
        """A class that Python code defines."""

    ABCMeta.register(Sequence, Own)
    assert virtual_subclasses(Iterable) != before
