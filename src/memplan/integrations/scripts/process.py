"""Run a script in a child process, which isolates its signal handlers, threads, modules and exit; read its answer."""

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
from memplan.integrations.scripts.request import Request, RunResult, ScriptEnded
from memplan.integrations.scripts.sandbox.messages import SCRATCH, Job, Outcome, Protection, Setting

_START = "from memplan.integrations.scripts.child import answer; import sys; answer(sys.argv[1])"
_SUPERVISOR = "from memplan.integrations.scripts.sandbox.supervisor import main; import sys; main(sys.argv[1])"
_EXTRA_SECONDS = 30
"""Seconds after its time limit at which a script is killed that has not reached a hook."""
_TAIL_BYTES = 64 << 10
"""Bytes of a script's output that are stored, counted from its end."""


def run_script(request: Request, warn: Callable[[str], None] = lambda _: None) -> RunResult:
    """Run a script in a process of its own and return its steps. ``warn`` is called with a message for each file that
    was permitted but could not be written.

    Raises:
        InputError: there is no such script.
        UsageError: no sandbox is available, and running without was not allowed.
        StepError: the script raised, or ended before its first step.
        MemplanError: whatever `memplan.record` and `memplan.measure` raise.
    """
    request.command.checked()
    result = _run_supervised(request) if sys.platform == "linux" else _run_unsupervised(request)
    outcome, errors = result.outcome, result.err.text
    if outcome.protection is None:
        raise _sandbox_error(outcome, request)
    for path, reason in outcome.unwritten:
        warn(f"{path} was not written: {reason}")
    if outcome.unwritten_more:
        warn(f"{outcome.unwritten_more:,} more files were not written")
    if outcome.room is not None:
        raise _disk_error(request.command, outcome.room, errors)
    if not result.answer:
        raise _exit_error(request.command, outcome, errors)
    try:
        ran, contributed = read_answer(result.answer, request)
    except ScriptEnded as error:
        error.said = "" if request.shows else result.out.text + errors
        raise
    except Unreadable as error:
        raise StepError(
            f"the process of {request.command.name} gave no answer that can be read: {error}",
            expected="a script that leaves memplan's own part of its process alone",
            do="Run it under python; with --show-output, what it prints is seen",
        ) from None
    if request.contribute is not None and contributed is not None:
        Path(request.contribute).write_text(contributed, encoding="utf-8")
    lines = 0 if request.shows else result.out.lines + result.err.lines
    facts = replace(ran.facts, lines=lines, protection=outcome.protection, unwritten=outcome.unwritten)
    return replace(ran, facts=facts)


@dataclasses.dataclass(frozen=True)
class _ProcessResult:
    """Outcome and output of a script's process."""

    outcome: Outcome
    answer: bytes
    out: _Tail
    err: _Tail


def _run_supervised(request: Request) -> _ProcessResult:
    """Run the script in a child of a supervisor process, which ends it whenever this process ends."""
    with _pipe() as (answer_end, answer), _pipe() as (report_end, report):
        job = Job(
            tuple(_command()), _protections(request), not request.writes, request.writes and not request.really,
            request.limit + _EXTRA_SECONDS, report.fileno(), f"/dev/fd/{answer.fileno()}", os.getpid(),
        )  # fmt: skip
        start = f"import sys; sys.path.insert(0, {_home()!r}); {_SUPERVISOR}"
        process = _popen(
            [sys.executable, "-I", "-c", start, json.dumps(dataclasses.asdict(job))], request,
            pass_fds=(answer.fileno(), report.fileno()), start_new_session=True,
        )  # fmt: skip
        answer.close()
        report.close()
        with process:
            answer_bytes, report_text = (
                _Tail(answer_end, copy=None, limit=MOST),
                _Tail(report_end, copy=None, limit=MOST),
            )
            out, err = _streams(process, request)
            try:
                _send(process, request)
                process.wait()
            except BaseException:
                process.terminate()  # the supervisor ends its children
                raise
            outcome = json.loads(report_text.text or '{"protection": "none", "status": 9}')
            pairs = {name: tuple(map(tuple, outcome.get(name, ()))) for name in ("reasons", "unwritten")}
            return _ProcessResult(Outcome(**{**outcome, **pairs}), answer_bytes.data, out, err)


@contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a pipe; close both ends at exit."""
    ends = os.pipe()
    with open(ends[0], "rb") as reads, open(ends[1], "wb", buffering=0) as writes:
        yield reads, writes


def _run_unsupervised(request: Request) -> _ProcessResult:
    """Run the script without a supervisor: on macOS and Windows, if that was allowed."""
    if "none" not in _protections(request):
        refused = Outcome(protection=None, reasons=((sys.platform, "has neither namespaces nor Landlock"),))
        out, err = (_Tail(io.BufferedReader(io.BytesIO()), copy=None) for _ in range(2))  # no output
        return _ProcessResult(refused, b"", out, err)
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
                process.wait(request.limit + _EXTRA_SECONDS)
            except subprocess.TimeoutExpired:
                over = True
            finally:
                if os.name == "posix":  # and all processes that it has started
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            status = process.wait()
        answered = answer.read_bytes()
    wait_status = -status if status < 0 else status << 8  # as os.waitpid has it: a signal, or an exit code
    return _ProcessResult(Outcome("none", wait_status, over), answered, out, err)


def _protections(request: Request) -> tuple[Protection, ...]:
    """Return the protections under which the script may run, the strongest first."""
    if request.writes and request.really:
        return ("none",)
    # with --allow-writes, only an overlay tells checkpoints, which are not written, from other files
    protections: tuple[Protection, ...] = ("namespaces",) if request.writes else ("namespaces", "landlock")
    return (*protections, "none") if request.unprotected else protections


def _command() -> list[str]:
    """Return the command of the script's process; a `Setting` as JSON is to be added."""
    return [sys.executable, "-B", "-P", "-c", _START]


