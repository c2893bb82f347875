"""The process that starts a script's process, follows it, and ends everything that it has started.

Its argument is a `Job` as JSON. It imports nothing but the standard library, has one thread, and ends, with all below
it, when the process that started it does.
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

_TRACEBACK_SECONDS = 2.0
"""Seconds that a script has to write its traceback before it is killed."""
_CHECK_SECONDS = 0.25
"""Seconds between looks at how much a script has written, and that it has for its traceback if that was too much."""
_UNWRITTEN = 100
"""Files that are listed at most of those that could not be committed."""
_GRACE_SECONDS = 60.0
"""Seconds after its time at which a script's namespaces are ended, whatever goes on in them."""


class _Stopped(BaseException):
    """The parent process has ended, or wants the supervisor to end."""


def main(text: str) -> None:
    """Run the script of a job (JSON of a `Job`), end all its processes, and write the `Outcome` to the job's pipe."""
    fields = json.loads(text)
    job = Job(**{**fields, "command": tuple(fields["command"]), "protections": tuple(fields["protections"])})
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
        outcome = _run_job(job, scratch)
    except OSError as error:
        outcome = Outcome(protection=None, reasons=((SCRATCH, str(error)),))
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
    """Handler of SIGTERM: raise `_Stopped` in the supervisor."""
    raise _Stopped


def _run_job(job: Job, scratch: str) -> Outcome:
    """Run the script under the first protection that is available; if none is, return why not. Folders are created in
    ``scratch``."""
    reasons = list[tuple[str, str]]()
    for protection in job.protections:
        folder = os.path.join(scratch, protection)
        os.mkdir(folder)
        try:
            return _STARTS[protection](job, folder, os.path.join(scratch, "tmp"))
        except OSError as error:
            reasons.append((protection, str(error)))
    return Outcome(protection=None, reasons=tuple(reasons))


def _run_in_namespaces(job: Job, folder: str, temporary: str) -> Outcome:
    """Run the script in namespaces with overlays; raise OSError if these cannot be set up.

    Forked processes inherit all descriptors, and a pipe can be read to its end only when every copy of its writing end
    is closed. The supervisor closes its copies after the start. The processes in the namespaces close ``failures`` when
    they have started the next, and ``outcome_end`` as they end. The script's process is the last: when it executes the
    script, it loses all but ``script_socket``.
    """
    own_socket, script_socket = (end.detach() for end in socket.socketpair())
    failure_pipe, failures = os.pipe()
    outcome_pipe, outcome_end = os.pipe()
    setting = Setting("namespaces", temporary, job.answer, script_socket)

    def program() -> NoReturn:
        _execute(job, setting, inherited=(script_socket,))

    def follow(process: int, tree: Tree) -> None:
        """Within the namespaces: wait for the script, commit its files, and send the outcome."""
        os.close(script_socket)
        room = Room(f"{folder}/layers")
        end = _follow(process, job.seconds, room, own_socket, lambda: _changes_of_run(tree, commit=job.commit))
        is_within_limits = not end.over and end.room is None
        if job.commit and is_within_limits:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # processes that the script left running
            tree.commit()
        unwritten = list(tree.unwritten.items())
        end = replace(end, unwritten=tuple(unwritten[:_UNWRITTEN]), unwritten_more=max(len(unwritten) - _UNWRITTEN, 0))
        os.write(outcome_end, json.dumps(asdict(end)).encode())

    first = namespaces.start(namespaces.SandboxedProgram(folder, job.own_network, program, follow), failures)
    for descriptor in (own_socket, script_socket, failures, outcome_end):
        os.close(descriptor)
    reason = _read_all(failure_pipe)  # ends as the script starts; empty if nothing failed
    if reason:
        os.waitpid(first, 0)
        raise OSError(reason.decode(errors="replace"))
    is_answered = bool(select.select([outcome_pipe], [], [], job.seconds + _GRACE_SECONDS)[0])
    if not is_answered:  # the script keeps its supervising process from answering
        os.kill(first, signal.SIGKILL)
    result = _read_all(outcome_pipe)
    os.waitpid(first, 0)
    return Outcome(**json.loads(result)) if result else Outcome("namespaces", signal.SIGKILL, not is_answered)


