"""The clock by which kernels are timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_FINEST = 1e-6
"""Resolution in seconds that a thread's clock needs: Windows advances it every 16 ms."""


def clock_of(place: str) -> Callable[[], float]:
    """Return the clock for measurements on a device, in seconds. ``place``: torch's name of the device.

    On the CPU it is the processor time of the calling thread, which computes its share of each kernel and spins until
    the other threads have theirs: on a machine without other load as much as has passed, and no more under load. On a
    card, where the thread waits for kernels, it is the time that has passed.
    """
    if torch.device(place).type == "cpu" and time.get_clock_info("thread_time").resolution <= _FINEST:
        return time.thread_time
    return time.perf_counter
