"""A copy-on-write view of the file system: overlays over every folder, mounted anew for each run of the script.

An overlay cannot be laid over a folder that has a mount below it, since the mounts of a namespace's owner are locked
together (mount_namespaces(7)). Such a folder is made anew, with an overlay for each of its folders and its files bound
read-only. https://docs.kernel.org/filesystems/overlayfs.html
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
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
    _entries: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Folders made anew, with the names that they had then."""
    read_only: list[str] = field(default_factory=list[str])
    """Folders over which no overlay can be laid."""
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
        names = set(os.listdir(folder))
        self._entries[folder] = names
        for name in sorted(names):
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
        """Mount a fresh overlay on each covered folder."""
        self._runs += 1
        for number, path in enumerate(list(self._covered)):
            if not os.path.isdir(path):  # gone since
                self._covered[number] = ""
                continue
            upper, work = self._upper(number), f"{self.scratch}/{self._runs}/{number}/work"
            os.makedirs(upper)
            os.makedirs(work)
            status = os.stat(path)
            with suppress(OSError):  # of an owner that has no number here
                os.chown(upper, status.st_uid, status.st_gid)
            os.chmod(upper, stat.S_IMODE(status.st_mode))
            options = f"lowerdir={_quoted(path)},upperdir={_quoted(upper)},workdir={_quoted(work)},userxattr"
            try:
                kernel.mount("overlay", f"{self.root}{path}", "overlay", options=options)
            except OSError:
                self._covered[number] = ""
                self._show_read_only(path)

    def _show_read_only(self, path: str) -> None:
        """Show a folder of a file system that cannot lie below an overlay, or an empty one where that fails, too."""
        self.read_only.append(path)
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
            remove_tree(f"{self.scratch}/{self._runs}/{number}")
        for folder, name in self._new_entries():
            remove_tree(f"{self.root}{folder}/{name}")
        self._covered = [path for path in self._covered if path]
        self._mount()

    def _upper(self, number: int) -> str:
        return f"{self.scratch}/{self._runs}/{number}/upper"

    def _layers(self) -> Iterator[tuple[str, str]]:
        """Yield each covered folder with the folder of what was written below it."""
        for number, path in enumerate(self._covered):
            if path:
                yield path, self._upper(number)

    def _new_entries(self) -> Iterator[tuple[str, str]]:
        for folder, names in self._entries.items():
            for name in sorted(set(os.listdir(f"{self.root}{folder}")) - names):
                yield folder, name

    def changes(self) -> list[Change]:
        """Return what the script wrote, removed or changed, in the order of paths."""
        found = list[Change]()
        with suppress(OSError, RecursionError):  # of folders deeper than paths are long
            for path, upper in self._layers():
                _collect(path, upper, found)
            for folder, name in self._new_entries():
                path, inside = os.path.join(folder, name), f"{self.root}{folder}/{name}"
                found.append(_written(path, inside))
                if os.path.isdir(inside) and not os.path.islink(inside):
                    _collect(path, inside, found, new=True)
        return sorted(found[:_MOST], key=lambda change: change.path)

    def commit(self) -> None:
        """Write what the script wrote to the real files: without its checkpoints, and nothing is removed."""
        for path, upper in self._layers():
            _commit(path, upper)
        for folder, name in self._new_entries():
            _commit_entry(os.path.join(folder, name), f"{self.root}{folder}/{name}")


def mount_points() -> set[str]:
    """Return the paths at which something is mounted in this namespace."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        rows = [line.split(" ")[4] for line in file]
    return {row.encode("utf-8", "surrogateescape").decode("unicode_escape") if "\\" in row else row for row in rows}


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def _collect(folder: str, upper: str, found: list[Change], *, new: bool = False) -> None:
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
            found.append(_file_change(path, entry.path, status, before))
            continue
        opaque = before is not None and _is_opaque(entry.path)
        if before is None or not stat.S_ISDIR(before.st_mode) or opaque:
            if opaque:
                found.append(Change(path + "/", "removed"))
            found.append(Change(path + "/", "file"))
            _collect(path, entry.path, found, new=True)
        elif _owner_and_mode(before) != _owner_and_mode(status) or not os.listdir(entry.path):
            found.append(Change(path + "/", "changed"))
            _collect(path, entry.path, found)
        else:
            _collect(path, entry.path, found)


def _file_change(path: str, copy: str, status: os.stat_result, before: os.stat_result | None) -> Change:
    same = before is not None and stat.S_ISREG(before.st_mode) and status.st_size == before.st_size
    if same and status.st_size <= _SMALL and _read(path) == _read(copy):
        return Change(path, "changed")
    return _written(path, copy)


def _written(path: str, copy: str) -> Change:
    if os.path.isdir(copy) and not os.path.islink(copy):
        return Change(path + "/", "file")
    return Change(path, "checkpoint" if _is_marked(copy) else "file")


def _is_marked(path: str) -> bool:
    """Return whether a file holds a checkpoint of tensors without values."""
    last = b""
    for block in _blocks(path):
        if MARK in last + block:
            return True
        last = block[-len(MARK) :]
    return False


def _read(path: str) -> bytes:
    return b"".join(_blocks(path))


def _blocks(path: str) -> Iterator[bytes]:
    """Yield what a file holds; nothing of links and of pipes, which a script can put in a file's place meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        while stat.S_ISREG(os.fstat(descriptor).st_mode) and (block := file.read(_SMALL)):
            yield block


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
        if not stat.S_ISCHR(entry.stat(follow_symlinks=False).st_mode):
            _commit_entry(os.path.join(folder, entry.name), entry.path)


def _commit_entry(path: str, copy: str) -> None:
    """Write a file or a folder of the script's where it belongs; whatever is in its way stays."""
    if os.path.islink(copy):
        if not os.path.lexists(path):
            os.symlink(os.readlink(copy), path)
    elif os.path.isdir(copy):
        if not os.path.lexists(path):
            os.mkdir(path)
            shutil.copystat(copy, path)
        if os.path.isdir(path):
            _commit(path, copy)
    elif stat.S_ISREG(os.lstat(copy).st_mode) and not os.path.isdir(path) and not _is_marked(copy):
        descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".memplan-")
        os.close(descriptor)
        try:
            shutil.copy2(copy, beside)
            os.replace(beside, os.path.realpath(path))
        except BaseException:
            os.unlink(beside)
            raise


def remove_tree(path: str) -> None:
    """Remove a folder or a file, however deep, and whatever its mode: an overlay's work folder lets nobody in."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
