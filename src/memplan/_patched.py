"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

ABSENT = object()
"""Value of an attribute that does not exist."""
Patch = tuple[Any, dict[str, Any], dict[str, Any]]
"""The owner, its original attributes by name, and their replacements."""

_originals: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Replacement (function or class) -> what it replaces; it stays when the replacement ends."""
_tracked: list[list[Patch]] = []
"""Active patches of each `tracked` context, the innermost context last."""


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context, replace attributes of a class, module or object; the value `ABSENT` deletes an attribute."""
    patch = owner, {name: owner.__dict__.get(name, ABSENT) for name in attributes}, attributes
    with patched_throughout(owner, **attributes):
        if not _tracked:  # do not keep ``patch``, which refers to the owner
            yield
            return
        patches = _tracked[-1]
        patches.append(patch)
        try:
            yield
        finally:
            # by identity: another thread may have added a patch after it
            patches[:] = [active for active in patches if active is not patch]


@contextlib.contextmanager
def patched_throughout(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes as `patched` does; `unpatched` does not restore these."""
    before = {name: owner.__dict__.get(name, ABSENT) for name in attributes}
    for name, value in attributes.items():
        if callable(value) and before[name] is not ABSENT:
            with contextlib.suppress(TypeError):  # of a value without weak references
                _originals[value] = before[name]
    try:
        _put(owner, attributes)
        yield
    finally:
        _put(owner, before)


def original_of(value: Any) -> Any:
    """Return the function or class that ``value`` replaces, through all replacements; ``value`` if it replaces none."""
    with contextlib.suppress(TypeError):  # of a value without weak references
        while value in _originals:
            value = _originals[value]
    return value


def _put(owner: Any, attributes: dict[str, Any]) -> None:
    """Set attributes of ``owner`` by name; delete those whose value is `ABSENT`."""
    for name, value in attributes.items():
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


@contextlib.contextmanager
def tracked() -> Iterator[list[Patch]]:
    """Collect the patches that `patched` makes within this context; returns the list of the active ones."""
    patches: list[Patch] = []
    _tracked.append(patches)
    try:
        yield patches
    finally:
        _tracked[:] = [others for others in _tracked if others is not patches]


@contextlib.contextmanager
def unpatched(patches: list[Patch]) -> Iterator[list[Patch]]:
    """Within this context, undo the active patches of a `tracked` context, ``patches``. Returns the undone ones."""
    undone, patches[:] = patches[:], []  # emptied in place: `patched` goes on to append to this list
    try:
        for owner, before, _ in reversed(undone):
            _put(owner, before)
        yield undone
    finally:
        for owner, _, attributes in undone:
            _put(owner, attributes)
        patches[:0] = undone


@contextlib.contextmanager
def repatched(patches: list[Patch], undone: list[Patch]) -> Iterator[None]:
    """Within this context inside `unpatched`, which returned ``undone``, apply those patches again."""
    try:
        for owner, _, attributes in undone:
            _put(owner, attributes)
        patches[:0] = undone
        yield
    finally:
        patches[:] = [patch for patch in patches if not any(patch is other for other in undone)]
        for owner, before, _ in reversed(undone):
            _put(owner, before)
