"""A copy-on-write view of the file system: overlays over every folder, mounted anew for each run of the script.

An overlay cannot be laid over a folder that has a mount below it, since it would show what that mount hides. Root lays
it over a clone of the folder's own mount. Others cannot clone it, since the mounts of a namespace's owner are locked
together (mount_namespaces(7)): they lay it over a copy of the folder, with its small files; its large ones are bound
read-only. What is mounted below is laid on top, with overlays of its own. The root folder cannot be mounted anew for
another run, and is read-only. https://docs.kernel.org/filesystems/overlayfs.html
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from memplan.integrations.scripts.sandbox import kernel
from memplan.integrations.scripts.sandbox.messages import LISTED, MARK, Change, Changes

_OWN = ("/proc", "/sys", "/dev")
"""Folders that `namespaces` mounts by itself."""
_SHARED_MEMORY = "/dev/shm"
_OPAQUE = "user.overlay.opaque"
_SMALL = 1 << 20
_LONGEST_TEXT = 64 << 20
"""Largest text in bytes that replaces an existing file."""
_T = TypeVar("_T")


@dataclass
class _OverlaidFolder:
    """A folder with an overlay of its own."""

    path: str
    lower: str
    """What the overlay is laid over: the folder itself, or its clone or copy."""
    files: list[str] = field(default_factory=list[str])
    """Files that are bound read-only on top of it."""
    mounted: bool = False
    overlaid: bool = False
    """Whether the mount of the folder, and the overlay on it, exist."""


@dataclass
class Tree:
    """The view of the file system below a new root. ``root`` is an empty folder and a mount of its own, whose mounts
    reach the script's namespace; ``scratch`` a folder on a disk for what is written."""

    root: str
    scratch: str
    _overlaid_folders: list[_OverlaidFolder] = field(default_factory=list[_OverlaidFolder])
    """A folder comes before those mounted below it."""
    _in_memory: bool = False
    """Whether what is written lies in memory."""
    _runs: int = 0
    _first_run: tuple[tuple[str, str], ...] = ()
    """Each covered folder, and where what the first run wrote below it lies; set once that run is over."""
    unwritten: dict[str, str] = field(default_factory=dict[str, str])
    """Path of a file or folder that `commit` could not write -> why."""

    def build(self, mounts: set[str], clones: Mapping[str, str]) -> None:
        """Create the folders of the view and mount the overlays. Raises OSError. Clones are those of `clone_mounts`."""
        folders, files = self._copy_entries("/", self.root, size_limit=0)
        for path in files:
            self._bind_read_only(path)
        for path in folders:
            if path not in _OWN:
                self._plan_overlays(path, mounts, clones)
        os.makedirs(f"{self.root}{_SHARED_MEMORY}", mode=0o1777, exist_ok=True)
        if os.path.isdir(_SHARED_MEMORY):
            self._overlaid_folders.append(_OverlaidFolder(path=_SHARED_MEMORY, lower=_SHARED_MEMORY))
        self._mount()

    def _plan_overlays(self, folder: str, mounts: set[str], clones: Mapping[str, str]) -> None:
        """Plan an overlay on a folder, and another on each folder below it that cannot be a part of that. ``mounts``
        and ``clones`` are those of `build`."""
        covered = _OverlaidFolder(path=folder, lower=folder)
        self._overlaid_folders.append(covered)
        folders = list[str]()
        if folder in clones:
            covered.lower = clones[folder]
            mounted = _outermost_below(folder, mounts)
            folders = [path for path in mounted if os.path.isdir(path)]
            covered.files = [path for path in mounted if path not in folders]
        elif _outermost_below(folder, mounts) and os.access(folder, os.R_OK | os.X_OK):
            covered.lower = f"{self.scratch}/folders/{len(self._overlaid_folders)}"
            os.makedirs(covered.lower)
            folders, covered.files = self._copy_entries(folder, covered.lower, size_limit=_SMALL)
        for path in folders:
            self._plan_overlays(path, mounts, clones)

    def _copy_entries(self, folder: str, copy: str, *, size_limit: int) -> tuple[list[str], list[str]]:
        """Copy a folder's entries: links, files of up to ``size_limit`` bytes, and all others empty.

        Returns:
            Its folders, and those of its files that have been left empty.
        """
        folders, files = list[str](), list[str]()
        for name in sorted(os.listdir(folder)):
            path, inside = os.path.join(folder, name), os.path.join(copy, name)
            try:
                status = os.lstat(path)
            except OSError:  # removed meanwhile, or a file system that does not answer
                continue
            if stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(path), inside)
            elif stat.S_ISDIR(status.st_mode):
                os.mkdir(inside)
                os.chmod(inside, stat.S_IMODE(status.st_mode))
                folders.append(path)
            elif stat.S_ISREG(status.st_mode):
                os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o600))
                try:
                    if status.st_size > size_limit:
                        raise OSError("too large")
                    os.chown(inside, status.st_uid, status.st_gid)
                    shutil.copy2(path, inside)
                except OSError:
                    files.append(path)
        return folders, files

    def _bind_read_only(self, path: str) -> None:
        """Mount a file or folder read-only into the view, from a staging mount, so that it is never writable there.
        Raises OSError if the kernel refuses."""
        if os.path.isdir(path):
            staging, flags = f"{self.scratch}/folder", kernel.BIND | kernel.RECURSIVE
            os.makedirs(staging, exist_ok=True)
        else:
            staging, flags = f"{self.scratch}/file", kernel.BIND
            os.close(os.open(staging, os.O_CREAT | os.O_WRONLY, 0o600))
        kernel.mount(path, staging, flags=flags)
        try:
            kernel.make_read_only(staging)
            kernel.mount(staging, f"{self.root}{path}", flags=kernel.MOVE)
        except OSError:
            kernel.unmount(staging)
            raise

    def _mount(self) -> None:
        """Mount a new overlay on each folder; a folder that cannot have one becomes read-only. Raises OSError if it is
        the working folder, or above it."""
        self._runs += 1
        working_folder = os.getcwd()
        for number, covered in enumerate(self._overlaid_folders):
            if not os.path.isdir(covered.path):  # gone since
                continue
            covered.mounted = covered.overlaid = True
            try:
                self._overlay(number, covered)
            except OSError as error:
                if _is_in(working_folder, covered.path):
                    raise OSError(f"no overlay can be laid over {covered.path} ({error})") from None
                covered.overlaid = False
                try:  # its file system cannot be the lower layer of an overlay
                    self._bind_read_only(covered.path)
                except OSError:
                    kernel.mount("tmpfs", f"{self.root}{covered.path}", "tmpfs", kernel.READ_ONLY)
            for path in covered.files:
                with suppress(OSError):  # gone since
                    self._bind_read_only(path)

    def _overlay(self, number: int, covered: _OverlaidFolder) -> None:
        """Mount an overlay on the folder with this number. What is written goes to the scratch folder, or to memory if
        that cannot be the upper layer of an overlay."""
        upper, work = f"{self._layer(number)}/upper", f"{self._layer(number)}/work"
        status = os.stat(covered.path)
        options = f"lowerdir={_escape(covered.lower)},upperdir={_escape(upper)},workdir={_escape(work)},userxattr"
        while True:
            os.makedirs(upper)
            os.makedirs(work)
            with suppress(OSError):  # the owner is not mapped into this user namespace
                os.chown(upper, status.st_uid, status.st_gid)
            os.chmod(upper, stat.S_IMODE(status.st_mode))
            try:
                return kernel.mount("overlay", f"{self.root}{covered.path}", "overlay", options=options)
            except OSError:
                if self._in_memory or number:
                    raise
            # the scratch folder may be on an overlay itself, as in a container: that cannot hold an upper layer
            self._in_memory = True
            kernel.mount("tmpfs", f"{self.scratch}/layers", "tmpfs", kernel.NO_SUID)

    def renew(self, *, keep: bool = False) -> None:
        """Discard the run's writes, so that the next run sees the real files again. Raises OSError. ``keep``: whether
        to keep what the first run wrote, for `commit`; that of later runs is always removed."""
        keeps_first_run = keep and not self._first_run
        if keeps_first_run:
            self._first_run = tuple(self._layers())
        for covered in reversed(self._overlaid_folders):
            if covered.mounted:
                kernel.unmount(f"{self.root}{covered.path}")
                covered.mounted = covered.overlaid = False
        if not keeps_first_run:
            remove_tree(f"{self.scratch}/layers/{self._runs}")
        self._mount()

    def _layer(self, number: int) -> str:
        """Return the folder for what the current run writes below the overlaid folder with this number."""
        return f"{self.scratch}/layers/{self._runs}/{number}"

    def _layers(self) -> Iterator[tuple[str, str]]:
        """Yield each overlaid folder with its upper layer: the folder of what the run has written below it."""
        for number, covered in enumerate(self._overlaid_folders):
            if covered.overlaid:
                yield covered.path, f"{self._layer(number)}/upper"

    def changes(self, *, commits: bool = False) -> Changes:
        """Return what the script wrote, removed or changed, in the order of paths.

        ``commits``: whether `commit` follows; then a file that it would not replace counts as a checkpoint.
        """
        changes = _ChangeList()
        for path, upper in self._layers():
            _collect(path, upper, changes, commits=commits)
        return Changes(tuple(sorted(changes.rows, key=lambda change: change.path)), changes.more)

    def commit(self) -> None:
        """Write what the first run of the script wrote to the real files.

        Nothing is removed, no checkpoint without values is written, and only text replaces a file that was there: a
        checkpoint may be compressed, or opened and not written.
        """
        for path, upper in self._first_run or self._layers():
            folders = [(path, upper)]
            while folders:
                folder, copies = folders.pop()
                for name in self._try(folder, lambda copies=copies: sorted(os.listdir(copies))) or ():
                    inner, copy = os.path.join(folder, name), os.path.join(copies, name)
                    if self._try(inner, lambda inner=inner, copy=copy: _commit(inner, copy)):
                        folders.append((inner, copy))

    def _try(self, path: str, act: Callable[[], _T]) -> _T | None:
        """Call ``act`` and return its result; on an OSError note the path as unwritten and return None."""
        try:
            return act()
        except OSError as error:
            self.unwritten[path] = error.strerror or str(error)
            return None


