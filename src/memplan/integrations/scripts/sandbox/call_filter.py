"""Seccomp filters: system calls that fail, or do nothing, in the script's process and in all that it starts.

A filter sees numbers, not what pointers point to. https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
from dataclasses import dataclass

# linux/audit.h; system calls as in arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "x86_64": {
        "open": 2, "ioctl": 16, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "kill": 62, "semget": 64,
        "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "fcntl": 72, "flock": 73,
        "truncate": 76, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101,
        "rt_sigqueueinfo": 129, "utime": 132, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203, "semtimedop": 220, "tgkill": 234, "utimes": 235,
        "mq_open": 240, "mq_unlink": 241, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
        "migrate_pages": 256, "openat": 257, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "move_pages": 279,
        "utimensat": 280,
        "rt_tgsigqueueinfo": 297, "prlimit64": 302, "process_vm_writev": 311, "sched_setattr": 314,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "fcntl": 25, "ioctl": 29, "ioprio_set": 30, "flock": 32, "truncate": 45, "fchmod": 52, "fchmodat": 53,
        "fchownat": 54,
        "fchown": 55, "openat": 56, "utimensat": 88, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119,
        "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
        "setpriority": 140, "mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187, "msgrcv": 188,
        "msgsnd": 189,
        "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195,
        "shmat": 196, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219, "migrate_pages": 238,
        "move_pages": 239, "rt_tgsigqueueinfo": 240, "prlimit64": 261, "process_vm_writev": 271,
        "sched_setattr": 274,
    },
}  # fmt: skip
# newer calls have the same number everywhere
_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "openat2": 437, "process_madvise": 440, "fchmodat2": 452,
    "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip

_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _RETURN, _AND = 0x20, 0x05, 0x15, 0x35, 0x06, 0x54
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
"""Calls of the second interface of x86_64, from this number on."""

_CHANGES = (
    0x40086602, 0x401C5820, 0x40087602, 0x40806685,  # FS_IOC_SETFLAGS, FSSETXATTR, SETVERSION, ENABLE_VERITY
    *range(0x5402, 0x540D), 0x540E, 0x5410, 0x5412, 0x5414, 0x541D, 0x5423,  # of terminals: TCSETS to TIOCSETD
    *range(0x402C542B, 0x402C542E),  # TCSETS2 and its kin
)  # fmt: skip
"""Commands of ioctl that change a file or a terminal that is open for reading."""
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, and of open file descriptions
_LEASE = 1024  # F_SETLEASE
_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: who is sent a signal, and which
_NO_TRUNCATION = os.O_TRUNC | os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Rule:
    """A system call that is skipped and returns ``answer`` instead: an error's number, or 0 for success.

    With ``argument`` it is skipped only if that argument, masked, is one of ``values`` (``but``: is none of them).
    """

    call: str
    answer: int
    argument: int | None = None
    values: tuple[int, ...] = ()
    mask: int = 0xFFFFFFFF
    but: bool = False


def available() -> bool:
    """Return whether the numbers of the system calls are known for this processor."""
    return platform.machine() in _CALLS


def own_network() -> tuple[Rule, ...]:
    """Return the rules for a process in namespaces: for what namespaces do not isolate, such as kernel keys."""
    families = (int(socket.AF_UNIX), int(socket.AF_INET), int(socket.AF_INET6), 16)  # 16: netlink
    return (
        Rule("socket", errno.EAFNOSUPPORT, 0, families, but=True),
        Rule("io_uring_setup", errno.ENOSYS),
        *(Rule(name, errno.EPERM) for name in ("add_key", "request_key", "keyctl")),
    )


def no_effects(*, signals: bool, truncates: bool) -> tuple[Rule, ...]:
    """Return the rules for a process under Landlock alone: for what Landlock does not restrict.

    Changes of mode, owner, times and attributes do nothing and report success, as do locks, for which other processes
    would wait.

    Args:
        signals: whether signals to other processes have to be refused.
        truncates: whether calls that empty a file have to be refused, also one that opens it for reading.
    """
    pretended = (
        "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes",
        "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
        "setxattrat", "removexattrat", "file_setattr",
    )  # fmt: skip
    refused = ("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv",
               "msgctl", "setpriority", "mq_open", "mq_unlink", "ptrace", "process_vm_writev",
               "add_key", "request_key", "keyctl", "migrate_pages", "move_pages", "process_madvise")  # fmt: skip
    rules = [Rule(name, 0) for name in pretended]
    rules += [Rule(name, errno.EPERM) for name in refused]
    rules += [Rule("socket", errno.ENETUNREACH), Rule("io_uring_setup", errno.ENOSYS)]
    rules.append(Rule("ioctl", errno.EPERM, 1, _CHANGES))
    rules += [Rule("flock", 0), Rule("fcntl", 0, 1, _LOCKS), Rule("fcntl", errno.EAGAIN, 1, (_LEASE,))]
    # process 0 is the caller itself; its other threads are addressed by number, and lose nothing if nothing changes
    rules.append(Rule("ioprio_set", 0))
    rules += [Rule(f"sched_set{what}", 0, 0, (0,), but=True) for what in ("param", "scheduler", "affinity", "attr")]
    rules.append(Rule("prlimit64", errno.EPERM, 0, (0, os.getpid()), but=True))
    if signals:
        this_process = (os.getpid(), 0)  # 0: its group
        rules += [Rule(name, errno.EPERM, 0, this_process, but=True) for name in ("kill", "tgkill")]
        rules.append(Rule("fcntl", errno.EPERM, 1, _OWNERS))
        rules += [
            Rule(name, errno.EPERM) for name in ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
        ]
    if truncates:
        truncates_to_read = (os.O_TRUNC | os.O_RDONLY,)
        rules += [Rule("truncate", errno.EACCES), Rule("openat2", errno.ENOSYS)]
        rules += [Rule("openat", errno.EACCES, 2, truncates_to_read, _NO_TRUNCATION)]
        rules += [Rule("open", errno.EACCES, 1, truncates_to_read, _NO_TRUNCATION)]
    return tuple(rules)


def program_of(rules: tuple[Rule, ...]) -> bytes:
    """Compile rules to a BPF program for `kernel.filter_calls`."""
    machine = platform.machine()
    numbers = _CALLS[machine] | _EVERYWHERE
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    for rule in rules:
        if rule.call in numbers:  # aarch64 lacks the oldest calls
            body = _body(rule)
            program += [(_EQUAL, 0, len(body), numbers[rule.call]), *body]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _body(rule: Rule) -> list[tuple[int, int, int, int]]:
    """Return the BPF instructions for a call of this rule, as (code, jump if true, jump if false, operand).

    They return the rule's answer. For arguments without an answer they load the number of the call again and go on with
    the next rule, which may be of the same call.
    """
    refuse = (_RETURN, 0, 0, _FAIL | rule.answer)
    if rule.argument is None:
        return [refuse]
    load = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument), (_AND, 0, 0, rule.mask)]
    # an equal value jumps over the other tests and the instruction after them
    tests = [(_EQUAL, len(rule.values) - n, 0, value) for n, value in enumerate(rule.values)]
    skip_refusal = [] if rule.but else [(_JUMP, 0, 0, 1)]
    return [*load, *tests, *skip_refusal, refuse, (_LOAD, 0, 0, _NUMBER_AT)]
