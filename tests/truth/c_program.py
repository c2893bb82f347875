"""Compile and run a C program that calls an export, under sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import torch

FLAGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def printed_by(folder: Path, text: str, *flags: str) -> str:
    """Return what a program prints that consists of the export `net` in a folder and a file with this text."""
    (folder / "main.c").write_text(text)
    program, sources = str(folder / "main"), [str(folder / name) for name in ("main.c", "net.c")]
    built = subprocess.run(
        ["cc", *FLAGS, *flags, *sources, "-lm", "-o", program], check=False, capture_output=True, text=True
    )
    assert not built.returncode, built.stderr
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def floats_of(text: str) -> np.ndarray:
    """Return the numbers that a program printed, one a line."""
    return np.array([float(line) for line in text.split()])


def array(name: str, tensor: torch.Tensor) -> str:
    """Return the C declaration of an array with a tensor's elements."""
    kind, show = ("float", float.hex) if tensor.is_floating_point() else ("int32_t", str)
    elements = ", ".join(show(x) for x in tensor.reshape(-1).tolist())
    return f"static const {kind} {name}[{tensor.numel()}] = {{{elements}}};"
