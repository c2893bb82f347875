"""Processes that a script would start."""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing.pool
import os
from typing import Any

import pytest

from memplan.errors import StepError
from memplan.integrations.scripts.one_process import in_one_process


def test_where_there_is_no_fork_none_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: libraries look whether there is one."""
    monkeypatch.delattr(os, "fork", raising=False)
    with in_one_process("folder", values=True):
        assert not hasattr(os, "fork")
    assert not hasattr(os, "fork")


def test_pools_of_processes_are_base_classes_and_run_here() -> None:
    with in_one_process("folder", values=True):

        class NotDaemons(multiprocessing.pool.Pool):
            """Of processes with a context of their own, as for pools within pools."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, context=multiprocessing.get_context("spawn"), **kwargs)

        class Executor(concurrent.futures.process.ProcessPoolExecutor):
            pass

        for make in (NotDaemons, multiprocessing.Pool, multiprocessing.pool.ThreadPool):
            with make(2) as pool:
                assert isinstance(pool, multiprocessing.pool.Pool)
                assert set(pool.map(_process, range(9))) == {os.getpid()}
        with Executor(2) as executor:
            assert set(executor.map(_process, range(9))) == {os.getpid()}


def test_processes_of_datasets_are_refused_with_what_to_leave_out() -> None:
    namespace: dict[str, Any] = {"__name__": "datasets.arrow_dataset", "os": os}
    exec("def map(): os.fork()", namespace)
    with in_one_process("folder", values=True), pytest.raises(StepError, match="Leave num_proc out"):
        namespace["map"]()


def _process(_: object) -> int:
    return os.getpid()
