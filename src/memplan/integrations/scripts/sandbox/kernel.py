"""System calls of Linux that Python has no function for, by their documented numbers.

Manual pages: unshare(2), mount(2), pivot_root(2), mount_setattr(2), prctl(2), seccomp(2), landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

NEW_CGROUP, NEW_USER, NEW_PID, NEW_NET, NEW_IPC, NEW_UTS, NEW_MOUNTS = (
    0x02000000, 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x00020000,
)  # fmt: skip
READ_ONLY, NO_SUID, REMOUNT, BIND, MOVE, RECURSIVE = 1, 2, 32, 4096, 8192, 16384
PRIVATE, SLAVE, SHARED = 1 << 18, 1 << 19, 1 << 20
_DETACH = 2

_PARENT_DEATH_SIGNAL, _DUMPABLE, _DROP_BOUNDING, _NO_NEW_PRIVILEGES, _SUBREAPER, _AMBIENT = 1, 4, 24, 38, 36, 47
_AMBIENT_CLEAR = 4
_SECCOMP, _SECCOMP_FILTER = 22, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442  # since 5.12, the same number on each architecture
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # likewise, since 5.13
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_AT_RECURSIVE, _ATTRIBUTE_READ_ONLY = 0x8000, 1

# capabilities(7): what root may do to its own files and processes, and nothing to the machine
_KEPT_CAPABILITIES = {0: "CHOWN", 1: "DAC_OVERRIDE", 3: "FOWNER", 4: "FSETID", 5: "KILL", 6: "SETGID", 7: "SETUID"}
_CAPABILITIES = 64
_CAPABILITY_VERSION = 0x20080522


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    """Return the result of a system call; raise its OSError if it is negative, with ``what`` was called."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(kinds: int) -> None:
    """Move this process into new namespaces; for a process namespace only its children. Raises OSError."""
    _check(_libc().unshare(kinds), "unshare")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """Mount a file system. Raises OSError."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount; files that are open there stay usable. Raises OSError."""
    _check(_libc().umount2(os.fsencode(target), _DETACH), f"umount {target}")


def make_read_only(target: str) -> None:
    """Make a mount, and all mounts below it, read-only. Raises OSError: also before Linux 5.12."""
    attributes = struct.pack("=QQQQ", _ATTRIBUTE_READ_ONLY, 0, 0, 0)
    result = _libc().syscall(
        _MOUNT_SETATTR, -100, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _check(result, f"mount_setattr {target}")


def enter_root(folder: str) -> None:
    """Make a mount the root of this mount namespace, and unmount the old root. Raises OSError."""
    os.chdir(folder)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root on {platform.machine()}")
    _check(_libc().syscall(number, b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def _prctl(option: int, *arguments: int) -> int:
    """Call prctl(2) with up to four arguments, and return its result."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return _libc().prctl(option, *map(ctypes.c_ulong, padded))


def die_with_parent(signal: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    _check(_prctl(_PARENT_DEATH_SIGNAL, signal), "prctl")


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose own parent ends."""
    _check(_prctl(_SUBREAPER, 1), "prctl")


def hide() -> None:
    """Hide this process's memory and its files in ``/proc`` from processes with fewer capabilities."""
    _check(_prctl(_DUMPABLE, 0), "prctl")


def gain_nothing() -> None:
    """Set no_new_privs: neither this process nor its children gain privileges by running a program. Raises OSError."""
    _check(_prctl(_NO_NEW_PRIVILEGES, 1), "prctl")


def drop_capabilities() -> None:
    """Give up, for good, all capabilities but those over own files and processes. Raises OSError."""
    for number in range(_CAPABILITIES):
        if number not in _KEPT_CAPABILITIES:
            _prctl(_DROP_BOUNDING, number)  # fails for numbers that this kernel does not have, and without root
    _prctl(_AMBIENT, _AMBIENT_CLEAR)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    current = ctypes.create_string_buffer(24)
    _check(_libc().capget(header, current), "capget")
    # effective, permitted and inheritable capabilities from 0 to 31, then those from 32 on
    effective, permitted, inheritable, *_ = struct.unpack("=6I", current.raw)
    mask = sum(1 << number for number in _KEPT_CAPABILITIES)
    reduced = effective & mask, permitted & mask, inheritable & mask, 0, 0, 0
    _check(_libc().capset(header, struct.pack("=6I", *reduced)), "capset")


class _Program(ctypes.Structure):
    """``struct sock_fprog`` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(program: bytes) -> None:
    """Add a seccomp filter, a BPF program, to this thread and its children. Raises OSError."""
    filter_program = _Program(len(program) // 8, program)
    result = _libc().prctl(
        _SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), ctypes.byref(filter_program), ctypes.c_ulong(0), ctypes.c_ulong(0)
    )
    _check(result, "seccomp")


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 where there is none."""
    try:
        version = _libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    except AttributeError:  # no syscall function: not Linux
        return 0
    return max(version, 0)


def landlock(rights: int, scopes: int, allowed: Iterable[tuple[str, int]]) -> None:
    """Restrict this process by Landlock: give up rights to files for good, except below some paths.

    Args:
        rights: to give up, as bits of ``LANDLOCK_ACCESS_FS``.
        scopes: of signals and abstract sockets, from version 6 on.
        allowed: (path, rights that remain below it); missing paths are left out.

    Raises:
        OSError: the kernel refuses.
    """
    attributes = struct.pack("=QQQ", rights, 0, scopes) if scopes else struct.pack("=Q", rights)
    rules = _check(_libc().syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    try:
        for path, remaining in allowed:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                rule = struct.pack("=Qi", remaining, descriptor)
                _check(_libc().syscall(_LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, rule, 0), f"landlock {path}")
            finally:
                os.close(descriptor)
        gain_nothing()
        _check(_libc().syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    finally:
        os.close(rules)
