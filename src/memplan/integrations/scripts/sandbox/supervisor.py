"""The process that starts a script's process, follows it, and ends everything that it has started.

It is given a `Job`. It imports nothing but the standard library, has one thread, and ends, with all below it, when the
process that started it does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from memplan.integrations.scripts.sandbox import call_filter, kernel, namespaces
from memplan.integrations.scripts.sandbox.messages import NEXT, SCRATCH, TRACEBACK, Job, Outcome, Protection, Setting
from memplan.integrations.scripts.sandbox.overlay import Tree, remove_tree
from memplan.integrations.scripts.sandbox.room import Room

_LAST_WORDS = 2.0
"""Seconds that it has for that."""
_LOOKS = 0.25
"""Seconds between looks at how much it has written, and that it has for its last words if that was too much."""
_UNWRITTEN = 100
"""Files that are listed at most of those that could not be committed."""
_GRACE = 60.0
"""Seconds after its time at which a script's namespaces are ended, whatever goes on in them."""


class _Stopped(BaseException):
    """The process that started this one wants it to end, or is no more."""


def main(text: str) -> None:
    """Do a job, and write its outcome."""
    given = json.loads(text)
    job = Job(**{**given, "command": tuple(given["command"]), "protections": tuple(given["protections"])})
    kernel.die_with_parent(signal.SIGTERM)
    kernel.adopt_orphans()
    os.set_inheritable(job.report, False)
    signal.signal(signal.SIGTERM, _stop)
    if os.getppid() != job.parent:
        return
    scratch = ""
    try:
        scratch = tempfile.mkdtemp(prefix="memplan-run-")
        os.mkdir(os.path.join(scratch, "tmp"))
        outcome = _done(job, scratch)
    except OSError as error:
        outcome = Outcome(None, reasons=((SCRATCH, str(error)),))
    except _Stopped:
        return
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all()
        if scratch:
            remove_tree(scratch)
    with suppress(BrokenPipeError):
        os.write(job.report, json.dumps(asdict(outcome)).encode())


def _stop(*_: object) -> NoReturn:
    raise _Stopped


def _done(job: Job, scratch: str) -> Outcome:
    """Run the script under the first protection that can be had."""
    reasons = list[tuple[str, str]]()
    for protection in job.protections:
        place = os.path.join(scratch, protection)
        os.mkdir(place)
        try:
            return _STARTS[protection](job, place, os.path.join(scratch, "tmp"))
        except OSError as error:
            reasons.append((protection, str(error)))
    return Outcome(None, reasons=tuple(reasons))


def _in_namespaces(job: Job, place: str, temporary: str) -> Outcome:
    ours, theirs = (end.detach() for end in socket.socketpair())
    failed, failures = os.pipe()
    ended, ends = os.pipe()
    setting = Setting("namespaces", temporary, job.answer, theirs)

    def program() -> NoReturn:
        _execute(job, setting, keeps=(theirs,))

    def follow(process: int, tree: Tree) -> None:
        os.close(theirs)
        end = _follow(process, job.seconds, Room(f"{place}/layers"), ours, lambda: _changes(tree, commit=job.commit))
        if job.commit and not end.over and end.room is None:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # what it has left running
            tree.commit()
        unwritten = list(tree.unwritten.items())
        end = replace(end, unwritten=tuple(unwritten[:_UNWRITTEN]), unwritten_more=max(len(unwritten) - _UNWRITTEN, 0))
        os.write(ends, json.dumps(asdict(end)).encode())

    first = namespaces.start(namespaces.Inside(place, job.own_network, program, follow), failures)
    for descriptor in (ours, theirs, failures, ends):
        os.close(descriptor)
    reason = _read_all(failed)
    if reason:
        os.waitpid(first, 0)
        raise OSError(reason.decode(errors="replace"))
    in_time = bool(select.select([ended], [], [], job.seconds + _GRACE)[0])
    if not in_time:  # a script that keeps the process from answering that follows it
        os.kill(first, signal.SIGKILL)
    result = _read_all(ended)
    os.waitpid(first, 0)
    return Outcome(**json.loads(result)) if result else Outcome("namespaces", signal.SIGKILL, not in_time)


