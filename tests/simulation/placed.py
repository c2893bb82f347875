"""Allocators whose segments begin where a test can say so, and what they did in short."""

from __future__ import annotations

from collections.abc import Callable

from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.settings import parse_settings

FIRST, SECOND, THIRD = 1 << 36, 2 << 36, 3 << 36


def allocator(text: str = "", **options: int | None) -> CachingAllocator:
    """One whose n-th segment begins n * 64 GiB from zero."""
    return CachingAllocator(parse_settings(text), place=places(), **options)


def places() -> Callable[[int], int]:
    """Where each next segment begins."""
    made = 0

    def place(size: int) -> int:
        nonlocal made
        made += 1
        return made << 36

    return place


def done(used: CachingAllocator) -> list[tuple[str, int, int]]:
    """What it did: action, address, bytes."""
    return [(event.action, event.address, event.size) for event in used.log]
