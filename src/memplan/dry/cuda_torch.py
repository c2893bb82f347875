"""The CUDA build of torch that a dry run runs: where it lies and what it is, read without importing it."""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from memplan.errors import DeviceError

OLDEST, NEWEST = (2, 11), (2, 15)
"""Releases of torch that dry runs were compared in; another one is run all the same, and the result says so."""
_DO = "Install torch from download.pytorch.org/whl/cu130 in an environment of its own, and name that by --torch"
_ASSIGNED = re.compile(r"^(\w+)(?::[^=]*)? = '([^']*)'", re.MULTILINE)


@dataclass(frozen=True)
class CudaTorch:
    """A CUDA build of torch in an environment."""

    python: Path
    packages: Path
    """The folder that torch lies in."""
    version: str
    cuda: str
    commit: str

    @property
    def library(self) -> Path:
        """Return the file of all of torch's CUDA kernels."""
        return self.packages / "torch" / "lib" / "libtorch_cuda.so"

    @property
    def is_tested(self) -> bool:
        """Return whether dry runs were compared in this release."""
        release = re.match(r"(\d+)\.(\d+)", self.version)
        return release is not None and OLDEST <= (int(release[1]), int(release[2])) <= NEWEST


def find_torch(environment: str | os.PathLike[str] | None) -> CudaTorch:
    """Find the CUDA build of torch of an environment.

    Args:
        environment: the folder of a virtual environment, or its Python; None: the environment of this process.

    Raises:
        DeviceError: not Linux on x86-64, no such environment, no torch in it, or a build without CUDA.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise DeviceError(
            f"a dry run on {platform.system()} {platform.machine()}",
            expected="Linux on x86-64, which the emulated driver is written for",
            do="Run it there, or predict the step: memplan.record(build, device=...)",
        )
    python = Path(sys.executable) if environment is None else python_of(environment, _DO)
    packages = packages_of(python, Path("torch", "version.py"), own=environment is None)
    where = f"the environment {python.parent.parent}"
    if packages is None:
        raise DeviceError(f"{where} has no torch", expected="a CUDA build of torch 2.11 or later", do=_DO)
    text = (packages / "torch" / "version.py").read_text(encoding="utf-8")
    assigned = dict(_ASSIGNED.findall(text))
    torch = CudaTorch(
        python=python,
        packages=packages,
        version=assigned.get("__version__", "unknown"),
        cuda=assigned.get("cuda", ""),
        commit=assigned.get("git_version", ""),
    )
    if not torch.cuda or not torch.library.is_file():
        raise DeviceError(
            f"torch {torch.version} in {where} is built without CUDA", expected="a CUDA build of torch", do=_DO
        )
    return torch


def python_of(environment: str | os.PathLike[str], do: str) -> Path:
    """Return the Python interpreter of an environment, its folder or the interpreter itself.

    Raises:
        DeviceError: it is no environment; the error's advice is ``do``.
    """
    path = Path(environment).expanduser()
    candidates = [path] if path.is_file() else [path / "bin" / "python", path / "bin" / "python3"]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.absolute()
    raise DeviceError(
        f"{str(environment)!r} is no environment of Python",
        expected="the folder of a virtual environment with a CUDA build of torch, or its python",
        do=do,
    )


def packages_of(python: Path, file: Path, *, own: bool) -> Path | None:
    """Return the site-packages folder of an environment that has a file, such as torch/version.py; None if none has.

    ``own``: whether it is the environment of this process, whose ``sys.path`` is searched first.
    """
    folders = [Path(entry) for entry in sys.path] if own else []
    root = python.parent.parent
    for kind in ("lib", "lib64", "local/lib"):
        folders += map(Path, sorted(glob.glob(str(root / kind / "python3*" / "*-packages"))))
    return next((folder for folder in folders if (folder / file).is_file()), None)