def _changes(tree: Tree, *, commit: bool) -> bytes:
    os.kill(-1, signal.SIGSTOP)  # all others of the namespace: nothing changes while it is looked at
    try:
        found = asdict(tree.changes(commits=commit))
        tree.renew(keep=commit)
    finally:
        os.kill(-1, signal.SIGCONT)
    return json.dumps(found).encode() + b"\n"


def _with_landlock(job: Job, place: str, temporary: str) -> Outcome:
    if not kernel.landlock_version():
        raise OSError("this kernel has no Landlock, or it is switched off")
    if not call_filter.available():
        raise OSError("system calls of this processor are not known")
    return _alone(job, Setting("landlock", temporary, job.answer), Room(temporary))


def _alone(job: Job, setting: Setting, room: Room | None = None) -> Outcome:
    """Run the script's process below this one, without namespaces."""
    process = os.fork()
    if not process:
        try:
            kernel.die_with_parent(signal.SIGKILL)
            _execute(job, setting)
        finally:
            os._exit(127)
    return replace(_follow(process, job.seconds, room), protection=setting.protection)


_STARTS: dict[Protection, Callable[[Job, str, str], Outcome]] = {
    "namespaces": _in_namespaces,
    "landlock": _with_landlock,
    "none": lambda job, place, temporary: _alone(job, Setting("none", temporary, job.answer)),
}


def _execute(job: Job, setting: Setting, keeps: tuple[int, ...] = ()) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in keeps:
        os.set_inheritable(descriptor, True)
    os.environ["TMPDIR"] = setting.temporary
    command = [*job.command, json.dumps(asdict(setting))]
    os.execv(command[0], command)


def _follow(
    process: int,
    seconds: float,
    room: Room | None,
    control: int | None = None,
    answer: Callable[[], bytes] = lambda: b"",
) -> Outcome:
    """Wait for a process, reap what else ends here, and answer requests.

    Args:
        process: the one to wait for.
        seconds: after which it is ended.
        room: for what it writes; it is ended when that is used up.
        control: socket on which it sends requests.
        answer: to a request.

    Returns:
        How it ended, in namespaces.
    """
    wakes, woken = os.pipe()
    for descriptor in (wakes, woken, *([] if control is None else [control])):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    deadline, over, full = time.monotonic() + seconds, False, False
    requests = None if control is None else _Requests(control, answer)
    while (status := _reaped(process)) is None:
        reads, writes = [wakes], list[int]()
        if requests is not None:
            (writes if requests.unsent else reads).append(requests.control)
        wait = max(deadline - time.monotonic(), 0)
        ready, writable, _ = select.select(reads, writes, [], wait if room is None else min(wait, _LOOKS))
        if wakes in ready:
            os.read(wakes, 4096)
        if requests is not None and requests.control in ready + writable and not requests.serve():
            os.close(requests.control)
            requests = None
        if room is not None and not over and room.is_used_up():
            full, deadline = True, 0.0
        if time.monotonic() >= deadline:
            if over or TRACEBACK is None:
                os.kill(process, signal.SIGKILL)
                deadline += 60
            else:
                os.kill(process, TRACEBACK)
                deadline = time.monotonic() + (_LOOKS if full else _LAST_WORDS)
            over = True
    return Outcome("namespaces", status, over and not full, room=room.most if full and room is not None else None)


@dataclass
class _Requests:
    """The requests of a script's process. It may leave an answer unread, so that none is waited for.

    Args:
        control: a socket that does not block.
        answer: to a request.
    """

    control: int
    answer: Callable[[], bytes]
    unsent: bytes = b""

    def serve(self) -> bool:
        """Read a request, or write what the socket takes. Return whether the other side goes on."""
        try:
            if not self.unsent and os.read(self.control, 1) != NEXT:
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.unsent = self.unsent or self.answer()
        try:
            self.unsent = self.unsent[os.write(self.control, self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def _reaped(process: int) -> int | None:
    """Reap all processes that have ended; return the status of one, None while it runs."""
    while True:
        try:
            number, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return signal.SIGKILL
        if number == process:
            return status
        if not number:
            return None


def _end_all() -> None:
    """End every process below this one, also those that were started meanwhile."""
    while True:
        for number in _children():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Return the numbers of this process's children: orphans below it become these as their parents end."""
    own, found = os.getpid(), list[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == own:
                found.append(int(name))
    return found


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()
