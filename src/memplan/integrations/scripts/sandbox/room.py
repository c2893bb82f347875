"""How much a script may write to the disk that its sandbox lies on."""

from __future__ import annotations

import os

_MOST = 20 << 30
"""Bytes."""


class Room:
    """Half of what is free on a folder's file system, and at most 20 GiB.

    Free space is cheap to look at, and others use it up, too: only where it shrinks by that much is it counted what
    lies in the folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before = _free(folder)
        self.most = min(self._before // 2, _MOST)
        """Bytes."""
        self._next_count = self.most

    def is_used_up(self) -> bool:
        """Return whether the folder's files take more than that, or most of it where others write as well."""
        used = self._before - _free(self._folder)
        if used <= self._next_count:
            return False
        self._next_count = used + self.most // 8
        return _size(self._folder) > self.most // 2


def _free(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _size(folder: str) -> int:
    """Return the bytes that the files below a folder take on the disk."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:  # gone since
                continue
    return total