def mount_points() -> set[str]:
    """Return the paths at which something is mounted in this namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        rows = [line.split(b" ")[4] for line in file]
    return {os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), row)) for row in rows}


def clone_mounts(mounts: set[str], scratch: str) -> dict[str, str]:
    """Clone the mount of each folder that has others below it, without those.

    Returns:
        {folder: its clone}; without folders that cannot be cloned.
    """
    clones = dict[str, str]()
    for number, path in enumerate(sorted({path for mount in mounts for path in folders_above(mount)} - {"/"})):
        if not _is_in(path, *_OWN):
            clone = f"{scratch}/{number}"
            os.mkdir(clone)
            with suppress(OSError):
                kernel.mount(path, clone, flags=kernel.BIND)
                clones[path] = clone
    return clones


def folders_above(path: str) -> list[str]:
    """Return the folders above a path, up to the root folder."""
    return [] if path == "/" else [os.path.dirname(path), *folders_above(os.path.dirname(path))]


def _is_in(path: str, *folders: str) -> bool:
    """Return whether a path is one of these folders, or below one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _outermost_below(folder: str, mounts: set[str]) -> list[str]:
    """Return the mounts below a folder that are not below another one of these."""
    below = [mount for mount in mounts if mount != folder and _is_in(mount, folder)]
    return sorted(mount for mount in below if not any(_is_in(above, *below) for above in folders_above(mount)))


