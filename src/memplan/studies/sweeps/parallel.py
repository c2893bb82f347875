"""The points of a study side by side, in processes."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

import torch

from memplan._interrupts import waiting
from memplan.errors import InputError
from memplan.studies.axes.subject import Subject
from memplan.studies.sweeps.points import Outcome, measured
from memplan.trace.recording.session import Target

Task = tuple[Subject, Target, str | None]
"""What `measured` takes."""
Done = Callable[[int, int], None]
"""(points done, points in all)."""

STARTING = 6.0
"""Seconds that processes need until they have imported torch: less work than that is not worth them."""


def run(tasks: Sequence[Task], jobs: int | None, done: Done) -> dict[int, Outcome]:
    """Return the outcome of every task by its number; of those that were done, after Ctrl-C.

    Args:
        tasks: the points.
        jobs: processes; 1: this one alone. None: this one, and where there is enough left to do after the first
            two points, as many as there are cores.
        done: called after each point.

    Raises:
        InputError: ``jobs`` is given, and the step cannot be sent to another process.
    """
    found: dict[int, Outcome] = {}
    try:
        if jobs is None:
            jobs = _jobs(tasks, found, done)
        text = _packed([task for number, task in enumerate(tasks) if number not in found][:1], jobs)
        if jobs == 1 or not text:
            for number in range(len(found), len(tasks)):
                found[number] = measured(*tasks[number])
                done(len(found), len(tasks))
        else:
            _spread(tasks, jobs, found, done)
    except KeyboardInterrupt:
        if not found:
            raise
    return found


def _jobs(tasks: Sequence[Task], found: dict[int, Outcome], done: Done) -> int:
    """Choose the number of processes from the time of the second point: the first one loads much of torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    seconds = 0.0
    for number in range(min(2, len(tasks))):
        start = time.perf_counter()
        found[number] = measured(*tasks[number])
        seconds = time.perf_counter() - start
        done(len(found), len(tasks))
    left = (len(tasks) - len(found)) * seconds
    jobs = min(cores, len(tasks) - len(found))
    if jobs < 2 or left * (1 - 1 / jobs) < STARTING:
        return 1
    try:
        _packed(tasks[-1:], jobs)
    except InputError:
        return 1
    return jobs


def _packed(tasks: Sequence[Task], jobs: int) -> bytes:
    """Return the pickle of a task; nothing where there is none, or no process to send it to."""
    import cloudpickle

    if jobs == 1 or not tasks:
        return b""
    try:
        return cloudpickle.dumps(tasks[0])
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, RuntimeError) as error:
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"{tasks[0][0].title} cannot be sent to another process ({type(error).__name__}: {text})",
            expected="a step that can be pickled, for jobs above 1",
            do="Give jobs=1 (--jobs 1), or leave it out",
        ) from error


def _spread(tasks: Sequence[Task], jobs: int, found: dict[int, Outcome], done: Done) -> None:
    from loky import get_reusable_executor

    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    here = tuple(sys.path), torch.get_num_threads()
    executor: Any = get_reusable_executor(
        max_workers=jobs, timeout=60, initializer=_prepare, initargs=here, env=threads
    )
    futures: dict[Future[Outcome], int] = {}
    try:
        for number in range(len(tasks)):
            if number not in found:
                futures[executor.submit(measured, *tasks[number])] = number
        left = set(futures)
        while left:
            with waiting():
                ended, left = wait(left, return_when=FIRST_COMPLETED)
            for future in ended:
                found[futures[future]] = future.result()
                done(len(found), len(tasks))
    except BaseException:  # Ctrl-C above all: what is done is kept
        for future, number in futures.items():
            future.cancel()
            if number not in found and future.done():
                found.update(_result(number, future))
        executor.shutdown(wait=True, kill_workers=True)
        raise


def _result(number: int, future: Future[Outcome]) -> Mapping[int, Outcome]:
    try:
        return {number: future.result(timeout=0)}
    except (CancelledError, Exception):
        return {}


def _prepare(path: tuple[str, ...], threads: int) -> None:
    """Prepare a new process: imports as here, Ctrl-C left to the process that waits, stdout to the report. The CPU's
    kernels take memory by the number of torch's threads: so many as here are counted, and none runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = path
    torch.set_num_threads(threads)
    os.dup2(2, 1)
