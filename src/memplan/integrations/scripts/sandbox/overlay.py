"""A copy-on-write view of the file system: overlays over every folder, mounted anew for each run of the script.

An overlay cannot be laid over a folder that has a mount below it, since the mounts of a namespace's owner are locked
together (mount_namespaces(7)). Such a folder is made anew, with an overlay for each of its folders and its files bound
read-only; the folder itself is read-only, too, so that nothing in it can be put in the place of another thing. https://docs.kernel.org/filesystems/overlayfs.html
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from memplan.integrations.scripts.sandbox import kernel
from memplan.integrations.scripts.sandbox.messages import MARK, Change

_OWN = ("/proc", "/sys", "/dev")
"""Folders that `namespaces` mounts by itself."""
_SHARED_MEMORY = "/dev/shm"
_OPAQUE = "user.overlay.opaque"
_SMALL = 1 << 20
_LONGEST_TEXT = 64 << 20
"""Bytes of a text that replaces one that was there."""
_MOST = 10_000
"""Changes that are listed at most."""


@dataclass
class Tree:
    """The view of the file system below a new root.

    Args:
        root: an empty folder: a mount of its own, whose mounts reach the script's namespace.
        scratch: a folder on a disk, for what is written.
    """

    root: str
    scratch: str
    _covered: list[str] = field(default_factory=list[str])
    """Folders with an overlay."""
    _in_memory: bool = False
    """Whether what is written lies in memory."""
    _runs: int = 0

    def build(self, mounts: set[str]) -> None:
        """Make the folders and mount everything. ``mounts``: paths of all others. Raises OSError."""
        self._make("/", mounts)
        os.makedirs(f"{self.root}{_SHARED_MEMORY}", mode=0o1777, exist_ok=True)
        if os.path.isdir(_SHARED_MEMORY):
            self._covered.append(_SHARED_MEMORY)
        self._mount()

    def _make(self, folder: str, mounts: set[str]) -> None:
        """Plan a folder that has a mount below it."""
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            inside = f"{self.root}{path}"
            try:
                mode = os.lstat(path).st_mode
            except OSError:  # gone since, or a file system that does not answer
                continue
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(path), inside)
            elif not stat.S_ISDIR(mode):
                self._bind_file(path, inside, mode)
            else:
                os.mkdir(inside)
                os.chmod(inside, stat.S_IMODE(mode))
                if path in _OWN:
                    continue
                if any(mount.startswith(path + "/") for mount in mounts) and os.access(path, os.R_OK | os.X_OK):
                    self._make(path, mounts)
                else:
                    self._covered.append(path)

    def _bind_file(self, path: str, inside: str, mode: int) -> None:
        if stat.S_ISREG(mode):
            os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o600))
            kernel.mount(path, inside, flags=kernel.BIND)
            kernel.make_read_only(inside)

    def _mount(self) -> None:
        """Mount a fresh overlay on each covered folder. Raises OSError where the working folder cannot have one."""
        self._runs += 1
        here = os.getcwd()
        for number, path in enumerate(list(self._covered)):
            if not os.path.isdir(path):  # gone since
                self._covered[number] = ""
                continue
            try:
                self._overlay(number, path)
            except OSError as error:
                if here == path or here.startswith(path.rstrip("/") + "/"):
                    raise OSError(f"no overlay can be laid over {path} ({error})") from None
                self._covered[number] = ""
                self._show_read_only(path)

    def _overlay(self, number: int, path: str) -> None:
        upper, work = f"{self._layer(number)}/upper", f"{self._layer(number)}/work"
        status = os.stat(path)
        options = f"lowerdir={_quoted(path)},upperdir={_quoted(upper)},workdir={_quoted(work)},userxattr"
        while True:
            os.makedirs(upper)
            os.makedirs(work)
            with suppress(OSError):  # of an owner that has no number here
                os.chown(upper, status.st_uid, status.st_gid)
            os.chmod(upper, stat.S_IMODE(status.st_mode))
            try:
                return kernel.mount("overlay", f"{self.root}{path}", "overlay", options=options)
            except OSError:
                if self._in_memory or number:
                    raise
            # the disk of the scratch folder may be an overlay itself, on which none can write: a container's
            self._in_memory = True
            kernel.mount("tmpfs", f"{self.scratch}/layers", "tmpfs", kernel.NO_SUID)

    def _show_read_only(self, path: str) -> None:
        """Show a folder of a file system that cannot lie below an overlay, or an empty one where that fails, too."""
        try:
            kernel.mount(path, f"{self.root}{path}", flags=kernel.BIND | kernel.RECURSIVE)
            kernel.make_read_only(f"{self.root}{path}")
        except OSError:
            kernel.mount("tmpfs", f"{self.root}{path}", "tmpfs", kernel.READ_ONLY)

    def renew(self) -> None:
        """Forget what was written: the next run sees the real files again. Raises OSError."""
        for number, path in enumerate(self._covered):
            if path:
                kernel.unmount(f"{self.root}{path}")
            remove_tree(self._layer(number))
        self._covered = [path for path in self._covered if path]
        self._mount()

    def _layer(self, number: int) -> str:
        return f"{self.scratch}/layers/{self._runs}/{number}"

    def _layers(self) -> Iterator[tuple[str, str]]:
        """Yield each covered folder with the folder of what was written below it."""
        for number, path in enumerate(self._covered):
            if path:
                yield path, f"{self._layer(number)}/upper"

    def changes(self, *, commits: bool = False) -> list[Change]:
        """Return what the script wrote, removed or changed, in the order of paths.

        ``commits``: a file that `commit` leaves as it was counts as a checkpoint.
        """
        found = list[Change]()
        for path, upper in self._layers():
            with suppress(OSError, RecursionError):  # of folders deeper than paths are long
                _collect(path, upper, found, commits=commits)
        return sorted(found[:_MOST], key=lambda change: change.path)

    def commit(self) -> None:
        """Write what the script wrote to the real files. Nothing is removed, no checkpoint without values is written,
        and only text replaces a file that was there: a checkpoint may be compressed, or opened and not written."""
        for path, upper in self._layers():
            _commit(path, upper)


def mount_points() -> set[str]:
    """Return the paths at which something is mounted in this namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        rows = [line.split(b" ")[4] for line in file]
    return {os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), row)) for row in rows}


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def _collect(folder: str, upper: str, found: list[Change], *, new: bool = False, commits: bool = False) -> None:
    """Add the changes below a folder. ``new``: the script made it, so that there is nothing below."""
    for entry in sorted(os.scandir(upper), key=lambda entry: entry.name):
        if len(found) >= _MOST:
            return
        path = os.path.join(folder, entry.name)
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode):  # how an overlay notes that a file is gone
            found.append(Change(path, "removed"))
            continue
        before = None if new else _lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            found.append(_file_change(path, entry.path, status, before, commits=commits))
            continue
        opaque = before is not None and _is_opaque(entry.path)
        if before is None or not stat.S_ISDIR(before.st_mode) or opaque:
            if opaque:
                found.append(Change(path + "/", "removed"))
            found.append(Change(path + "/", "file"))
            _collect(path, entry.path, found, new=True, commits=commits)
        elif _owner_and_mode(before) != _owner_and_mode(status) or not os.listdir(entry.path):
            found.append(Change(path + "/", "changed"))
            _collect(path, entry.path, found, commits=commits)
        else:
            _collect(path, entry.path, found, commits=commits)