def _escape(path: str) -> str:
    """Return a path for the options of an overlay, in which commas and colons separate."""
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


@dataclass
class _ChangeList:
    """Changes, of which the first `LISTED` are stored and the others counted."""

    rows: list[Change] = field(default_factory=list[Change])
    more: int = 0

    def add(self, change: Callable[[], Change]) -> None:
        """Append the result of ``change``, or only count it if there are `LISTED`."""
        if len(self.rows) < LISTED:
            self.rows.append(change())
        else:
            self.more += 1


def _collect(folder: str, upper: str, changes: _ChangeList, *, commits: bool) -> None:
    """Add the changes in the upper layer of a folder, breadth first. ``commits``: see `Tree.changes`."""
    folders = deque([(folder, upper, False)])  # path, upper layer, whether the script created it
    while folders:
        path, upper, new = folders.popleft()
        try:
            entries = sorted(os.scandir(upper), key=lambda entry: entry.name)
        except OSError:  # its path exceeds the system's limit
            changes.more += 1
            continue
        for entry in entries:
            _collect_entry(os.path.join(path, entry.name), entry, changes, folders, new=new, commits=commits)


def _collect_entry(
    path: str,
    entry: os.DirEntry[str],
    changes: _ChangeList,
    folders: deque[tuple[str, str, bool]],
    *,
    new: bool,
    commits: bool,
) -> None:
    """Add the change that an entry of an upper layer stands for, and queue folders.

    Args:
        path: the real path.
        entry: of the upper layer.
        changes: to add to.
        folders: queue of (path, upper layer, whether the script created the folder).
        new: whether the script created the folder of this entry, so that nothing was there before.
        commits: whether `Tree.commit` follows (see `Tree.changes`).
    """
    status, before = _lstat(entry.path), None if new else _lstat(path)
    if status is None:  # its path exceeds the system's limit: counted, not listed
        changes.more += 1
    elif stat.S_ISCHR(status.st_mode):  # a whiteout: how an overlay stores a removal
        changes.add(lambda: Change(path, "removed"))
    elif not stat.S_ISDIR(status.st_mode):
        changes.add(lambda: _file_change(path, entry.path, status, before, commits=commits))
    elif before is None or not stat.S_ISDIR(before.st_mode) or _is_opaque(entry.path):  # a folder of the script
        if before is not None and _is_opaque(entry.path):  # it hides a folder that the script removed
            changes.add(lambda: Change(path + "/", "removed"))
        changes.add(lambda: Change(path + "/", "file"))  # created
        folders.append((path, entry.path, True))
    else:  # a folder that was there: in the upper layer for what is below it, or for its own metadata
        if _owner_and_mode(before) != _owner_and_mode(status) or not os.listdir(entry.path):
            changes.add(lambda: Change(path + "/", "changed"))
        folders.append((path, entry.path, False))


