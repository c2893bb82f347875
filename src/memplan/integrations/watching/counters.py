"""Cheap counters read at the end of every step: of the CUDA caching allocator, or the process's resident set."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

_PAGES = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at the end of a step, in bytes; None: not known."""

    peak: int | None
    allocated: int | None
    blocks: int | None
    """Number of live allocations."""
    resident: int | None
    """Resident set of the process."""


class CardCounters:
    """Reads the counters of a card's caching allocator. This resets the device's peak of `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        """Return the counters and reset the peak for the next step."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        level = stats["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return Reading(level["peak"], level["current"], stats["allocation"]["all"]["current"], _resident())


NO_READING = Reading(peak=None, allocated=None, blocks=None, resident=None)
_INTERVAL = 0.05
"""Seconds between two readings of the resident set, so that millisecond steps do not wait for the file system."""


class HostCounters:
    """Reads the resident set of the process, as the CPU's allocator has no counters."""

    def __init__(self) -> None:
        self._next = 0.0
        """Monotonic time before which the counter is not read again."""

    def read(self) -> Reading:
        """Return the resident set, or NO_READING within 0.05 s of the last reading."""
        now = time.monotonic()
        if now < self._next:
            return NO_READING
        self._next = now + _INTERVAL
        return Reading(peak=None, allocated=None, blocks=None, resident=_resident())


def _resident() -> int | None:
    """Return the resident set of the process in bytes; None on systems without ``/proc/self/statm``."""
    try:
        with open(_PAGES, "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None
