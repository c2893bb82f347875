"""Effects of a script outside of its process (files, connections, programs), each with the line that caused it.

Python raises an audit event before most of these (https://docs.python.org/3/library/audit_events.html). Events are only
listened to; the sandbox is what holds effects back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

from memplan.integrations.scripts.lines import script_line
from memplan.integrations.scripts.sandbox.messages import Change
from memplan.integrations.scripts.working_folder import working_folder
from memplan.trace.program_facts import Held, HeldKind

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGED_PATH = {
    "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.chmod": 0, "os.chown": 0, "os.utime": 0,
    "os.setxattr": 0, "os.removexattr": 0, "sqlite3.connect": 0, "os.link": 1, "os.symlink": 1,
}  # fmt: skip
"""Audit events of a change -> the argument that is the path."""
_LONGEST = 200


class Effects:
    """The effects of a run of a script. ``script`` is the folder of the script's own code."""

    def __init__(self, script: str) -> None:
        """``script``: folder of the script's code."""
        self._script = script
        self._rows: dict[tuple[HeldKind, str, str | None], int] = {}
        """(kind, what, ``file:line``) of checkpoints, connections and programs -> how often."""
        self._lines: dict[str, str | None] = {}
        """Path of a file that was changed -> the first line that did so."""

    def note(self, kind: HeldKind, what: str) -> None:
        """Count an effect of the script's line that runs now. ``what`` is a path, an address or a command."""
        key = kind, what, script_line(self._script)
        self._rows[key] = self._rows.get(key, 0) + 1

    def note_change(self, path: Any) -> None:
        """Note that the script's line that runs now changes a file; a ``path`` that is a descriptor is ignored."""
        if isinstance(path, (str, bytes, os.PathLike)):
            text = _absolute(os.fsdecode(path))
            if text not in self._lines:
                self._lines[text] = script_line(self._script)

    def rows(
        self, changes: Iterable[Change], *, ignored_folders: tuple[str, ...] = (), writes: bool = False
    ) -> tuple[Held, ...]:
        """Return the prevented effects: checkpoints, connections, programs, and changes of files. Changes below the
        ignored folders are not the script's. With ``writes`` the script may write, connect and start programs: then
        only checkpoints and removals are prevented."""
        kinds = ("checkpoint", "removed") if writes else get_args(HeldKind)
        rows = [Held(kind, what, where, count) for (kind, what, where), count in self._rows.items() if kind in kinds]
        checkpoints = {row.what for row in rows if row.kind == "checkpoint"}
        for change in changes:
            path = _absolute(change.path)
            is_ignored = any(path == folder or path.startswith(folder + os.sep) for folder in ignored_folders)
            if path in checkpoints or change.kind not in kinds or is_ignored:
                continue
            rows.append(Held(change.kind, change.path, self._lines.get(path)))
        return tuple(rows)

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Within this context, note the effects that audit events announce."""
        global _hook_installed
        if not _hook_installed:  # for good: Python removes no audit hook
            _hook_installed = True
            sys.addaudithook(_audit)
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the effect that one of Python's audit events announces, by the arguments of that event."""
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & _WRITES:
                self.note_change(arguments[0])
        elif event in _CHANGED_PATH:
            self.note_change(arguments[_CHANGED_PATH[event]])
        elif event == "os.rename":
            self.note_change(arguments[0])
            self.note_change(arguments[1])
        else:
            _HANDLERS[event](self, arguments)


def _absolute(path: str) -> str:
    """Return an absolute, normalized path; relative if the working folder's own path exceeds the system's limit."""
    try:
        return os.path.normpath(path if os.path.isabs(path) else os.path.join(working_folder(), path))
    except OSError:
        return os.path.normpath(path)


def _note_connection(effects: Effects, arguments: tuple[Any, ...]) -> None:
    """Note the address (host, port) or the path of a socket that is connected or sent to."""
    address = arguments[1]
    if isinstance(address, tuple) and len(address) > 1:
        effects.note("network", f"{address[0]}:{address[1]}")
    elif isinstance(address, (str, bytes)):
        effects.note("network", os.fsdecode(address))


def _note_lookup(effects: Effects, arguments: tuple[Any, ...]) -> None:
    """Note the host whose address is looked up."""
    if arguments[0]:
        effects.note("network", os.fsdecode(arguments[0]))


def _note_process(effects: Effects, words: Any) -> None:
    """Note the command line of a program that is started: a string, or a list of words."""
    listed = [words] if isinstance(words, (str, bytes, os.PathLike)) else list(words)
    effects.note("process", " ".join(map(os.fsdecode, listed))[:_LONGEST])


_HANDLERS: dict[str, Callable[[Effects, tuple[Any, ...]], None]] = {
    "socket.connect": _note_connection,
    "socket.sendto": _note_connection,
    "socket.sendmsg": _note_connection,
    "socket.getaddrinfo": _note_lookup,
    "socket.gethostbyname": _note_lookup,
    "subprocess.Popen": lambda effects, arguments: _note_process(effects, arguments[1]),
    "os.posix_spawn": lambda effects, arguments: _note_process(effects, arguments[1]),
    "os.exec": lambda effects, arguments: _note_process(effects, arguments[1]),
    "os.system": lambda effects, arguments: _note_process(effects, arguments[0]),
}
_EVENTS = frozenset({"open", "os.rename", *_CHANGED_PATH, *_HANDLERS})
_active: list[Effects] = []
_hook_installed = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook of Python: pass an event to all effects that listen."""
    if _active and event in _EVENTS:
        for effects in tuple(_active):
            effects.note_event(event, arguments)
