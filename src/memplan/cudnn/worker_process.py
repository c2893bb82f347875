"""Starts and queries the process that loads cuDNN, and replaces it when it crashes or hangs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.questions import ExecutionPlan, Plans, Question
from memplan.dry.library import shared_library_of
from memplan.dry.progress import Progress

SCRIPT = Path(__file__).with_name("backend_worker.py")
DRIVER = Path(__file__).with_name("no_driver.c")
ANSWER, START = 10.0, 60.0
"""Seconds to wait for an answer, and for the libraries to load. The first answer may take as long."""
_POLL = 0.5
"""Seconds between two checks for progress while waiting for an answer."""
_MAX_PROCESSES = 3
"""Greatest number of processes for a batch of questions, as each may crash or hang."""


class WorkerError(Exception):
    """There is no answer; the message is the reason."""


def ask_worker(
    library: Cudnn, card: dict[str, Any], questions: Sequence[Question]
) -> Iterator[tuple[Question, Plans | str]]:
    """Yield each question with cuDNN's plans, or with the reason why there are none.

    Args:
        library: an installed cuDNN.
        card: as `memplan.cudnn.described_card.properties` returns it.
        questions: after a question that crashes the process, a new process continues with the next.

    Raises:
        DeviceError: there is no C compiler to build the stub of the CUDA driver.
        WorkerError: cuDNN cannot be loaded.
    """
    driver = shared_library_of(DRIVER, "libcuda.so.1")
    setup = {"needed": [str(driver), *map(str, library.needed)], "file": str(library.file), "card": card}
    pending = list(questions)
    for _ in range(_MAX_PROCESSES):
        with _Worker(setup) as worker:
            limit = START  # the first answer may take as long as loading the libraries
            while pending:
                question = pending.pop(0)
                try:
                    yield question, _plans(worker.request(asdict(question), limit))
                except WorkerError as error:
                    yield question, str(error)
                    if not worker.lives:
                        break
                limit = ANSWER
        if not pending:
            return
    yield from ((question, "the process had ended too often") for question in pending)


def _plans(answer: dict[str, Any]) -> Plans:
    """Return the plans of a worker's answer.

    Raises:
        WorkerError: it is an error, has no plans, or is malformed.
    """
    if "error" in answer:
        raise WorkerError(str(answer["error"]))
    try:
        plans = tuple(ExecutionPlan(str(engine), int(workspace)) for engine, workspace in answer["plans"])
    except (KeyError, TypeError, ValueError):
        raise WorkerError("its answer is not what was asked for") from None
    if not plans:
        raise WorkerError("cuDNN has no engine for it")
    return plans


class _Worker:
    """A process that has loaded cuDNN. It is killed when the context is left."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Start the process. ``setup``: its first request, with cuDNN's file, the libraries that have to be loaded
        before it, and the card (`memplan.cudnn.backend_worker.serve`)."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},  # the emulated driver
        )  # fmt: skip
        self._setup = setup
        self._buffer = b""
        """Output that was read and not yet returned as a line."""
        self.lives = True
        """False once it was killed."""

    def __enter__(self) -> _Worker:
        """Let the process load cuDNN. Raises WorkerError if it cannot."""
        try:
            answer = self.request(self._setup, START)
            if "error" in answer:
                raise WorkerError(str(answer["error"]))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Kill the process and wait for its end."""
        self.lives = False
        self._process.kill()
        self._process.communicate()

    def request(self, value: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send a value and return the answer.

        Args:
            value: to be sent as a line of JSON.
            limit: seconds to wait.

        Raises:
            WorkerError: no answer within that time, the process has ended, or the answer is no JSON object.
        """
        assert self._process.stdin is not None, "piped"
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            answer = json.loads(self._line(limit))
        except BrokenPipeError:
            raise WorkerError(self._exit_reason()) from None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._end()
            raise WorkerError("it answered with something else than JSON")
        return answer

    def _line(self, limit: float) -> bytes:
        """Return the next line of output, or kill the process after ``limit`` seconds or if it makes no progress."""
        assert self._process.stdout is not None, "piped"
        deadline, progress = time.monotonic() + limit, Progress(self._process.pid)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, min(left, _POLL)))
            if not ready:
                if left <= 0 or progress.hangs:
                    self._end()
                    raise WorkerError(f"no answer within {limit:.0f} s" if left <= 0 else "its process hangs")
                continue
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise WorkerError(self._exit_reason())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _exit_reason(self) -> str:
        """Wait for the end of the process and return how it ended."""
        status = self._process.wait()
        self.lives = False
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
        return f"its process ended {how}"
