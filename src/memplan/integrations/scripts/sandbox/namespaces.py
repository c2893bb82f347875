"""A script's process in namespaces of its own: user, mounts, processes, IPC, and network where it has none.

Three processes: one enters the namespaces and waits; the second, number 1 in the new process namespace, lays the
overlays, and lays them anew for each run; the third, in a mount namespace below that one, becomes the script. What the
second mounts reaches the third, which has no rights to mount and sees nothing of the real root.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from memplan.integrations.scripts.sandbox import call_filter, kernel
from memplan.integrations.scripts.sandbox.devices import device_names
from memplan.integrations.scripts.sandbox.overlay import Tree, clone_mounts, folders_above, mount_points

_ALL = kernel.NEW_USER | kernel.NEW_MOUNTS | kernel.NEW_PID | kernel.NEW_IPC | kernel.NEW_UTS
_EVERY_NUMBER = "0 0 4294967295"
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
          "ptmx": "pts/ptmx"}  # fmt: skip
_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
"""Below /proc: what root sets there, it sets for the whole machine."""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # netdevice(7)


@dataclass(frozen=True)
class SandboxedProgram:
    """What a process in the namespaces needs.

    Args:
        scratch: a folder on a disk, for what is written.
        own_network: whether it has a network of its own, with nothing but itself in it.
        program: becomes the script: called in a process of its own, never returns.
        follow: waits for that process, by its number, and returns when it has ended.
    """

    scratch: str
    own_network: bool
    program: Callable[[], NoReturn]
    follow: Callable[[int, Tree], None]


def start(sandbox: SandboxedProgram, failures: int) -> int:
    """Start the processes and return the number of the first, which ends with the others. ``failures`` is a pipe to
    which an error before the script's start is written; it is closed when the script starts."""
    # two pipes, each (end to read, end to write): the first process writes a byte once its namespaces are entered, then
    # waits for a byte that says that its users are mapped
    ready, unshared = os.pipe()
    mapped, go = os.pipe()
    first = os.fork()
    if not first:
        os.close(ready)
        os.close(go)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # number 1 of a namespace can be sent signals from inside
        _run_and_exit(failures, lambda: _enter_namespaces(sandbox, unshared, mapped, failures))
    os.close(unshared)
    os.close(mapped)
    if os.read(ready, 1):
        _map_users(first)
        os.write(go, b"1")
    os.close(ready)
    os.close(go)
    return first


def _run_and_exit(failures: int, run: Callable[[], None]) -> NoReturn:
    """Run a function in a forked process and end the process; its error is written to the pipe ``failures``."""
    try:
        run()
    except BaseException as error:
        os.write(failures, f"{error}".encode(errors="replace") or b"failed")
        os._exit(1)
    os._exit(0)


def _map_users(process: int) -> None:
    """Map users and groups into the user namespace of a process: all of them for root, else this user alone."""
    for name, number in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        try:
            _write(f"/proc/{process}/{name}", _EVERY_NUMBER)
        except OSError:
            if name == "gid_map":
                _write(f"/proc/{process}/setgroups", "deny")
            _write(f"/proc/{process}/{name}", f"{number} {number} 1")


