"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_replaced: list[tuple[Any, Any]] = []
"""Each value that replaces another one now, with that one."""


def original_of(value: Any) -> Any:
    """Return what ``value`` replaces, the original of several replacements; ``value`` itself if it replaces nothing."""
    for replacement, before in reversed(_replaced.copy()):
        if value is replacement:
            value = before
    return value


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class, module or object for a while."""
    absent = object()
    before = {name: owner.__dict__.get(name, absent) for name in attributes}
    pairs = [(value, before[name]) for name, value in attributes.items() if before[name] is not absent]
    _replaced.extend(pairs)
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        # by identity, since values may compare in any way
        _replaced[:] = [pair for pair in _replaced if not any(pair is own for own in pairs)]
        for name, value in before.items():
            if value is absent:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
