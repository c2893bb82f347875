"""What of a class counts as read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memplan.planning.capture.reads.kinds import virtual_subclasses


def test_extension_types_registered_with_standard_classes_do_not_count() -> None:
    """Modules that Cython wrote register theirs when they are imported, which a call may do for the first time."""
    standard: Any = Sequence  # type checkers know no `register` of it
    before = virtual_subclasses(Iterable)
    standard.register(type(iter(b"")))
    assert virtual_subclasses(Iterable) == before

    class Own:
        """A class that Python code defines."""

    standard.register(Own)
    assert virtual_subclasses(Iterable) != before