def _file_change(
    path: str, copy: str, status: os.stat_result, before: os.stat_result | None, *, commits: bool
) -> Change:
    regular = before is not None and stat.S_ISREG(before.st_mode)
    same = before is not None and regular and status.st_size == before.st_size
    if same and status.st_size <= _SMALL and _read(path) == _read(copy):
        return Change(path, "changed")
    stays = commits and regular and not _is_text(copy)
    return Change(path, "checkpoint" if stays or _is_marked(copy) else "file")


def _is_text(path: str) -> bool:
    """Return whether a file holds text, and not too much of it."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _LONGEST_TEXT:
        return False
    try:
        return "\0" not in _read(path).decode("utf-8")
    except UnicodeDecodeError:
        return False


def _is_marked(path: str) -> bool:
    """Return whether a file holds a checkpoint of tensors without values, or begins or ends with one."""
    try:
        size = os.lstat(path).st_size
    except OSError:
        return False
    starts = {0, max(size - _SMALL, 0)} if size > 2 * _SMALL else set(range(0, size + 1, _SMALL // 2))
    return any(MARK in _part(path, start, _SMALL) for start in sorted(starts))


def _read(path: str) -> bytes:
    return _part(path, 0, _LONGEST_TEXT)


def _part(path: str, start: int, length: int) -> bytes:
    """Return a part of a file; nothing of links and pipes, which a script can put in a file's place meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        file.seek(start)
        return file.read(length)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _owner_and_mode(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def _is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, _OPAQUE) == b"y"
    except OSError:
        return False


def _commit(folder: str, upper: str) -> None:
    for entry in os.scandir(upper):
        with suppress(OSError, RecursionError):  # one that cannot be written keeps no other one from being written
            _commit_entry(os.path.join(folder, entry.name), entry.path)


def _commit_entry(path: str, copy: str) -> None:
    """Write a file or a folder of the script's where it belongs; whatever of another kind is in its way stays."""
    kind, before = os.lstat(copy).st_mode, _lstat(path)
    if stat.S_ISLNK(kind) and before is None:
        os.symlink(os.readlink(copy), path)
    elif stat.S_ISDIR(kind):
        if before is None:
            os.mkdir(path)
            shutil.copystat(copy, path)
        if before is None or stat.S_ISDIR(before.st_mode):
            _commit(path, copy)
    elif stat.S_ISREG(kind) and not _is_marked(copy):
        if before is None:
            with open(path, "xb") as file, open(copy, "rb") as source:
                shutil.copyfileobj(source, file)
            shutil.copystat(copy, path)
        elif stat.S_ISREG(before.st_mode) and _is_text(copy):
            with open(path, "r+b") as file:  # in place: it keeps its owner, and its other names
                file.write(_read(copy))
                file.truncate()


def remove_tree(path: str) -> None:
    """Remove a folder or a file, however deep, and whatever its mode: an overlay's work folder lets nobody in."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
