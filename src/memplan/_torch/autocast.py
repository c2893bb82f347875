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
    """Hold the cache on or off, as the traced code is to find it; tracing itself finds no leaf to keep the casts of.

    Yields what says in which region of autocast a cast of a parameter would be kept now in eager mode: it would until
    the outermost autocast ends. None where it would not be.
    """
    thread, before, clear = threading.get_ident(), torch.is_autocast_cache_enabled(), torch.clear_autocast_cache
    ended = 0

    def cleared() -> None:
        nonlocal ended
        ended += threading.get_ident() == thread
        clear()

    def region() -> int | None:
        return ended if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _DEVICES)) else None

    torch.set_autocast_cache_enabled(enabled)
    try:
        with patched(torch, clear_autocast_cache=cleared):
            yield region
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def around_cache_clearing(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``context()`` whenever autocast drops its casts. Their order there is that of a hash table of addresses."""
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        with context():
            clear()

    with patched(torch, clear_autocast_cache=cleared):
        yield


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Run as if the caller had entered no autocast: an autocast in here is an outermost one, whose casts of parameters
    go when it ends. Else they would outlive an update of what was cast."""
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
