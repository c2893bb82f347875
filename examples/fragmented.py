"""Sequences that get longer from step to step, which torch's caching allocator keeps in pieces.

    python examples/fragmented.py

The history of the step on an H100 is predicted, written as a snapshot, and replayed under other settings.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn


def build(width: int = 1024) -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def step() -> None:
        for length in range(1000, 9000, 1000):
            model(torch.randn(length, width)).square().mean().backward()

    return step


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        memplan(folder, "explain", f"{Path(__file__).resolve()}:build", "--device", "h100", "--snapshot", "step.pickle")
        print(memplan(folder, "replay", "step.pickle", "--top", "3", "--settings", "expandable_segments:True"))


def memplan(folder: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "memplan.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=True).stdout


if __name__ == "__main__":
    main()
