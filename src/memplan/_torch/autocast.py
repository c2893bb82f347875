"""Control autocast's cache of casts while a step is traced, and leave the caller's autocast within a context.

Seen in torch 2.11, 2.13 and 2.15: ``torch.clear_autocast_cache`` is looked up each time that an outermost autocast ends
(``torch.autocast_decrement_nesting`` returns 0), and tracing disables the cache by
``torch.set_autocast_cache_enabled``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from memplan._torch.patches import patched

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def autocast_cache(enabled: bool) -> Iterator[Callable[[], int | None]]:
    """Enable or disable autocast's cache of casts for a trace, and number the regions in which eager mode caches casts.

    In eager mode the cast of a parameter is cached until the outermost autocast ends; a trace caches none, as its
    parameters are no leaves. Yields a function that returns the number of the current outermost autocast; None where
    eager mode would cache nothing.
    """
    thread, before, clear = threading.get_ident(), torch.is_autocast_cache_enabled(), torch.clear_autocast_cache
    regions_ended = 0

    def count_and_clear() -> None:
        """Replace `torch.clear_autocast_cache`, which torch calls at the end of an outermost autocast."""
        nonlocal regions_ended
        if threading.get_ident() == thread:
            regions_ended += 1
        clear()

    def region() -> int | None:
        """Return the number of outermost autocasts that have ended, if a cast would be cached now."""
        caches = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _DEVICES))
        return regions_ended if caches else None

    torch.set_autocast_cache_enabled(enabled)
    try:
        with patched(torch, clear_autocast_cache=count_and_clear):
            yield region
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def around_cache_clearing(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` around each clearing of autocast's cache, which frees the casts in the order of a hash table
    of addresses, so that a recording cannot predict their order."""
    clear = torch.clear_autocast_cache

    def clear_in_context() -> None:
        with context():
            clear()

    with patched(torch, clear_autocast_cache=clear_in_context):
        yield


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Run as if the caller had entered no autocast. An autocast entered within this context is an outermost autocast,
    which frees its cached casts of parameters when it ends; else they would outlive the update of the parameters."""
    enabled = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    torch.autocast_increment_nesting()  # torch only tells the depth when it decrements
    depth = 0
    while torch.autocast_decrement_nesting():
        depth += 1
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()
