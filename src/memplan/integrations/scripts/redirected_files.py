"""Redirect Python's writes in this process to a shadow folder, from which it also reads them back.

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
    """A shadow of the file system: a folder with the files that a script writes, each below its own absolute path.
    ``folder`` is empty. ``note`` is called with the path of each file that is written for the first time, removed or
    renamed."""

    def __init__(self, folder: str, note: Note) -> None:
        self._folder = os.path.realpath(folder)
        """Folder of the shadows: files that the script writes, each below its absolute path."""
        self._note = note
        """Called with the path of each file that is written for the first time, removed or renamed."""
        self._removed: set[str] = set()
        """Real paths of files and folders that the script has removed."""

    @contextmanager
    def redirecting(self) -> Iterator[None]:
        """Within this context Python's functions see the shadow above the real files and write to it alone."""
        temporary = os.path.join(self._folder, "tmp")
        os.makedirs(temporary, exist_ok=True)
        patches = {name: self._reader(getattr(os, name)) for name in _READ if hasattr(os, name)}
        patches |= {name: self._changer(getattr(os, name)) for name in _CHANGE if hasattr(os, name)}
        patches |= {name: self._remover(getattr(os, name)) for name in _REMOVE}
        patches |= {name: self._lister(getattr(os, name)) for name in ("listdir", "scandir")}
        patches |= {"mkdir": self._mkdir(os.mkdir), "open": self._descriptor_opener(os.open)}
        patches |= {
            "chdir": self._change_folder,
            "getcwd": self._current_folder,
            "getcwdb": lambda: os.fsencode(self._current_folder()),
        }
        patches |= {name: self._mover(getattr(os, name)) for name in ("rename", "replace")}
        opened = self._opener(builtins.open)
        with ExitStack() as stack:
            for owner, new in (
                (builtins, {"open": opened}),
                (io, {"open": opened}),
                (shutil, {"rmtree": self._remove_tree}),
                (sqlite3, {"connect": self._changer(sqlite3.connect)}),
                (tempfile, {"tempdir": temporary}),
                (os, patches),
            ):
                stack.enter_context(_torch.patched(owner, **new))
            yield

    def path_to_read(self, path: Any) -> Any:
        """Return the path at which the script sees a file: its shadow if it wrote or removed it, else itself."""
        real = self._absolute(path)
        if real is None:
            return path
        shadow = self._shadow(real)
        if _exists_at(shadow) or _is_file(os.path.dirname(shadow)) or self._is_removed(real):
            return shadow
        return real if self._is_own(working_folder()) else path

    def path_to_write(self, path: Any, *, copy: bool, silent: bool = False) -> Any:
        """Return the path of the shadow to write a file to, and create its folders. With ``copy``, a new shadow has the
        content of the real file. Its path is noted unless ``silent``."""
        real = self._absolute(path)
        if real is None:
            return path
        shadow = self._shadow(real)
        if _is_folder(os.fspath(self.path_to_read(real))):
            return self.path_to_read(real)  # the caller's open() raises that it is a folder
        if not _exists_at(shadow):
            self._make_parents(real, shadow)
            if not silent:
                self._note(real)
            if _is_pipe(real) and not self._is_removed(real):
                os.mkfifo(shadow)
            elif copy and not self._is_removed(real) and _is_file(real):
                with _open(real, "rb") as source, _open(shadow, "wb") as target:
                    shutil.copyfileobj(source, target)
        return shadow

    def _absolute(self, path: Any) -> str | None:
        """Return the absolute path of a file; None if it is not redirected: descriptors, devices, shadows."""
        if isinstance(path, int) or path is None:
            return None
        text = os.fsdecode(path)
        if text == ":memory:" or text.startswith("file:"):
            return None
        real = os.path.abspath(text)
        return None if self._is_own(real) or real.startswith(_DEVICES) else real

    def _is_own(self, path: str) -> bool:
        """Return whether an absolute path lies in the folder of the shadows."""
        return path == self._folder or path.startswith(self._folder + os.sep)

    def _shadow(self, real: str) -> str:
        """Return the path of the shadow of an absolute path, whether it exists or not."""
        return self._folder + os.sep + "root" + real

    def _is_removed(self, real: str) -> bool:
        """Return whether the script has removed the real file or a folder above it; it may have a new shadow since."""
        return any(real == removed or real.startswith(removed + os.sep) for removed in self._removed)

    def _path_to_open(self, path: Any) -> Any:
        """Return the path to open for reading. For a named pipe it is a new, empty pipe among the shadows: reading the
        real pipe would take its data away from other processes."""
        path_now = self.path_to_read(path)
        real = self._absolute(path)
        if real is not None and _is_pipe(path_now):
            return self.path_to_write(path, copy=False, silent=True)
        return path_now

    def _make_parents(self, real: str, shadow: str) -> None:
        """Create the folders above the ``shadow`` of the path ``real``. Raises the OSError of the system if the script
        sees no such folder."""
        parent = os.path.dirname(real)
        path_now = os.fspath(self.path_to_read(parent))
        if not _is_folder(path_now):
            raise _error(errno.ENOTDIR if _exists_at(path_now) else errno.ENOENT, real)
        os.makedirs(os.path.dirname(shadow), exist_ok=True)

    def _opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `open`."""

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return original(self._path_to_open(file), mode, *args, **kwargs)
            if "x" in mode and self._exists(file):
                raise _error(errno.EEXIST, file)
            if "r" in mode and not self._exists(file):  # raises that there is no such file
                return original(self.path_to_read(file), mode, *args, **kwargs)
            return original(self.path_to_write(file, copy="w" not in mode), mode.replace("x", "w"), *args, **kwargs)

        return opened

    def _descriptor_opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `os.open`."""

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is not None or not flags & _WRITES:
                return original(path if dir_fd is not None else self._path_to_open(path), flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT and flags & os.O_EXCL and self._exists(path):
                raise _error(errno.EEXIST, path)
            if flags & os.O_TRUNC and self._exists(path):  # the shadow is new: its content is not copied
                flags |= os.O_CREAT
            return original(self.path_to_write(path, copy=not flags & os.O_TRUNC), flags & ~os.O_EXCL, mode)

        return opened

    def _exists(self, path: Any) -> bool:
        """Return whether the script sees a file at this path."""
        return _exists_at(self.path_to_read(path))

    def _reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for a function of `os` that reads, such as `os.stat`."""

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            path_now = path if kwargs.get("dir_fd") is not None else self.path_to_read(path)
            return original(path_now, *args, **kwargs)

        return read

    def _lister(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `os.listdir` or `os.scandir` that merges the real folder and its shadow."""

        def listed(path: Any = ".") -> Any:
            real = self._absolute(path)
            if real is None:
                return original(path)
            has_shadow = _is_folder(self._shadow(real)) and _is_folder(os.fspath(self.path_to_read(real)))
            if has_shadow:
                entries = list(original(self._shadow(real)))
                names = set(map(_entry_name, entries))
                if _is_folder(real) and not self._is_removed(real):
                    remaining = self._not_removed(original(real), real)
                    entries += [entry for entry in remaining if _entry_name(entry) not in names]
            else:
                entries = self._not_removed(original(self.path_to_read(path)), real)
            return entries if original is _listdir else _Entries(entries)

        return listed

    def _not_removed(self, entries: Iterable[Any], real: str) -> list[Any]:
        """Return the entries of the folder ``real`` that the script has not removed."""
        removed_names = {os.path.basename(path) for path in self._removed if os.path.dirname(path) == real}
        return [entry for entry in entries if _entry_name(entry) not in removed_names]

    def _change_folder(self, path: Any) -> None:
        """Replace `os.chdir`: enter the real folder, or its shadow if the script created it."""
        real = self._absolute(path)
        if real is not None:
            path = real if _is_folder(real) and not self._is_removed(real) else self.path_to_read(path)
        _chdir(path)

    def _current_folder(self) -> str:
        """Return the working folder as the script sees it: of a shadow, the path that it stands for."""
        folder, root = working_folder(), self._shadow("")
        return folder[len(root) :] if folder.startswith(root + os.sep) else folder

    def _changer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for a function that changes a file, such as `os.chmod`."""

        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self.path_to_write(path, copy=True), *args, **kwargs)

        return changed

    def _mkdir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `os.mkdir`."""

        def make_folder(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            real = None if dir_fd is not None else self._absolute(path)
            if real is None:
                return original(path, mode, dir_fd=dir_fd)
            if self._exists(path):
                raise _error(errno.EEXIST, path)
            self._make_parents(real, self._shadow(real))
            self._note(real + os.sep)
            return original(self._shadow(real), mode)

        return make_folder

    def _remover(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `os.remove` or `os.rmdir`: real files are only remembered as removed."""

        def removed(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            real = None if dir_fd is not None else self._absolute(path)
            if real is None:
                return original(path, *args, dir_fd=dir_fd)
            if not self._exists(path):
                return original(self.path_to_read(path), *args)
            self._check_removal(real, folder=original is _rmdir)
            if _exists_at(self._shadow(real)):
                original(self._shadow(real))
            if _exists_at(real) and not self._is_removed(real):
                self._note(real, removed=True)
                self._removed.add(real)

        return removed

    def _check_removal(self, real: str, *, folder: bool) -> None:
        """Raise the system's error if the path is no file; with ``folder``, if it is no empty folder."""
        path_now = os.fspath(self.path_to_read(real))
        if _is_folder(path_now) != folder:
            raise _error(errno.ENOTDIR if folder else errno.EISDIR, real)
        if folder and os.listdir(real):
            raise _error(errno.ENOTEMPTY, real)

    def _remove_tree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Replace `shutil.rmtree`: a real folder is only remembered as removed."""
        real = self._absolute(path)
        if real is None or not _is_folder(os.fspath(self.path_to_read(real))):
            return _rmtree(self.path_to_read(path), *args, **kwargs)
        _rmtree(self._shadow(real), ignore_errors=True)
        if _exists_at(real) and not self._is_removed(real):
            self._note(real, removed=True)
            self._removed.add(real)

    def _mover(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `os.rename` or `os.replace`: the source's shadow moves, and the real source then
        counts as removed."""

        def moved(source: Any, target: Any, **kwargs: Any) -> None:
            real = self._absolute(source)
            if real is None and self._absolute(target) is None:
                return original(source, target, **kwargs)
            if not self._exists(source):
                return original(self.path_to_read(source), target, **kwargs)
            if _is_folder(os.fspath(self.path_to_read(source))) and real is not None:
                self._copy_folder(real)  # a shadow holds only what the script has written
            if real is not None and real == self._absolute(target):
                return
            original(self.path_to_write(source, copy=True), self.path_to_write(target, copy=False))
            if real is not None and _exists_at(real):
                self._removed.add(real)

        return moved

    def _copy_folder(self, real: str) -> None:
        """Copy a folder with its files to its shadow, so that it can be moved there."""
        for name in os.listdir(real):
            path = os.path.join(real, name)
            if _is_folder(os.fspath(self.path_to_read(path))):
                self._copy_folder(path)
            else:
                self.path_to_write(path, copy=True, silent=True)
        os.makedirs(self._shadow(real), exist_ok=True)


class _Entries:
    """Iterator and context manager over a folder's entries, as `os.scandir` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._remaining = iter(entries)
        """Entries that are not yielded yet."""

    def __iter__(self) -> Iterator[Any]:
        return self._remaining

    def __next__(self) -> Any:
        return next(self._remaining)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more entries."""
        self._remaining = iter(())


# the originals, whatever replaces them in their modules
_open, _listdir, _rmtree, _lstat, _stat = builtins.open, os.listdir, shutil.rmtree, os.lstat, os.stat
_rmdir, _chdir = os.rmdir, os.chdir


def _error(number: int, path: Any) -> OSError:
    """Return the system's error with this number (`errno`) about a path."""
    return OSError(number, os.strerror(number), path)


def _entry_name(entry: Any) -> str:
    """Return the name of a folder's entry, as `os.listdir` or `os.scandir` returns it."""
    return str(getattr(entry, "name", entry))


def _exists_at(path: str) -> bool:
    """Return whether there is a file, a folder or a link at this path, without redirection."""
    try:
        _lstat(path)  # raises if there is none
    except (OSError, ValueError):
        return False
    return True


def _is_folder(path: str) -> bool:
    """Return whether there is a folder, or a link to one, at this path, without redirection."""
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_pipe(path: Any) -> bool:
    """Return whether there is a named pipe at this path, without redirection."""
    try:
        return stat.S_ISFIFO(_stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_file(path: str) -> bool:
    """Return whether there is a regular file at this path, without redirection."""
    try:
        return stat.S_ISREG(_stat(path).st_mode)
    except (OSError, ValueError):
        return False