def _write(path: str, text: str) -> None:
    """Write to a file of ``/proc`` with a single system call, as the kernel requires."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _enter_namespaces(sandbox: SandboxedProgram, unshared: int, mapped: int, failures: int) -> None:
    """First process: enter the namespaces, have the users mapped from outside, start the second and wait for it. A byte
    is written to the pipe ``unshared`` once the namespaces are entered, and read from ``mapped`` once the users are
    mapped; an error is written to ``failures``."""
    kernel.die_with_parent(signal.SIGKILL)
    clones = _clone_folders(f"{sandbox.scratch}/clones")
    kernel.unshare(_ALL | (kernel.NEW_NET if sandbox.own_network else 0))
    os.write(unshared, b"1")
    os.close(unshared)
    if not os.read(mapped, 1):
        raise OSError("numbers of users cannot be mapped")
    second = os.fork()
    if not second:
        _run_and_exit(failures, lambda: _run_second_process(sandbox, clones, failures))
    os.close(failures)
    os.waitpid(second, 0)


def _clone_folders(scratch: str) -> dict[str, str]:
    """Map each folder that has mounts below it to a clone of its own mount, in the folder ``scratch``; {} if not root.
    This has to come before a user namespace is entered, which locks its mounts together."""
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.mount(None, "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
    except OSError:
        return {}
    os.mkdir(scratch)
    mounts = mount_points() | {scratch}
    kernel.mount("tmpfs", scratch, "tmpfs", kernel.NO_SUID)
    clones = clone_mounts(mounts, scratch)
    if {*folders_above(scratch)} - {*clones} == {"/"}:
        return clones
    kernel.unmount(scratch)  # it lies below a mount, which then could have no overlay
    return {}


def _run_second_process(sandbox: SandboxedProgram, clones: Mapping[str, str], failures: int) -> None:
    """Second process, number 1 in the namespace, whose end ends all: mount the view, start and follow the script.
    ``clones`` maps folders with mounts below them to clones of their own mount; an error is written to ``failures``."""
    kernel.die_with_parent(signal.SIGKILL)
    kernel.mount(None, "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
    mounts = {path for path in mount_points() if not path.startswith(sandbox.scratch)}
    root = os.path.join(sandbox.scratch, "view")
    os.mkdir(root)
    kernel.mount("tmpfs", root, "tmpfs", kernel.NO_SUID, "mode=755,size=64m")
    kernel.mount(None, root, flags=kernel.SHARED)
    tree = Tree(root, sandbox.scratch)
    tree.build(mounts, clones)
    _mount_devices(f"{root}/dev")
    _mount_proc(f"{root}/proc")
    kernel.mount("/sys", f"{root}/sys", flags=kernel.BIND | kernel.RECURSIVE)
    kernel.make_read_only(f"{root}/sys")
    # else a script could replace a folder by a link, and the next run's mounts would follow that
    kernel.mount(None, root, flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SUID)
    _write("/proc/sys/user/max_user_namespaces", "0")  # in a new one, a script would have root's rights again
    if sandbox.own_network:
        _bring_up_loopback()
    _start_with_high_process_numbers()
    kernel.hide()
    third = os.fork()
    if not third:
        _run_and_exit(failures, lambda: _become_script(sandbox, root))
    os.close(failures)
    sandbox.follow(third, tree)


def _mount_devices(folder: str) -> None:
    """Bind the permitted devices into the view's /dev, with terminals of its own and the usual links."""
    for name in device_names():
        if os.path.isdir(f"/dev/{name}"):
            os.mkdir(f"{folder}/{name}")
        else:
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o600))
        kernel.mount(f"/dev/{name}", f"{folder}/{name}", flags=kernel.BIND | kernel.RECURSIVE)
    os.mkdir(f"{folder}/pts")
    kernel.mount("devpts", f"{folder}/pts", "devpts", options="newinstance,ptmxmode=0666,mode=620")
    for name, target in _LINKS.items():
        os.symlink(target, f"{folder}/{name}")


def _mount_proc(folder: str) -> None:
    """Mount a process file system, in which the settings of the whole machine are read-only."""
    kernel.mount("proc", folder, "proc")
    for path in (f"{folder}/{name}" for name in _SETTINGS):
        if os.path.exists(path):
            kernel.mount(path, path, flags=kernel.BIND | kernel.RECURSIVE)
            kernel.make_read_only(path)


def _start_with_high_process_numbers() -> None:
    """Avoid process numbers that also exist outside: a user could read one in the output and send a signal to it."""
    try:
        with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
            highest = int(file.read())
        _write("/proc/sys/kernel/ns_last_pid", str(highest - highest // 4))  # the last quarter of the numbers
    except OSError:  # a kernel without this setting: numbers begin at 2
        pass


def _bring_up_loopback() -> None:
    """Switch on the network interface ``lo``, the only one of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        name = b"lo".ljust(16, b"\0")
        (flags,) = struct.unpack_from("H", fcntl.ioctl(plug, _GET_FLAGS, name + bytes(24)), 16)
        fcntl.ioctl(plug, _SET_FLAGS, name + struct.pack("H22x", flags | _UP))


def _become_script(sandbox: SandboxedProgram, root: str) -> None:
    """Third process: make the view its root, give up privileges, and run the script."""
    folder = os.getcwd()
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount(None, "/", flags=kernel.SLAVE | kernel.RECURSIVE)
    kernel.enter_root(root)
    kernel.drop_capabilities()
    kernel.gain_nothing()
    if sandbox.own_network and call_filter.available():
        kernel.filter_calls(call_filter.program_of(call_filter.own_network()))
    os.chdir(folder)
    sandbox.program()
