"""Landlock and seccomp for this process, where no namespaces can be had: files are refused, and so are connections."""

from __future__ import annotations

import os

from memplan.integrations.scripts.sandbox import call_filter, kernel
from memplan.integrations.scripts.sandbox.devices import device_names

# bits of LANDLOCK_ACCESS_FS, with the version of the interface that has them: landlock(7)
_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_SCOPE_SIGNALS, _SCOPE_ABSTRACT_SOCKETS = 2, 1
_MOVES, _TRUNCATES, _SCOPES = 2, 3, 6


def refuse_effects(folder: str) -> None:
    """Restrict writes of this thread and its children, for good, to a folder, devices and its own ``/proc``. Raises
    OSError if the kernel refuses."""
    version = kernel.landlock_version()
    whole_files = _WRITE_FILE | (_TRUNCATE if version >= _TRUNCATES else 0)
    rights = whole_files | _REMOVE_AND_MAKE | (_MOVE if version >= _MOVES else 0)
    devices = [f"/dev/{name}" for name in device_names()]
    allowed = [(path, rights if os.path.isdir(path) else whole_files) for path in (folder, *devices)]
    scopes = _SCOPE_SIGNALS | _SCOPE_ABSTRACT_SOCKETS if version >= _SCOPES else 0
    kernel.drop_capabilities()
    kernel.landlock(rights, scopes, [*allowed, (f"/proc/{os.getpid()}", rights)])
    # seccomp refuses what this version of Landlock cannot
    rules = call_filter.no_effects(signals=version < _SCOPES, truncates=version < _TRUNCATES)
    kernel.filter_calls(call_filter.program_of(rules))
