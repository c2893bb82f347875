"""Tests on an emulated CUDA card, in a process of their own: the card has to be there before torch is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memplan import _torch

HERE = Path(__file__).parent
_CHILD = """
import sys
from pathlib import Path

sys.path[:0] = [{here!r}, {root!r}]
import emulated

card = emulated.load(Path({library!r}))
import pytest

emulated.install(card)
sys.exit(pytest.main(["-q", "-m", {which!r}, "-p", "no:cacheprovider", "-p", "no:xdist", "-c", {config!r}, *{cases!r}]))
"""

needs_emulation = pytest.mark.skipif(
    torch.version.cuda is not None or _torch.cpp_compiler() is None,
    reason="the emulated card needs a torch without CUDA kernels of its own, and a C++ compiler",
)


def run(cases: Path, which: str, folder: Path) -> None:
    """Run a file of test functions with the emulated card; fails with what the process says.

    Args:
        cases: the file.
        which: marks of those to run, as for ``pytest -m``.
        folder: for what is compiled.
    """
    library = compiled(folder)
    text = _CHILD.format(
        here=str(HERE), root=str(HERE.parents[1]), library=str(library), cases=[str(cases)], which=which,
        config=str(HERE.parents[1] / "pyproject.toml"),
    )  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}  # MONAI sets it
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # memplan's own would be marked for rewriting after it was imported
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def compiled(folder: Path) -> Path:
    """Return the library of the card, compiled in a folder if it is not there."""
    library = folder / "card.so"
    if not library.exists():
        _compile(library)
    return library


def _compile(library: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torchs = Path(spec.origin).parent
    include, lib = torchs / "include", torchs / "lib"
    command = [
        _torch.cpp_compiler() or "c++", "-std=c++20", "-O0", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS",
        "-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include"),
        str(HERE / "card.cpp"), "-o", str(library),
        f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
