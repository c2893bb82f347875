"""Questions to cuDNN, and a worker that answers them from a script of a few lines instead of the library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memplan.cudnn.cudnn_library import Cudnn
from memplan.cudnn.questions import Question

FORWARD = Question(  # of 63 channels: nothing is stored of it
    "forward", (16, 63, 56, 56), (128, 63, 3, 3), (16, 128, 56, 56), False, "float32", (1, 1), (1, 1), (1, 1),
    (32, 32, 32), True, False,
)  # fmt: skip
NOWHERE = Cudnn(Path("/nowhere"), 91900)
START = """
import json, os, signal, sys, time
def say(value):
    print(json.dumps(value), flush=True)
request = json.loads(sys.stdin.readline())
say({"version": 91900})
for line in sys.stdin:
    question = json.loads(line)
"""
ANSWERS = "    say({'plans': [['eng1', 1000 * question['x'][0]], ['eng2', 0]]})\n"
CRASHES = "    if question['x'][0] == 3: os.kill(os.getpid(), signal.SIGSEGV)\n"


def write_script(folder: Path, text: str, start: str = START) -> Path:
    """Write a worker that runs some lines for each question."""
    path = folder / "worker.py"
    path.write_text(start + text)
    return path


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="what stands for the driver is built by a C compiler"
)
