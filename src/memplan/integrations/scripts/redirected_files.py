"""What Python writes goes to a folder that stands over the file system for this process; it reads it back from there.

For where Linux allows no overlay, and Landlock alone protects the real files: without this, each script that writes a
file would end with a permission that is denied. What a library writes without Python is refused.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from memplan import _torch
from memplan.integrations.scripts.working_folder import working_folder

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("/dev/", "/proc/")
# functions of os by what they do to their first path: read it, change it, or make it
_READ = ("stat", "lstat", "access", "readlink", "statvfs")
_CHANGE = ("chmod", "chown", "utime", "truncate")
_REMOVE = ("remove", "unlink", "rmdir")


class Note(Protocol):
    """Takes the path of a file that is written for the first time, or removed."""

    def __call__(self, path: str, *, removed: bool = False) -> None:
        """Take a path."""
        ...


class RedirectedFiles:
    """A folder in which the files lie that a script writes.

    Args:
        folder: an empty one, which may be removed afterwards.
        note: called with the path of each file that is written for the first time, removed or renamed.
    """

    def __init__(self, folder: str, note: Note) -> None:
        self._folder = os.path.realpath(folder)
        self._note = note
        self._removed: set[str] = set()

    @contextmanager
    def over_all(self) -> Iterator[None]:
        """Let everything in here that Python writes go to the folder."""
        temporary = os.path.join(self._folder, "tmp")
        os.makedirs(temporary, exist_ok=True)
        patches = {name: self._reading(getattr(os, name)) for name in _READ if hasattr(os, name)}
        patches |= {name: self._changing(getattr(os, name)) for name in _CHANGE if hasattr(os, name)}
        patches |= {name: self._removing(getattr(os, name)) for name in _REMOVE}
        patches |= {name: self._listing(getattr(os, name)) for name in ("listdir", "scandir")}
        patches |= {"mkdir": self._making(os.mkdir), "open": self._opening_descriptor(os.open)}
        patches |= {
            "chdir": self._going,
            "getcwd": self._folder_now,
            "getcwdb": lambda: os.fsencode(self._folder_now()),
        }
        patches |= {name: self._moving(getattr(os, name)) for name in ("rename", "replace")}
        opened = self._opening(builtins.open)
        with ExitStack() as stack:
            for owner, new in (
                (builtins, {"open": opened}),
                (io, {"open": opened}),
                (shutil, {"rmtree": self._removing_tree}),
                (sqlite3, {"connect": self._changing(sqlite3.connect)}),
                (tempfile, {"tempdir": temporary}),
                (os, patches),
            ):
                stack.enter_context(_torch.patched(owner, **new))
            yield

    def path_of(self, path: Any) -> Any:
        """Return where a path's file is for the script."""
        real = self._absolute(path)
        if real is None:
            return path
        shadow = self._shadow(real)
        if _is_there(shadow) or _is_file(os.path.dirname(shadow)) or self._is_gone(real):
            return shadow
        return real if self._is_own(working_folder()) else path

    def written(self, path: Any, *, copy: bool, silent: bool = False) -> Any:
        """Return where a file is to be written; with what it holds until now, if ``copy``."""
        real = self._absolute(path)
        if real is None:
            return path
        shadow = self._shadow(real)
        if _is_folder(os.fspath(self.path_of(real))):
            return self.path_of(real)  # whatever writes it says that it is none
        if not _is_there(shadow):
            self._parents(real, shadow)
            if not silent:
                self._note(real)
            if _is_pipe(real) and not self._is_gone(real):
                os.mkfifo(shadow)
            elif copy and not self._is_gone(real) and _is_file(real):
                with _open(real, "rb") as source, _open(shadow, "wb") as target:
                    shutil.copyfileobj(source, target)
        return shadow

    def _absolute(self, path: Any) -> str | None:
        """Return the absolute path of a file that is not the folder's own; None of descriptors and devices."""
        if isinstance(path, int) or path is None:
            return None
        text = os.fsdecode(path)
        if text == ":memory:" or text.startswith("file:"):
            return None
        real = os.path.abspath(text)
        return None if self._is_own(real) or real.startswith(_DEVICES) else real

    def _is_own(self, path: str) -> bool:
        return path == self._folder or path.startswith(self._folder + os.sep)

    def _shadow(self, real: str) -> str:
        return self._folder + os.sep + "root" + real

    def _is_gone(self, real: str) -> bool:
        """Return whether the script has removed a file, or a folder above it; what it made there since is in ours."""
        return any(real == removed or real.startswith(removed + os.sep) for removed in self._removed)

    def _read_from(self, path: Any) -> Any:
        """Return what to open for reading; of a pipe, a new one: what is read of another is lost to its readers."""
        at = self.path_of(path)
        real = self._absolute(path)
        return self.written(path, copy=False, silent=True) if real is not None and _is_pipe(at) else at

    def _parents(self, real: str, shadow: str) -> None:
        """Make the folders above a file here, if they are there for the script."""
        parent = os.path.dirname(real)
        at = os.fspath(self.path_of(parent))
        if not _is_folder(at):
            raise _error(errno.ENOTDIR if _is_there(at) else errno.ENOENT, real)
        os.makedirs(os.path.dirname(shadow), exist_ok=True)

    def _opening(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return plain(self._read_from(file), mode, *args, **kwargs)
            if "x" in mode and self._stands(file):
                raise _error(errno.EEXIST, file)
            if "r" in mode and not self._stands(file):
                return plain(self.path_of(file), mode, *args, **kwargs)
            return plain(self.written(file, copy="w" not in mode), mode.replace("x", "w"), *args, **kwargs)

        return opened

    def _opening_descriptor(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is not None or not flags & _WRITES:
                return plain(path if dir_fd is not None else self._read_from(path), flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT and flags & os.O_EXCL and self._stands(path):
                raise _error(errno.EEXIST, path)
            if flags & os.O_TRUNC and self._stands(path):  # not copied before it is emptied
                flags |= os.O_CREAT
            return plain(self.written(path, copy=not flags & os.O_TRUNC), flags & ~os.O_EXCL, mode)

        return opened

    def _stands(self, path: Any) -> bool:
        return _is_there(self.path_of(path))

    def _reading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            at = path if kwargs.get("dir_fd") is not None else self.path_of(path)
            return plain(at, *args, **kwargs)

        return read

    def _listing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `os.listdir`, or `os.scandir`, of what stands in a folder for the script."""

        def listed(path: Any = ".") -> Any:
            real = self._absolute(path)
            if real is None:
                return plain(path)
            if not (_is_folder(self._shadow(real)) and _is_folder(os.fspath(self.path_of(real)))):
                here = self._left(plain(self.path_of(path)), real)
                return here if plain is _listdir else _Entries(here)
            here = list(plain(self._shadow(real)))
            names = {str(getattr(entry, "name", entry)) for entry in here}
            below = list(plain(real)) if _is_folder(real) and not self._is_gone(real) else []
            here += [entry for entry in self._left(below, real) if str(getattr(entry, "name", entry)) not in names]
            return here if plain is _listdir else _Entries(here)

        return listed

    def _left(self, entries: Iterable[Any], real: str) -> list[Any]:
        """Return the entries of a folder that the script has not removed."""
        gone = {os.path.basename(path) for path in self._removed if os.path.dirname(path) == real}
        return [path for path in entries if str(getattr(path, "name", path)) not in gone]

    def _going(self, path: Any) -> None:
        real = self._absolute(path)
        _chdir(path if real is None else real if _is_folder(real) and not self._is_gone(real) else self.path_of(path))

    def _folder_now(self) -> str:
        """Return the working folder as the script sees it: it may have made that folder itself."""
        folder, root = working_folder(), self._shadow("")
        return folder[len(root) :] if folder.startswith(root + os.sep) else folder

    def _changing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self.written(path, copy=True), *args, **kwargs)

        return changed

    def _making(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def make_folder(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            real = None if dir_fd is not None else self._absolute(path)
            if real is None:
                return plain(path, mode, dir_fd=dir_fd)
            if self._stands(path):
                raise _error(errno.EEXIST, path)
            self._parents(real, self._shadow(real))
            self._note(real + os.sep)
            return plain(self._shadow(real), mode)

        return make_folder

    def _removing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def removed(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            real = None if dir_fd is not None else self._absolute(path)
            if real is None:
                return plain(path, *args, dir_fd=dir_fd)
            if not self._stands(path):
                return plain(self.path_of(path), *args)
            self._check_removal(real, folder=plain is _rmdir)
            if _is_there(self._shadow(real)):
                plain(self._shadow(real))
            if _is_there(real) and not self._is_gone(real):
                self._note(real, removed=True)
                self._removed.add(real)

        return removed

    def _check_removal(self, real: str, *, folder: bool) -> None:
        """Raise what the system raises where it does not remove a file, or an empty folder."""
        at = os.fspath(self.path_of(real))
        if _is_folder(at) != folder:
            raise _error(errno.ENOTDIR if folder else errno.EISDIR, real)
        if folder and os.listdir(real):
            raise _error(errno.ENOTEMPTY, real)

    def _removing_tree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        real = self._absolute(path)
        if real is None or not _is_folder(os.fspath(self.path_of(real))):
            return _rmtree(self.path_of(path), *args, **kwargs)
        _rmtree(self._shadow(real), ignore_errors=True)
        if _is_there(real) and not self._is_gone(real):
            self._note(real, removed=True)
            self._removed.add(real)

    def _moving(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def moved(source: Any, target: Any, **kwargs: Any) -> None:
            real = self._absolute(source)
            if real is None and self._absolute(target) is None:
                return plain(source, target, **kwargs)
            if not self._stands(source):
                return plain(self.path_of(source), target, **kwargs)
            if _is_folder(os.fspath(self.path_of(source))) and real is not None:
                self._copied_folder(real)
            if real is not None and real == self._absolute(target):
                return
            plain(self.written(source, copy=True), self.written(target, copy=False))
            if real is not None and _is_there(real):
                self._removed.add(real)

        return moved

    def _copied_folder(self, real: str) -> None:
        """Have all that is in a folder here, so that it can be moved."""
        for name in os.listdir(real):
            path = os.path.join(real, name)
            if _is_folder(os.fspath(self.path_of(path))):
                self._copied_folder(path)
            else:
                self.written(path, copy=True, silent=True)
        os.makedirs(self._shadow(real), exist_ok=True)


class _Entries:
    """Entries of a folder, as `os.scandir` gives them."""

    def __init__(self, entries: list[Any]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._left

    def __next__(self) -> Any:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more entries."""
        self._left = iter(())


# of the real file system, whatever stands over it
_open, _listdir, _rmtree, _lstat, _stat = builtins.open, os.listdir, shutil.rmtree, os.lstat, os.stat
_rmdir, _chdir = os.rmdir, os.chdir


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), path)


def _is_there(path: str) -> bool:
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_pipe(path: Any) -> bool:
    try:
        return stat.S_ISFIFO(_stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(_stat(path).st_mode)
    except (OSError, ValueError):
        return False