def _home() -> str:
    """Return the folder that memplan is imported from."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _popen(command: list[str], request: Request, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process with pipes, the request's environment variables, and memplan on its import path."""
    path = os.pathsep.join(filter(None, (_home(), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, **dict(request.variables), "PYTHONPATH": path}
    return subprocess.Popen[bytes](
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def _streams(process: subprocess.Popen[bytes], request: Request) -> tuple[_Tail, _Tail]:
    """Return readers of the process's output and error output, which are also shown if the request asks for that."""
    out, err = process.stdout, process.stderr
    assert out is not None, "it is a pipe"
    assert err is not None, "it is a pipe"
    if not request.shows:
        return _Tail(out, copy=None), _Tail(err, copy=None)
    return _Tail(out, sys.stdout.buffer), _Tail(err, sys.stderr.buffer)


def _send(process: subprocess.Popen[bytes], request: Request) -> None:
    """Write the request to the process's standard input, and close that."""
    stream = process.stdin
    assert stream is not None, "it is a pipe"
    with suppress(BrokenPipeError), stream:  # the process has ended already
        stream.write(pickle.dumps(request))


class _Tail:
    """Reads a stream in a thread, and stores its last bytes and the number of its lines. All of it is written to
    ``copy`` as well; at most ``limit`` bytes are stored."""

    def __init__(self, stream: IO[bytes], copy: IO[bytes] | None, limit: int = _TAIL_BYTES) -> None:
        """Start to read ``stream``, in a thread. All of it is written to ``copy``, too, if that is not None; its last
        ``limit`` bytes are stored."""
        self._stream, self._copy, self._limit = stream, copy, limit
        self._blocks: deque[bytes] = deque()
        """Blocks of bytes with the end of the stream."""
        self._size = 0
        """Bytes of these blocks."""
        self.lines = 0
        """Lines so far that are not blank."""
        self._unfinished = b""
        """First character of the last line, which has no end yet; b"" while it is blank."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        """Reads the stream to its end."""
        self._reader.start()

    @property
    def data(self) -> bytes:
        """Return the last bytes, after the stream's end."""
        self._reader.join()
        return b"".join(self._blocks)[-self._limit :]

    @property
    def text(self) -> str:
        """Return the last bytes as text."""
        return self.data.decode("utf-8", "replace")

    def _read(self) -> None:
        """Body of the thread: read the stream to its end."""
        while block := self._stream.read1(1 << 16):  # pyright: ignore[reportAttributeAccessIssue]  # buffered
            if self._copy is not None:
                self._copy.write(block)
                self._copy.flush()
            self._count(block)
            self._blocks.append(block)
            self._size += len(block)
            while self._size - len(self._blocks[0]) >= self._limit:
                self._size -= len(self._blocks.popleft())
        self._count(b"\n")

    def _count(self, block: bytes) -> None:
        """Count the lines that end in a block and are not blank."""
        *ended, last = (self._unfinished + block).split(b"\n")
        self.lines += sum(1 for line in ended if line.strip())
        self._unfinished = last.strip()[:1]


def _sandbox_error(outcome: Outcome, request: Request) -> UsageError:
    """Return the error of a script that was not run, as no permitted protection is available."""
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
    """Return the name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _last_line(command: Command, errors: str) -> str | None:
    """Return the script's innermost ``file:line`` in ``errors``: its process writes a traceback when it is ended. None
    without a traceback."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', errors)
    return next((f"{file}:{line}" for file, line in frames if file.startswith(command.folder)), None)


def _disk_error(command: Command, room: int, errors: str) -> StepError:
    """Return the error of a script that wrote more than ``room`` bytes. ``errors`` is its error output."""
    return StepError(
        f"{command.name} wrote more than {format_bytes(room)} of files, and was ended",
        expected="a script that leaves room on the disk: half of it, and at most 20 GiB, is the script's",
        do="Nothing of it is left. Write these files under python beforehand, or fewer of them; if the disk has less "
        "than 40 GiB left, name another one: TMPDIR=/path memplan run ...",
        where=_last_line(command, errors),
    )


def _exit_error(command: Command, outcome: Outcome, errors: str) -> MemplanError:
    """Return the error of a process that ended, or was ended, without an answer. ``errors`` is its error output."""
    if outcome.over:
        return StepError(
            f"{command.name} was not at its second update when its time was over",
            expected="a script that calls a torch.nn.Module, or loads a batch, now and then",
            do="Give it more time: --limit 1200; or run it under python to see what takes so long",
            where=_last_line(command, errors),
        )
    code = os.waitstatus_to_exitcode(outcome.status or 0)
    how = f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = f"; it said last: {lines[-1][:200]}" if lines else ""
    return StepError(
        f"the process of {command.name} ended {how}{last}",
        expected="a script that leaves its process running",
        do="Run it under python; with --show-output, what it prints is seen",
    )
