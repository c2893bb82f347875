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
from memplan.integrations.scripts.sandbox.overlay import Tree, cloned, folders_above, mount_points

_ALL = kernel.NEW_USER | kernel.NEW_MOUNTS | kernel.NEW_PID | kernel.NEW_IPC | kernel.NEW_UTS
_EVERY_NUMBER = "0 0 4294967295"
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
          "ptmx": "pts/ptmx"}  # fmt: skip
_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
"""Below /proc: what root sets there, it sets for the whole machine."""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # netdevice(7)


@dataclass(frozen=True)
class Inside:
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


def start(inside: Inside, failures: int) -> int:
    """Start the processes and return the number of the first.

    Args:
        inside: what runs there.
        failures: a pipe that is written to, if something fails before the script has started, and is closed then.
    """
    ready, told = os.pipe()
    mapped, go = os.pipe()
    first = os.fork()
    if not first:
        os.close(ready)
        os.close(go)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # number 1 of a namespace can be sent signals from inside
        _guarded(failures, lambda: _enter(inside, told, mapped, failures))
    os.close(told)
    os.close(mapped)
    if os.read(ready, 1):
        _map_numbers(first)
        os.write(go, b"1")
    os.close(ready)
    os.close(go)
    return first


def _guarded(failures: int, run: Callable[[], None]) -> NoReturn:
    """Run something in a forked process, and end it; a failure is written to a pipe."""
    try:
        run()
    except BaseException as error:
        os.write(failures, f"{error}".encode(errors="replace") or b"failed")
        os._exit(1)
    os._exit(0)


def _map_numbers(process: int) -> None:
    """Give the users and groups of a user namespace their numbers: all of them as root, else this user's own."""
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        try:
            _write(f"/proc/{process}/{name}", _EVERY_NUMBER)
        except OSError:
            if name == "gid_map":
                _write(f"/proc/{process}/setgroups", "deny")
            _write(f"/proc/{process}/{name}", f"{own} {own} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _enter(inside: Inside, told: int, mapped: int, failures: int) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    clones = _clone(f"{inside.scratch}/clones")
    kernel.unshare(_ALL | (kernel.NEW_NET if inside.own_network else 0))
    os.write(told, b"1")
    os.close(told)
    if not os.read(mapped, 1):
        raise OSError("numbers of users cannot be mapped")
    second = os.fork()
    if not second:
        _guarded(failures, lambda: _lay(inside, clones, failures))
    os.close(failures)
    os.waitpid(second, 0)


def _clone(scratch: str) -> dict[str, str]:
    """Return clones of the folders with mounts below them, for root: before the mounts are locked together in here."""
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.mount(None, "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
    except OSError:
        return {}
    os.mkdir(scratch)
    mounts = mount_points() | {scratch}
    kernel.mount("tmpfs", scratch, "tmpfs", kernel.NO_SUID)
    clones = cloned(mounts, scratch)
    if {*folders_above(scratch)} - {*clones} == {"/"}:
        return clones
    kernel.unmount(scratch)  # a mount itself, below which others cannot have an overlay
    return {}


def _lay(inside: Inside, clones: Mapping[str, str], failures: int) -> None:
    """Lay the overlays, start the script, follow it. All processes of the namespace end with this one."""
    kernel.die_with_parent(signal.SIGKILL)
    kernel.mount(None, "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
    mounts = {path for path in mount_points() if not path.startswith(inside.scratch)}
    root = os.path.join(inside.scratch, "view")
    os.mkdir(root)
    kernel.mount("tmpfs", root, "tmpfs", kernel.NO_SUID, "mode=755,size=64m")
    kernel.mount(None, root, flags=kernel.SHARED)
    tree = Tree(root, inside.scratch)
    tree.build(mounts, clones)
    _make_devices(f"{root}/dev")
    _show_processes(f"{root}/proc")
    kernel.mount("/sys", f"{root}/sys", flags=kernel.BIND | kernel.RECURSIVE)
    kernel.make_read_only(f"{root}/sys")
    # else a script could put a link in the place of a folder below which something is mounted anew
    kernel.mount(None, root, flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SUID)
    _write("/proc/sys/user/max_user_namespaces", "0")  # in which a script would have root's rights again
    if inside.own_network:
        _bring_up_loopback()
    _count_processes_from_high_up()
    kernel.hide()
    third = os.fork()
    if not third:
        _guarded(failures, lambda: _become(inside, root))
    os.close(failures)
    inside.follow(third, tree)


def _make_devices(folder: str) -> None:
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


def _show_processes(folder: str) -> None:
    kernel.mount("proc", folder, "proc")
    for path in (f"{folder}/{name}" for name in _SETTINGS):
        if os.path.exists(path):
            kernel.mount(path, path, flags=kernel.BIND | kernel.RECURSIVE)
            kernel.make_read_only(path)


def _count_processes_from_high_up() -> None:
    """Let no number of a process in here be that of one outside: who reads it in the output may send it a signal."""
    try:
        with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
            most = int(file.read())
        _write("/proc/sys/kernel/ns_last_pid", str(most - most // 4))
    except OSError:  # a kernel without checkpoints: numbers begin at 2
        pass


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        name = b"lo".ljust(16, b"\0")
        (flags,) = struct.unpack_from("H", fcntl.ioctl(plug, _GET_FLAGS, name + bytes(24)), 16)
        fcntl.ioctl(plug, _SET_FLAGS, name + struct.pack("H22x", flags | _UP))


def _become(inside: Inside, root: str) -> None:
    folder = os.getcwd()
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount(None, "/", flags=kernel.SLAVE | kernel.RECURSIVE)
    kernel.enter_root(root)
    kernel.drop_capabilities()
    kernel.gain_nothing()
    if inside.own_network and call_filter.available():
        kernel.filter_calls(call_filter.program_of(call_filter.own_network()))
    os.chdir(folder)
    inside.program()
