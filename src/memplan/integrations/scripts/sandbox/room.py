"""How much a script may write to the disk that its sandbox lies on."""

from __future__ import annotations

import os

_LIMIT = 20 << 30
"""Bytes."""


class Room:
    """A limit on the bytes in a folder: half of its file system's free space, at most 20 GiB.

    The free space is cheap to read, but other processes use it too. So the files are counted only after it has shrunk
    by the limit.
    """

    def __init__(self, folder: str) -> None:
        """``folder``: the folder whose files are limited."""
        self._folder = folder
        self._before = _free(folder)
        """Free bytes of the file system at the start."""
        self.most = min(self._before // 2, _LIMIT)
        """The limit in bytes: half of the free space, at most `_LIMIT`."""
        self._next_count = self.most
        """Bytes that the free space must have shrunk by before the files are counted again."""

    def is_used_up(self) -> bool:
        """Return whether the file system has shrunk by the limit, and at least half of that is the folder's files."""
        used = self._before - _free(self._folder)
        if used <= self._next_count:
            return False
        self._next_count = used + self.most // 8
        return _size(self._folder) > self.most // 2


def _free(folder: str) -> int:
    """Return the free bytes of a folder's file system, as far as users may take them."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _size(folder: str) -> int:
    """Return the bytes that the files below a folder take on the disk."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512  # the unit of st_blocks (man 3type stat)
            except OSError:  # gone since
                continue
    return total
