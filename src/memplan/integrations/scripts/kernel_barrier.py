"""Files kept from libraries that write without Python (HDF5, ITK, Arrow): Linux itself refuses them.

What Python writes is sent elsewhere and read back (`HeldFiles`); of a library's own calls only the kernel knows.
Landlock lets a process give up rights for good: Linux 5.13 and newer, where it is switched on.
https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on each architecture
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_WRITE_FILE, _REMOVE_AND_MAKE = 1 << 1, sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
"""Since the versions 2 and 3 of Landlock."""


def refuse_writes(but: Iterable[str]) -> bool:
    """Let this thread, and those that it starts, change no files but those below some folders; never undone.

    Args:
        but: these folders. Those that are not there are left out.

    Returns:
        Whether it is so: not on other systems, and not where Landlock is missing.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    rights = _WRITE_FILE | _REMOVE_AND_MAKE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", rights)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        for folder in filter(os.path.isdir, but):
            held = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, held), 0)
            finally:
                os.close(held)
        nothing_gained = libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        return nothing_gained == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)
