"""Run process pools and process groups of a script in this process, where they can be recorded."""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing.pool
import multiprocessing.process
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from memplan import _torch
from memplan._frames import callers
from memplan.errors import StepError
from memplan.integrations.scripts.lines import script_line

_THREADS = (
    "Process", "_setup_queues", "_get_sentinels", "_get_worker_sentinels", "_help_stuff_finish", "_wrap_exception",
)  # fmt: skip
"""Attributes of `ThreadPool` that let a `multiprocessing.pool.Pool` run in threads."""


class _Executor(concurrent.futures.ThreadPoolExecutor):
    """Thread pool with the signature of `concurrent.futures.ProcessPoolExecutor`, also as a base class."""

    def __init__(
        self, max_workers: int | None = None, mp_context: Any = None, initializer: Any = None, initargs: Any = (),
        **_: Any,
    ) -> None:  # fmt: skip
        """Create a pool of a single thread, whatever ``max_workers`` is."""
        super().__init__(1, initializer=initializer, initargs=initargs)


@contextmanager
def in_one_process(folder: str, *, values: bool, world: int | None = None, rank: int = 0) -> Iterator[None]:
    """Run pools in threads, limit process groups to this process, and refuse processes that a script starts.
    ``values``: whether tensors have values that collective operations reduce; if not, process groups are fake. With
    ``world`` this is rank ``rank`` of so many, as torchrun starts it."""

    def refuse(*_: Any) -> NoReturn:
        """Raise the error of a script that starts a process, with other advice for Hugging Face's datasets."""
        prepares = any(str(frame.f_globals.get("__name__")).startswith("datasets.") for frame in callers())
        raise StepError(
            "datasets prepares samples in processes of its own (num_proc), which a recording cannot follow" if prepares
            else "the script starts processes of its own, and what they do is not seen",
            expected="a script that trains in one process",
            do="Leave num_proc out, or give None: the samples are the same" if prepares
            else "Run the function that one of them runs, alone (of several ranks: one)",
            where=script_line(folder),
        )  # fmt: skip

    # the class stays, since scripts subclass it, and runs in threads
    make_pool, of_threads = multiprocessing.pool.Pool.__init__, vars(multiprocessing.pool.ThreadPool)

    def pool_of_one_thread(
        pool: Any, processes: int | None = None, initializer: Any = None, initargs: Any = (), *_: Any, **__: Any
    ) -> None:
        """Create a pool of processes as a single thread; a pool of threads as it is."""
        threads = isinstance(pool, multiprocessing.pool.ThreadPool)
        make_pool(pool, processes if threads else 1, initializer, initargs)

    with ExitStack() as stack:
        _forget_ranks()
        stack.callback(_forget_ranks)
        stack.enter_context(_torch.own_process_groups(fake=not values, world=world, rank=rank))
        for owner, new in (
            (multiprocessing.process.BaseProcess, {"start": refuse}),
            (os, {"fork": refuse} if hasattr(os, "fork") else {}),
            (
                multiprocessing.pool.Pool,
                {"__init__": pool_of_one_thread, **{name: of_threads[name] for name in _THREADS}},
            ),
            (concurrent.futures, {"ProcessPoolExecutor": _Executor}),
            (concurrent.futures.process, {"ProcessPoolExecutor": _Executor}),
        ):
            stack.enter_context(_torch.patched(owner, **new))
        yield


def _forget_ranks() -> None:
    """Reset Accelerate's state, which would outlive the script's run with its process group, which has ended."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
