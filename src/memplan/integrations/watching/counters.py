"""What is measured at the end of every step, cheaply: a card's allocator, the process; on the CPU one step's events."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

_PAGES = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at the end of a step; bytes, and the number of allocations that are alive."""

    peak: int | None
    held: int | None
    blocks: int | None
    resident: int | None


class CardCounters:
    """Reads the counters of a card's caching allocator. It resets the peak, which `torch.cuda` counts per device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        """Return the counters, and begin the next step's peak."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        level = stats["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return Reading(level["peak"], level["current"], stats["allocation"]["all"]["current"], _resident())


NOTHING = Reading(None, None, None, None)
_EVERY = 0.05
"""Seconds between two looks at the process: steps of a millisecond are not to wait for the system."""


class HostCounters:
    """Reads what the process takes, now and then: the CPU's allocator has no counters."""

    def __init__(self) -> None:
        self._next = 0.0

    def read(self) -> Reading:
        """Return what the process takes; nothing where that was read a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return NOTHING
        self._next = now + _EVERY
        return Reading(None, None, None, _resident())


def _resident() -> int | None:
    """Return the bytes that the process has in memory; None where the system has no file that says it."""
    try:
        with open(_PAGES, "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None
