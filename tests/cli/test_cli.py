"""The group: help, version, and its answers to what no command could foresee."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import memplan
from memplan.cli import COMMANDS, main


def test_help_names_every_command_and_an_example() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert [name for name in COMMANDS if f"  {name}  " not in result.stdout] == []
    assert "memplan explain examples/" in result.stdout


def test_each_command_has_help_with_an_example_and_none_loads_torch() -> None:
    code = (
        "import sys; from memplan.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as end: print('ended', name, end.code, 'torch' in sys.modules, 'rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f"  memplan {name} " in done.stdout.partition(f"ended {name} ")[0].rpartition("\nended ")[2]
        assert f"\nended {name} 0 False False\n" in done.stdout


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"memplan, version {memplan.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "memplan", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"memplan, version {memplan.__version__}\n"


def test_an_unknown_command_gets_the_nearest() -> None:
    result = CliRunner().invoke(main, ["explian"])
    assert result.exit_code == 2
    assert (
        result.stderr == "memplan: There is no command 'explian'. Did you mean explain or replay? See memplan --help.\n"
    )


def test_no_command_gets_help_and_the_code_of_bad_usage() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("two\nlines"), 2, "RuntimeError: two lines (test_cli.py:"),
        (memplan.MemplanError("a"), 2, "memplan: a.\n"),
        (click.ClickException("b"), 2, "memplan: b\n"),
    ],
)
def test_whatever_is_raised_ends_as_one_line(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(main, "get_command", lambda ctx, name: command)
    result = CliRunner().invoke(main, ["explain"])
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_python_searches_for_cycles_less_often_while_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        before = gc.get_stats()[0]["collections"]
        kept = [[number] for number in range(50_000)]
        assert len(kept) == 50_000
        assert gc.get_stats()[0]["collections"] == before
        assert gc.isenabled()

    monkeypatch.setattr(main, "get_command", lambda ctx, name: command)
    thresholds = gc.get_threshold()
    gc.collect()
    assert CliRunner().invoke(main, ["explain"]).exit_code == 0
    assert gc.get_threshold() == thresholds


def test_an_import_that_an_interrupt_broke_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy, imported again after KeyboardInterrupt broke its import, raises ImportError."""

    @click.command()
    def command() -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr(main, "get_command", lambda ctx, name: command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a worker of xdist may have changed
    try:
        result = CliRunner().invoke(main, ["explain"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.stderr) == (130, "memplan: interrupted\n")


def test_a_reader_that_stops_early_is_no_error() -> None:
    """It has ended before the first line is written."""
    command = f"{sys.executable} -m memplan.cli devices --json - | true"
    env = {**os.environ, "PYTHONPATH": str(Path(memplan.__file__).parents[1])}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_stdout_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m memplan.cli --version >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
