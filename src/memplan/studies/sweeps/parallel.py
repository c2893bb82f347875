"""Record the points of a sweep in parallel processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

import torch

from memplan._interrupts import waiting
from memplan.errors import InputError
from memplan.studies.axes.subject import Subject
from memplan.studies.sweeps.points import Outcome, record_point
from memplan.trace.recording.session import Target

Task = tuple[Subject, Target, str | None]
"""Arguments of `record_point`."""
Progress = Callable[[int, int], None]
"""(points done, points in all)."""

STARTING = 6.0
"""Seconds that new processes need to import torch; they must save at least this much."""


def record_points(tasks: Sequence[Task], jobs: int | None, progress: Progress) -> dict[int, Outcome]:
    """Return the outcomes by index of the task; after Ctrl-C only of the tasks that were done.

    ``jobs`` is the number of processes; with 1, the calling process records. None: the calling process records the
    first two points, then a process per core records the rest if that saves time. Raises InputError if ``jobs`` is not
    None, and the step cannot be pickled.
    """
    outcomes: dict[int, Outcome] = {}
    try:
        if jobs is None:
            jobs = _choose_jobs(tasks, outcomes, progress)
        if jobs > 1 and len(outcomes) < len(tasks):
            _check_picklable(tasks[len(outcomes)])
            _run_in_processes(tasks, jobs, outcomes, progress)
        else:
            for number in range(len(outcomes), len(tasks)):
                outcomes[number] = record_point(*tasks[number])
                progress(len(outcomes), len(tasks))
    except KeyboardInterrupt:
        if not outcomes:
            raise
    return outcomes


def _choose_jobs(tasks: Sequence[Task], outcomes: dict[int, Outcome], progress: Progress) -> int:
    """Return the number of processes for the remaining points, after recording the first two in this process.

    It depends on the seconds of the second: the first loads much of torch. Arguments: see `record_points`; the outcomes
    of the two are added to ``outcomes``.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    seconds = 0.0
    for number in range(min(2, len(tasks))):
        start = time.perf_counter()
        outcomes[number] = record_point(*tasks[number])
        seconds = time.perf_counter() - start
        progress(len(outcomes), len(tasks))
    remaining = len(tasks) - len(outcomes)
    jobs = min(cores, remaining)
    if jobs < 2 or remaining * seconds * (1 - 1 / jobs) < STARTING:  # processes would save less than they take
        return 1
    try:
        _check_picklable(tasks[-1])
    except InputError:
        return 1
    return jobs


def _check_picklable(task: Task) -> None:
    """Raise InputError if a task cannot be sent to another process."""
    import cloudpickle

    try:
        cloudpickle.dumps(task)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, RuntimeError) as error:
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"{task[0].title} cannot be sent to another process ({type(error).__name__}: {text})",
            expected="a step that can be pickled, for jobs above 1",
            do="Give jobs=1 (--jobs 1), or leave it out",
        ) from error


def _run_in_processes(tasks: Sequence[Task], jobs: int, outcomes: dict[int, Outcome], progress: Progress) -> None:
    """Record the tasks without an outcome in worker processes, and add their outcomes; after Ctrl-C those that are
    done."""
    from loky import get_reusable_executor

    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    arguments = tuple(sys.path), torch.get_num_threads()
    executor: Any = get_reusable_executor(
        max_workers=jobs, timeout=60, initializer=_initialize, initargs=arguments, env=environment
    )
    futures: dict[Future[Outcome], int] = {}
    try:
        for number in range(len(tasks)):
            if number not in outcomes:
                futures[executor.submit(record_point, *tasks[number])] = number
        pending = set(futures)
        while pending:
            with waiting():
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                outcomes[futures[future]] = future.result()
                progress(len(outcomes), len(tasks))
    except BaseException:  # mostly Ctrl-C: collect what is done
        for future, number in futures.items():
            future.cancel()
            if number not in outcomes and future.done():
                with contextlib.suppress(CancelledError, Exception):
                    outcomes[number] = future.result(timeout=0)
        executor.shutdown(wait=True, kill_workers=True)
        raise


def _initialize(path: tuple[str, ...], threads: int) -> None:
    """Initialize a worker process: the parent's import path, SIGINT ignored, prints to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    sys.path[:] = path
    torch.set_num_threads(threads)  # workspaces of CPU kernels depend on it, and no kernel runs
    os.dup2(2, 1)  # stdout is the report's
