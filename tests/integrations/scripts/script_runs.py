"""A script that a test writes, run in the test's own process."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import memplan
from memplan.errors import MemplanError
from memplan.integrations.scripts.answer import read_answer, text_of_error, text_of_run
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.loaders import Rules
from memplan.integrations.scripts.recorded import run_request
from memplan.integrations.scripts.request import Request, RunResult, ScriptEnded
from memplan.integrations.scripts.script import Script
from memplan.integrations.scripts.views import View
from memplan.trace.program_facts import Facts
from memplan.trace.trace import Trace

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
"""


def run(
    tmp_path: Path, text: str, *arguments: str, rules: Rules | None = None, really: bool = False, **options: Any
) -> tuple[Trace, Facts]:
    """Write a script and run it, recorded for the CPU or for real."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    script = script_of(str(path), *arguments, rules=rules, really=really, **options)
    steps = options.get("steps", 2)
    with contextlib.chdir(tmp_path):  # nothing holds back here what it writes
        trace = memplan.measure(script, steps=steps) if really else memplan.record(script, device="cpu", steps=steps)  # pyright: ignore[reportArgumentType]  # a program
    return trace, script.facts(trace)


def script_of(path: str, *arguments: str, rules: Rules | None = None, **options: Any) -> Script:
    """Return a script that is not run yet."""
    return Script(Request(Command(path, arguments), rules=rules or Rules(), **options), View(), _give_up)


def run_here(request: Request, warn: Callable[[str], None] = lambda _: None) -> RunResult:
    """Do what `run_script` does, without a process for the script: for tests of what is made of its answer.

    The request is pickled and the answer goes through its text, as between processes. Nothing holds back what the
    script writes.
    """
    request.command.checked()
    request = pickle.loads(pickle.dumps(request))
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", [request.command.target]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            text = text_of_run(run_request(request, View(), _give_up), None)
        except MemplanError as error:
            text = text_of_error(error)
    try:
        ran, _ = read_answer(text.encode(), request)
    except ScriptEnded as error:
        error.said = printed.getvalue()
        raise
    lines = sum(1 for line in printed.getvalue().splitlines() if line.strip())
    return replace(ran, facts=replace(ran.facts, lines=lines, protection="none"))


class GaveUp(BaseException):
    """A script did not let itself be ended."""


def _give_up(error: MemplanError) -> NoReturn:
    raise GaveUp(error)
