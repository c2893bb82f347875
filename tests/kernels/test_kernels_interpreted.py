"""The tests beside this one, once more through the kernels themselves, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from truth.float64_errors import INTERPRETED


def _triton() -> tuple[int, ...]:
    try:
        return tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return ()


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
@pytest.mark.skipif(_triton() < (3, 7), reason="no Triton, or one whose interpreter fails with NumPy 2.4")
def test_kernels_pass_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    # Triton decides when it is imported, so in a process of its own
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    command += ["-m", pytestconfig.option.markexpr]  # what is slow is slow here, too
    if pytestconfig.option.markexpr:
        # No kernel computes in float64, those in 16 bits differ by a cast, and nothing else here launches one.
        others = ("float16", "float64", "derivatives", "compiled", "op_is_as_torch_wants", "test_launch")
        command += ["-k", " and ".join(f"not {name}" for name in others)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