def _file_change(
    path: str, copy: str, status: os.stat_result, before: os.stat_result | None, *, commits: bool
) -> Change:
    """Return the change of a file: only metadata, its content, or a checkpoint that is not to be written. ``copy`` is
    the file in the upper layer, with ``status``; ``before`` is the status of the real file, None if there is none."""
    if before is not None and stat.S_ISREG(before.st_mode):
        if status.st_size == before.st_size <= _SMALL and _read(path) == _read(copy):
            return Change(path, "changed")
        if commits and not _is_text(copy):
            return Change(path, "checkpoint")
    return Change(path, "checkpoint" if _is_marked(copy) else "file")


def _is_text(path: str) -> bool:
    """Return whether a file is UTF-8 text of limited length."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _LONGEST_TEXT:
        return False
    try:
        return "\0" not in _read(path).decode("utf-8")
    except UnicodeDecodeError:
        return False


def _is_marked(path: str) -> bool:
    """Return whether a file has a checkpoint of tensors without values; of a large file both ends are searched."""
    try:
        size = os.lstat(path).st_size
    except OSError:
        return False
    # parts of _SMALL bytes; those of a smaller file overlap, so that each mark is whole in one of them
    starts = [0, size - _SMALL] if size > 2 * _SMALL else range(0, size + 1, _SMALL // 2)
    return any(MARK in _read_part(path, start, _SMALL) for start in starts)


def _read(path: str) -> bytes:
    """Return the content of a regular file, at most `_LONGEST_TEXT` bytes; b"" for others."""
    return _read_part(path, start=0, length=_LONGEST_TEXT)


def _read_part(path: str, start: int, length: int) -> bytes:
    """Return a part of a regular file; b"" for links and pipes, by which a script may have replaced it meanwhile."""
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
    """Return the status of a path, of a link its own; None if there is nothing."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def _owner_and_mode(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def _is_opaque(path: str) -> bool:
    """Return whether a folder of an upper layer replaces the real one, whose content the script removed."""
    try:
        return os.getxattr(path, _OPAQUE) == b"y"
    except OSError:
        return False


def _commit(path: str, copy: str) -> bool:
    """Write a link, file or folder of the script to its real path. Return whether it is a folder, to be descended into.

    Checkpoints of tensors without values (`_is_marked`), and changes of existing files that are not text, are not
    written: they would replace data by what a recording computes instead.

    Raises OSError, also if an entry of another kind is there, which stays.
    """
    kind, before = os.lstat(copy).st_mode, _lstat(path)
    if stat.S_ISLNK(kind):
        if before is None:
            os.symlink(os.readlink(copy), path)
        elif not stat.S_ISLNK(before.st_mode) or os.readlink(path) != os.readlink(copy):
            raise _conflict(before)
    elif stat.S_ISDIR(kind):
        if before is None:
            os.mkdir(path)
            with suppress(OSError):
                shutil.copystat(copy, path)
        elif not stat.S_ISDIR(before.st_mode):
            raise _conflict(before)
        return True
    elif stat.S_ISREG(kind) and not _is_marked(copy):
        if before is None:
            _write_new(path, copy)
        elif not stat.S_ISREG(before.st_mode):
            raise _conflict(before)
        elif _is_text(copy):
            _replace_text(path, _read(copy))
    return False


def _conflict(status: os.stat_result) -> OSError:
    """Return the error of a path at which an entry of another kind, with this status, is in the way."""
    kind = "folder" if stat.S_ISDIR(status.st_mode) else "link" if stat.S_ISLNK(status.st_mode) else "file"
    return OSError(f"there is a {kind} in its place, which stays")


def _write_new(path: str, copy: str) -> None:
    """Copy a file to a path that does not exist; if the disk is full, nothing is left of it."""
    room = os.statvfs(os.path.dirname(path))
    if os.stat(copy).st_size > room.f_bavail * room.f_frsize:  # checked before, as holes of a sparse file become zeros
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with open(path, "xb") as file, open(copy, "rb") as source:
        try:
            shutil.copyfileobj(source, file)
            file.flush()
        except OSError:
            os.unlink(path)
            raise
    with suppress(OSError):
        shutil.copystat(copy, path)


def _replace_text(path: str, text: bytes) -> None:
    """Replace a file's content in place, so that it keeps its owner and its hard links."""
    with open(path, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, len(text))  # reserve room for all of it, or fail before writing
        except OSError:
            file.truncate(size)
            raise
        while text:
            text = text[file.write(text) :]
        file.truncate()


def remove_tree(path: str) -> None:
    """Remove a folder or file of any depth and mode: an overlay's work folder has no permissions at all."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
