"""Device files that a script may use."""

from __future__ import annotations

import os

_PLAIN = ("null", "zero", "full", "random", "urandom", "tty")
_CARDS = ("nvidia", "kfd", "dri", "dxg", "accel")
"""Beginnings of the names of GPUs' device files."""


def device_names() -> list[str]:
    """Return the names below ``/dev``."""
    return [name for name in os.listdir("/dev") if name in _PLAIN or name.startswith(_CARDS)]
