"""A process of the CUDA build of torch that sees an emulated card, as a machine with a GPU would run memplan."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from environment import ENVIRONMENT

from memplan.devices import find
from memplan.dry.cuda_torch import find_torch
from memplan.dry.library import library_for
from memplan.trace.dry_run.process import process_command, process_variables

_CODE = """
import os, sys
from memplan.devices import find
from memplan.trace.dry_run.observe import check_card
check_card(find({card!r}))
{code}
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # its threads may hold objects of Python
"""
_COMMAND = """
from click.testing import CliRunner
from memplan.cli import main
result = CliRunner().invoke(main, {arguments!r})
print(result.stdout)
print(result.stderr, file=sys.stderr)
print("exit code", result.exit_code)
if result.exit_code > 2 or result.exception is not None and not isinstance(result.exception, SystemExit):
    import traceback
    traceback.print_exception(*result.exc_info)
"""


def run_there(code: str, folder: Path, card: str = "h100") -> str:
    """Run code in a process that sees a card, and return what it prints."""
    torch = find_torch(ENVIRONMENT)
    text = _CODE.format(card=card, code=code)
    variables = process_variables(os.environ, find(card), library_for(torch), folder / "driver.log")
    done = subprocess.run(
        process_command(torch, text), env=variables, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def command_there(arguments: list[str], folder: Path, card: str = "h100") -> str:
    """Run a command of memplan's there; what it prints ends with its exit code."""
    return run_there(_COMMAND.format(arguments=arguments), folder, card)
