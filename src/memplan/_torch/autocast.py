"""Control autocast's cache of casts while a step is traced, and leave a caller's own autocast for a while.

Seen in torch 2.11, 2.13 and 2.15: ``torch.clear_autocast_cache`` is looked up each time that an outermost autocast
ends, which ``torch.autocast_decrement_nesting`` tells by 0, and ``torch.set_autocast_cache_enabled`` is what tracing
turns the cache off with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from memplan._torch.patches import patched

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def casts_kept(enabled: bool) -> Iterator[Callable[[], int | None]]:
    """Switch autocast's cache of casts on or off for a trace, and tell where eager mode would keep casts.

    In eager mode the cast of a parameter is cached until the outermost autocast ends; a trace caches none, as its
    parameters are no leaves. Yields a function that returns the number of the current such region; None where eager
    mode would cache nothing.
    """
    thread, before, clear = threading.get_ident(), torch.is_autocast_cache_enabled(), torch.clear_autocast_cache
    regions_ended = 0

    def count_and_clear() -> None:
        nonlocal regions_ended
        regions_ended += threading.get_ident() == thread
        clear()

    def region() -> int | None:
        """Return the number of outermost autocasts that have ended, if a cast would be cached now."""
        return (
            regions_ended
            if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _DEVICES))
            else None
        )

    torch.set_autocast_cache_enabled(enabled)
    try:
        with patched(torch, clear_autocast_cache=count_and_clear):
            yield region
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def around_cache_clearing(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` around each clearing of autocast's cache. It frees the casts in the order of a hash table of
    addresses, which a recording cannot predict."""
    clear = torch.clear_autocast_cache

    def clear_in_context() -> None:
        with context():
            clear()

    with patched(torch, clear_autocast_cache=clear_in_context):
        yield


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Run as if the caller had entered no autocast, so that an autocast in here is an outermost one: its cached casts
    of parameters are freed when it ends. Else they would stay when the parameters are updated."""
    on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    torch.autocast_increment_nesting()
    depth = 0
    while torch.autocast_decrement_nesting():
        depth += 1
    for device in on:
        torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()
