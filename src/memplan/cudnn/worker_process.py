"""The process that loads cuDNN: started here, asked a question at a time, and given up where it crashes or hangs."""

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
from memplan.dry.library import built
from memplan.dry.progress import Progress

SCRIPT = Path(__file__).with_name("backend_worker.py")
DRIVER = Path(__file__).with_name("no_driver.c")
ANSWER, START = 10.0, 60.0
"""Seconds to wait for an answer, and for the libraries to load; the first answer may take as long as that, but not
hang."""
_LOOK = 0.5
"""Seconds after which a process that is waited for is looked at."""
_LIVES = 3
"""Processes at most that are lost to questions of one batch."""


class WorkerError(Exception):
    """The process did not answer; the text says why."""


def ask_worker(
    library: Cudnn, card: dict[str, Any], questions: Sequence[Question]
) -> Iterator[tuple[Question, Plans | str]]:
    """Yield each question with cuDNN's answer, or with the reason why there is none.

    Args:
        library: the cuDNN to ask.
        card: properties of the card, as `memplan.cudnn.described_card` writes them.
        questions: what to ask; where one crashes the process, another process goes on with the next.

    Raises:
        DeviceError: no compiler for what cuDNN takes for a driver.
        WorkerError: cuDNN does not load.
    """
    driver = built(DRIVER, "libcuda.so.1")
    request = {"needed": [str(driver), *map(str, library.needed)], "file": str(library.file), "card": card}
    rest = list(questions)
    for _ in range(_LIVES):
        with _Worker(request) as worker:
            limit = START
            while rest:
                question = rest.pop(0)
                try:
                    yield question, _plans(worker.say(asdict(question), limit))
                except WorkerError as error:
                    yield question, str(error)
                    if not worker.lives:
                        break
                limit = ANSWER
        if not rest:
            return
    yield from ((question, "the process had ended too often") for question in rest)


def _plans(answer: dict[str, Any]) -> Plans:
    """Return the plans of an answer. Raises WorkerError: it has none, or is not one."""
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
    """One process, which is over when this is left."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},  # of a dry run: a driver
        )  # fmt: skip
        self._request = request
        self._read = b""
        self.lives = True

    def __enter__(self) -> _Worker:
        try:
            answer = self.say(self._request, START)
            if "error" in answer:
                raise WorkerError(str(answer["error"]))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self.lives = False
        self._process.kill()
        self._process.communicate()

    def say(self, value: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send a value and return the answer. Raises WorkerError: none within so many seconds, or no JSON."""
        assert self._process.stdin is not None, "piped"
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            answer = json.loads(self._line(time.monotonic() + limit, limit))
        except BrokenPipeError:
            raise WorkerError(self._why()) from None
        except ValueError:
            self._end()
            raise WorkerError("it answered with something else than JSON") from None
        if not isinstance(answer, dict):
            self._end()
            raise WorkerError("it answered with something else than JSON")
        return answer

    def _line(self, until: float, limit: float) -> bytes:
        assert self._process.stdout is not None, "piped"
        progress = Progress(self._process.pid)
        while b"\n" not in self._read:
            left = until - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, min(left, _LOOK)))
            if not ready:
                if left <= 0 or progress.hangs:
                    self._end()
                    raise WorkerError(f"no answer within {limit:.0f} s" if left <= 0 else "its process hangs")
                continue
            found = os.read(self._process.stdout.fileno(), 1 << 16)
            if not found:
                raise WorkerError(self._why())
            self._read += found
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _why(self) -> str:
        """Return how the process ended."""
        status = self._process.wait()
        self.lives = False
        return f"its process ended {f'by {signal.Signals(-status).name}' if status < 0 else f'with exit code {status}'}"
