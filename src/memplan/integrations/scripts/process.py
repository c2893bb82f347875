"""The process in which a script runs: started here with a request, and what runs in it.

In a process of its own a script may do what it likes with handlers, threads, modules and its exit.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from memplan.dry.library import cache_folder
from memplan.errors import MemplanError, StepError
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.kernel_barrier import refuse_writes
from memplan.integrations.scripts.recorded import recorded
from memplan.integrations.scripts.request import Ran, Request, ScriptEnded
from memplan.trace.measure import is_cuda

_REQUEST, _ANSWER, _ERROR = "request", "answer", "error"
_WORLD, _OUT, _SAID = "world", "out", "err"
_START = "from memplan.integrations.scripts.process import answer; answer({folder!r})"


def run_script(request: Request) -> Ran:
    """Run a script in a process of its own and return its steps.

    Raises:
        InputError: there is no such script.
        StepError: the script raised, or ended before its first step.
        MemplanError: whatever `memplan.record` and `memplan.measure` raise.
    """
    request.command.checked()
    with tempfile.TemporaryDirectory(prefix="memplan-run-", ignore_cleanup_errors=True) as folder:
        Path(folder, _REQUEST).write_bytes(pickle.dumps(request))
        Path(folder, _WORLD).mkdir()
        status = _wait(_command(folder), folder, shows=request.shows)
        said = Path(folder, _SAID).read_text(encoding="utf-8", errors="replace") if not request.shows else ""
        error, answer = Path(folder, _ERROR), Path(folder, _ANSWER)
        if error.exists():
            raised = pickle.loads(error.read_bytes())
            if isinstance(raised, ScriptEnded) and not request.shows:
                raised.said = Path(folder, _OUT).read_text(encoding="utf-8", errors="replace") + said
            raise raised
        if not answer.exists():
            raise _ended(request.command, status, said)
        ran: Ran = pickle.loads(answer.read_bytes())
        lines = 0 if request.shows else _lines(Path(folder, _OUT)) + _lines(Path(folder, _SAID))
        return replace(ran, facts=replace(ran.facts, lines=lines))


def _command(folder: str) -> list[str]:
    return [sys.executable, "-B", "-c", _START.format(folder=folder)]


def _wait(command: list[str], folder: str, *, shows: bool) -> int:
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}
    with open(Path(folder, _OUT), "wb") as out, open(Path(folder, _SAID), "wb") as said:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=None if shows else out,
            stderr=None if shows else said,
        )  # fmt: skip
        try:
            return process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise


def _lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def _ended(command: Command, status: int, said: str) -> MemplanError:
    """Return the error of a process that gave no answer."""
    _, stood, stack = said.rpartition("Timeout (")  # as faulthandler writes it
    if stood:
        frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
        own = [f"{file}:{line}" for file, line in frames if file.startswith(command.folder)]
        return StepError(
            f"{command.name} was not at its second update when its time was over",
            expected="a script that calls a torch.nn.Module, or loads a batch, now and then",
            do="Give it more time: --limit 1200; or run it under python to see what takes so long",
            where=own[0] if own else None,
        )
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = f"; it said last: {lines[-1][:200]}" if lines else ""
    return StepError(
        f"the process of {command.name} ended {how}{last}",
        expected="a script that leaves its process running",
        do="Run it under python; with --show-output, what it prints is seen",
    )


def answer(folder: str) -> NoReturn:
    """Answer the request in a folder, and end the process at once: the script may have left threads."""
    request: Request = pickle.loads(Path(folder, _REQUEST).read_bytes())
    sys.argv = [request.command.place]
    sys.path[:] = [entry for entry in sys.path if entry]  # python -c puts the working directory first

    if not request.writes:
        if request.device is None or is_cuda(request.device):
            _start_cuda()
        _keep_files(folder)

    def give_up(error: MemplanError) -> NoReturn:
        _write(folder, _ERROR, pickle.dumps(error))
        _end()

    try:
        _write(folder, _ANSWER, pickle.dumps(recorded(request, os.path.join(folder, _WORLD), give_up)))
    except MemplanError as error:
        give_up(error)
    _end()


def _start_cuda() -> None:
    """Let CUDA start while nothing is refused: afterwards it says that there is no GPU."""
    if torch.cuda.is_available():
        torch.cuda.init()


def _keep_files(folder: str) -> None:
    """Let this process write nowhere but in its folder, in the cache of what an asked cuDNN answers, and to the system
    itself."""
    own = cache_folder().parent
    with suppress(OSError):
        os.makedirs(own, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = os.path.join(folder, _WORLD)
    refuse_writes((folder, str(own), "/dev", "/proc"))


# of the real file system: a script may be in the middle of its run, when others stand in their place
_open, _rename, _write_all = os.open, os.rename, os.write


def _write(folder: str, name: str, data: bytes) -> None:
    path = f"{folder}{os.sep}{name}"
    descriptor = _open(f"{path}.partial", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    written = 0
    while written < len(data):
        written += _write_all(descriptor, data[written:])
    _rename(f"{path}.partial", path)


def _end() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed by the script
            continue
    os._exit(0)
