"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

ABSENT = object()
"""In the place of an attribute that is not there."""
Patch = tuple[Any, dict[str, Any], dict[str, Any]]
"""Owner, its attributes before, its attributes meanwhile."""

_originals: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What each function or class replaces, or replaced."""
_tracked: list[list[Patch]] = []
"""Patches at work of each `tracked` context, the innermost last."""


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class, module or object for a while, or take them away (`ABSENT`)."""
    patch = owner, {name: owner.__dict__.get(name, ABSENT) for name in attributes}, attributes
    with patched_throughout(owner, **attributes):
        if not _tracked:  # a patch that lasts as long as an object must not keep it alive
            yield
            return
        patches = _tracked[-1]
        patches.append(patch)
        try:
            yield
        finally:
            patches[:] = [active for active in patches if active is not patch]  # the last, or of another thread


@contextlib.contextmanager
def patched_throughout(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes as `patched` does, also within `unpatched`."""
    before = {name: owner.__dict__.get(name, ABSENT) for name in attributes}
    for name, value in attributes.items():
        if callable(value) and before[name] is not ABSENT:
            with contextlib.suppress(TypeError):  # nothing can refer to it weakly
                _originals[value] = before[name]
    try:
        _put(owner, attributes)
        yield
    finally:
        _put(owner, before)


def original_of(value: Any) -> Any:
    """Return what a function or class replaces, the original of several replacements; any other ``value`` itself."""
    with contextlib.suppress(TypeError):  # nothing can refer to it weakly
        while value in _originals:
            value = _originals[value]
    return value


def _put(owner: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


@contextlib.contextmanager
def tracked() -> Iterator[list[Patch]]:
    """Note what `patched` replaces within this context, for `unpatched`."""
    patches: list[Patch] = []
    _tracked.append(patches)
    try:
        yield patches
    finally:
        _tracked[:] = [others for others in _tracked if others is not patches]


@contextlib.contextmanager
def unpatched(patches: list[Patch]) -> Iterator[list[Patch]]:
    """Put back for a while what was replaced since `tracked`, which returned ``patches``. Returns what was put back."""
    undone, patches[:] = patches[:], []
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
    """Within `unpatched`, which returned ``undone``, replace for a while what it put back."""
    try:
        for owner, _, attributes in undone:
            _put(owner, attributes)
        patches[:0] = undone
        yield
    finally:
        patches[:] = [patch for patch in patches if not any(patch is other for other in undone)]
        for owner, before, _ in reversed(undone):
            _put(owner, before)
