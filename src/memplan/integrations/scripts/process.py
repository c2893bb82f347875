"""A script's process, from the outside: started with a request, followed, and its answer read.

In a process of its own a script may do what it likes with handlers, threads, modules and its exit.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from memplan._bytes import format_bytes
from memplan._json import Unreadable
from memplan.errors import MemplanError, StepError, UsageError
from memplan.integrations.scripts.answer import MOST, read_answer
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.request import Ran, Request, ScriptEnded
from memplan.integrations.scripts.sandbox.messages import SCRATCH, Job, Outcome, Protection, Setting

_START = "from memplan.integrations.scripts.child import answer; import sys; answer(sys.argv[1])"
_SUPERVISOR = "from memplan.integrations.scripts.sandbox.supervisor import main; import sys; main(sys.argv[1])"
_LATER = 30
"""Seconds after its time at which a script is ended that has not met a hook."""
_LAST = 64 << 10
"""Bytes of what a script printed that are kept: the last ones."""


def run_script(request: Request, told: Callable[[str], None] = lambda _: None) -> Ran:
    """Run a script in a process of its own and return its steps.

    Args:
        request: what to run, and how.
        told: called with a line for each file that it was allowed to write, and that could not be written.

    Raises:
        InputError: there is no such script.
        UsageError: nothing here can hold back what it does, and that was not allowed.
        StepError: the script raised, or ended before its first step.
        MemplanError: whatever `memplan.record` and `memplan.measure` raise.
    """
    request.command.checked()
    ended = _run(request)
    outcome, said = ended.outcome, ended.err.text
    if outcome.protection is None:
        raise _unprotected(outcome, request)
    for path, reason in outcome.unwritten:
        told(f"{path} was not written: {reason}")
    if outcome.unwritten_more:
        told(f"{outcome.unwritten_more:,} more files were not written")
    if outcome.room is not None:
        raise _full(request.command, outcome.room, said)
    if not ended.answer:
        raise _ended(request.command, outcome, said)
    try:
        ran, contributed = read_answer(ended.answer, request)
    except ScriptEnded as error:
        error.said = "" if request.shows else ended.out.text + said
        raise
    except Unreadable as error:
        raise StepError(
            f"the process of {request.command.name} gave no answer that can be read: {error}",
            expected="a script that leaves memplan's own part of its process alone",
            do="Run it under python; with --show-output, what it prints is seen",
        ) from None
    if request.contribute is not None and contributed is not None:
        Path(request.contribute).write_text(contributed, encoding="utf-8")
    lines = 0 if request.shows else ended.out.lines + ended.err.lines
    facts = replace(ran.facts, lines=lines, protection=outcome.protection, unwritten=outcome.unwritten)
    return replace(ran, facts=facts)


@dataclasses.dataclass(frozen=True)
class _Ended:
    """A script's process that has ended."""

    outcome: Outcome
    answer: bytes
    out: _Tail
    err: _Tail


def _run(request: Request) -> _Ended:
    """Run a script's process to its end."""
    return _supervised(request) if sys.platform == "linux" else _alone(request)


def _supervised(request: Request) -> _Ended:
    """Run it below a supervisor, which ends with this process, however this one ends."""
    with _pipe() as (answered, answer), _pipe() as (told, report):
        job = Job(
            tuple(_command()), _protections(request), not request.writes, request.writes and not request.really,
            request.limit + _LATER, report.fileno(), f"/dev/fd/{answer.fileno()}", os.getpid(),
        )  # fmt: skip
        start = f"import sys; sys.path.insert(0, {_home()!r}); {_SUPERVISOR}"
        process = _popen(
            [sys.executable, "-I", "-c", start, json.dumps(dataclasses.asdict(job))], request,
            pass_fds=(answer.fileno(), report.fileno()), start_new_session=True,
        )  # fmt: skip
        answer.close()
        report.close()
        with process:
            found, report_text = _Tail(answered, None, MOST), _Tail(told, None, MOST)
            out, err = _streams(process, request)
            try:
                _send(process, request)
                process.wait()
            except BaseException:
                process.terminate()  # it ends all that is below it
                raise
            outcome = json.loads(report_text.text or '{"protection": "none", "status": 9}')
            pairs = {name: tuple(map(tuple, outcome.get(name, ()))) for name in ("reasons", "unwritten")}
            return _Ended(Outcome(**{**outcome, **pairs}), found.data, out, err)


@contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a pipe and close what is open of it in the end."""
    ends = os.pipe()
    with open(ends[0], "rb") as reads, open(ends[1], "wb", buffering=0) as writes:
        yield reads, writes


def _alone(request: Request) -> _Ended:
    """Run it where there is no supervisor: on macOS and Windows, if that was allowed."""
    if "none" not in _protections(request):
        return _Ended(
            Outcome(None, reasons=((sys.platform, "has neither namespaces nor Landlock"),)), b"", _empty(), _empty()
        )
    with tempfile.TemporaryDirectory(prefix="memplan-run-", ignore_cleanup_errors=True) as folder:
        answer = Path(folder, "answer")
        setting = Setting("none", folder, str(answer))
        answer.touch()
        process = _popen([*_command(), json.dumps(dataclasses.asdict(setting))], request, start_new_session=True)
        with process:
            out, err = _streams(process, request)
            over = False
            try:
                _send(process, request)
                process.wait(request.limit + _LATER)
            except subprocess.TimeoutExpired:
                over = True
            finally:
                if os.name == "posix":  # with what it has started
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            status = process.wait()
        text = answer.read_bytes()
    return _Ended(Outcome("none", -status if status < 0 else status << 8, over), text, out, err)


def _empty() -> _Tail:
    return _Tail(io.BufferedReader(io.BytesIO()), None)


def _protections(request: Request) -> tuple[Protection, ...]:
    """Return what may hold the script, the best first."""
    if request.writes:
        # with values, what it writes is what it writes; without, checkpoints are told from files in an overlay
        overlaid: tuple[Protection, ...] = () if request.really else ("namespaces",)
        return (*overlaid, "none") if request.really or request.unprotected else overlaid
    return ("namespaces", "landlock", "none") if request.unprotected else ("namespaces", "landlock")


def _command() -> list[str]:
    return [sys.executable, "-B", "-P", "-c", _START]


def _home() -> str:
    """Return the folder that memplan is imported from."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _popen(command: list[str], request: Request, **options: Any) -> subprocess.Popen[bytes]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_home(), os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen[bytes](
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def _streams(process: subprocess.Popen[bytes], request: Request) -> tuple[_Tail, _Tail]:
    out, err = process.stdout, process.stderr
    assert out is not None, "it is a pipe"
    assert err is not None, "it is a pipe"
    if not request.shows:
        return _Tail(out, None), _Tail(err, None)
    return _Tail(out, sys.stdout.buffer), _Tail(err, sys.stderr.buffer)


def _send(process: subprocess.Popen[bytes], request: Request) -> None:
    stream = process.stdin
    assert stream is not None, "it is a pipe"
    with suppress(BrokenPipeError), stream:  # of a process that has ended before
        stream.write(pickle.dumps(request))


class _Tail:
    """The last bytes of a stream, and how many lines it had. ``shown``: where all of it goes besides."""

    def __init__(self, stream: IO[bytes], shown: IO[bytes] | None, most: int = _LAST) -> None:
        self._stream, self._shown, self._most = stream, shown, most
        self._blocks: deque[bytes] = deque()
        self._size = 0
        self.lines = 0
        self._open = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def data(self) -> bytes:
        """Return the last bytes, after the stream's end."""
        self._reader.join()
        return b"".join(self._blocks)[-self._most :]

    @property
    def text(self) -> str:
        """Return the last bytes as text."""
        return self.data.decode("utf-8", "replace")

    def _read(self) -> None:
        while block := self._stream.read1(1 << 16):  # pyright: ignore[reportAttributeAccessIssue]  # buffered
            if self._shown is not None:
                self._shown.write(block)
                self._shown.flush()
            self._count(block)
            self._blocks.append(block)
            self._size += len(block)
            while self._size - len(self._blocks[0]) >= self._most:
                self._size -= len(self._blocks.popleft())
        self._count(b"\n")

    def _count(self, block: bytes) -> None:
        """Count the lines that are not blank; of the one that goes on, only whether it is."""
        *whole, last = block.split(b"\n")
        if whole:
            self.lines += sum(1 for line in (self._open + whole[0], *whole[1:]) if line.strip())
            self._open = b""
        self._open = (self._open + last.strip())[:1]


def _unprotected(outcome: Outcome, request: Request) -> UsageError:
    """Return the error of a script that was not run."""
    reasons = "; ".join(f"{name}: {why}" for name, why in outcome.reasons)
    if SCRATCH in dict(outcome.reasons):
        return UsageError(
            f"No folder can be made for what the script writes ({reasons})",
            expected="a temporary folder with room in it",
            do="Nothing was run. Name one: TMPDIR=/path memplan run ...",
        )
    if request.writes:
        return UsageError(
            f"Nothing here can tell the script's checkpoints from its other files ({reasons})",
            expected="Linux with user namespaces, where --allow-writes leaves checkpoints alone",
            do="Nothing was run. Leave --allow-writes out, or add --measure to run it for real",
        )
    return UsageError(
        f"Nothing here can hold back what the script writes, removes, sends or starts ({reasons})",
        expected="Linux with user namespaces, or with Landlock",
        do="Nothing was run. If the script may do all of it for real, checkpoints apart, add --unprotected",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _stood(command: Command, said: str) -> str | None:
    """Return the script's line in the traceback that its process wrote when it was to end."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', said)
    return next((f"{file}:{line}" for file, line in frames if file.startswith(command.folder)), None)


def _full(command: Command, room: int, said: str) -> StepError:
    return StepError(
        f"{command.name} wrote more than {format_bytes(room)} of files, and was ended",
        expected="a script that leaves room on the disk: half of it, and at most 20 GiB, is the script's",
        do="Nothing of it is left. Write these files under python beforehand, or fewer of them; if the disk has less "
        "than 40 GiB left, name another one: TMPDIR=/path memplan run ...",
        where=_stood(command, said),
    )


def _ended(command: Command, outcome: Outcome, said: str) -> MemplanError:
    """Return the error of a process that gave no answer."""
    if outcome.over:
        return StepError(
            f"{command.name} was not at its second update when its time was over",
            expected="a script that calls a torch.nn.Module, or loads a batch, now and then",
            do="Give it more time: --limit 1200; or run it under python to see what takes so long",
            where=_stood(command, said),
        )
    code = os.waitstatus_to_exitcode(outcome.status or 0)
    how = f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = f"; it said last: {lines[-1][:200]}" if lines else ""
    return StepError(
        f"the process of {command.name} ended {how}{last}",
        expected="a script that leaves its process running",
        do="Run it under python; with --show-output, what it prints is seen",
    )