def _changes_of_run(tree: Tree, *, commit: bool) -> bytes:
    """Return the changes of the run that has ended, as a line of JSON, and mount new overlays for the next run."""
    os.kill(-1, signal.SIGSTOP)  # all other processes of the namespace, so that nothing changes meanwhile
    try:
        changes = asdict(tree.changes(commits=commit))
        tree.renew(keep=commit)
    finally:
        os.kill(-1, signal.SIGCONT)
    return json.dumps(changes).encode() + b"\n"


def _run_with_landlock(job: Job, folder: str, temporary: str) -> Outcome:
    """Run the script under Landlock and a filter of system calls; raise OSError if these are not available."""
    if not kernel.landlock_version():
        raise OSError("this kernel has no Landlock, or it is switched off")
    if not call_filter.available():
        raise OSError("system calls of this processor are not known")
    return _run_unnamespaced(job, Setting("landlock", temporary, job.answer), Room(temporary))


def _run_unnamespaced(job: Job, setting: Setting, room: Room | None = None) -> Outcome:
    """Run the script's process below this one, without namespaces. ``room`` limits what it writes."""
    process = os.fork()
    if not process:
        try:
            kernel.die_with_parent(signal.SIGKILL)
            _execute(job, setting)
        finally:
            os._exit(127)
    return replace(_follow(process, job.seconds, room), protection=setting.protection)


_STARTS: dict[Protection, Callable[[Job, str, str], Outcome]] = {
    "namespaces": _run_in_namespaces,
    "landlock": _run_with_landlock,
    "none": lambda job, folder, temporary: _run_unnamespaced(job, Setting("none", temporary, job.answer)),
}


def _execute(job: Job, setting: Setting, inherited: tuple[int, ...] = ()) -> NoReturn:
    """Become the script's process, in a session of its own; ``inherited`` descriptors stay open in it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in inherited:
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
    """Wait for the script's process, reap all others, answer its requests, and end it at a limit of time or disk. After
    ``seconds`` it gets a signal to write its traceback, and is killed a little later; ``room`` limits what it writes.
    ``control`` is the socket on which it sends requests, ``answer`` returns the answer to one.

    Returns:
        Its outcome, with the protection "namespaces".
    """
    wakeup, wakeup_end = os.pipe()
    for descriptor in (wakeup, wakeup_end, *([] if control is None else [control])):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    deadline = time.monotonic() + seconds
    over = full = False  # whether a limit, and that of the disk, is reached
    requests = None if control is None else _Requests(control, answer)
    while (status := _reap(process)) is None:
        reads, writes = [wakeup], list[int]()
        if requests is not None and requests.unsent:
            writes.append(requests.control)
        elif requests is not None:
            reads.append(requests.control)
        wait = max(deadline - time.monotonic(), 0)
        readable, writable, _ = select.select(reads, writes, [], wait if room is None else min(wait, _CHECK_SECONDS))
        if wakeup in readable:
            os.read(wakeup, 4096)
        if requests is not None and requests.control in readable + writable and not requests.serve():
            os.close(requests.control)
            requests = None
        if room is not None and not over and room.is_used_up():
            full, deadline = True, 0.0
        if time.monotonic() >= deadline:
            if over or TRACEBACK is None:
                os.kill(process, signal.SIGKILL)
                deadline += 60  # until it is gone
            else:
                os.kill(process, TRACEBACK)
                deadline = time.monotonic() + (_CHECK_SECONDS if full else _TRACEBACK_SECONDS)
            over = True
    return Outcome("namespaces", status, over and not full, room=room.most if full and room is not None else None)


@dataclass
class _Requests:
    """Answers the requests of a script's process without blocking, as the script may leave an answer unread.
    ``control`` is a non-blocking socket."""

    control: int
    answer: Callable[[], bytes]
    unsent: bytes = b""

    def serve(self) -> bool:
        """Read a request, or write as much of an answer as the socket takes. Return whether the other end is open."""
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


def _reap(process: int) -> int | None:
    """Reap all processes that have ended, up to this one; return its status, None while it runs."""
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
    """Kill every descendant of this process, also those that are started meanwhile."""
    while True:
        for number in _child_numbers():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _child_numbers() -> list[int]:
    """Return the numbers of this process's children; orphaned descendants become children as well."""
    this_process, numbers = os.getpid(), list[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == this_process:  # the field ppid (man 5 proc_pid_stat)
                numbers.append(int(name))
    return numbers


def _read_all(descriptor: int) -> bytes:
    """Read a pipe to its end, and close it."""
    with open(descriptor, "rb") as file:
        return file.read()
