"""Where cuDNN lies: beside the CUDA build of torch, or from the extra ``memplan[cudnn]``; found without loading it."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from memplan.dry.cuda_torch import packages_of, python_of
from memplan.errors import DeviceError

OLDEST = 90800
"""From cuDNN 9.8 on, a card can be described instead of being there (release notes)."""
_FILE = Path("nvidia", "cudnn", "lib", "libcudnn.so.9")
_NEEDED = ("libnvrtc-builtins.so.*", "libnvrtc.so.*", "libcublasLt.so.*", "libcublas.so.*")
_DEFINED = re.compile(r"#define CUDNN_(?:MAJOR|MINOR|PATCHLEVEL) (\d+)")
_VERSION = re.compile(r"(9)\.(\d+)(?:\.(\d+))?(?:\.\d+)?")
_DO = (
    "Name an environment with a CUDA build of torch, or with memplan[cudnn] (1.7 GB; pip takes another version there: "
    "nvidia-cudnn-cu13==9.10.2.21); or leave it out for an interval"
)


@dataclass(frozen=True)
class Cudnn:
    """cuDNN 9 in a folder of Python packages; None: a version by itself, of which only stored answers are known."""

    packages: Path | None
    version: int
    """As cuDNN numbers itself: 91900 is 9.19.0."""

    @property
    def file(self) -> Path:
        """Return the file of the library."""
        assert self.packages is not None, "asked only where there is a library"
        return self.packages / _FILE

    @property
    def needed(self) -> tuple[Path, ...]:
        """Return the libraries of CUDA that have to be loaded before it."""
        assert self.packages is not None, "asked only where there is a library"
        found = [sorted(self.packages.glob(f"nvidia/*/lib/{name}")) for name in _NEEDED]
        return tuple(files[-1] for files in found if files)

    @property
    def title(self) -> str:
        """Return its name and version, as people write it."""
        return f"cuDNN {title_of(self.version)}"


def title_of(version: int) -> str:
    """Return a version as people write it.

    Example:
        >>> title_of(91900)
        '9.19.0'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_cudnn(environment: str | os.PathLike[str] | bool | None) -> Cudnn | None:
    """Find the cuDNN to ask; None where there is none that can be.

    Args:
        environment: the folder of a virtual environment, or its Python; or a version such as "9.19.0", of which the
            answers count that memplan has stored; this environment where None or True; False: none.

    Raises:
        DeviceError: an environment that was named has none.
    """
    if environment is False:
        return None
    if environment is None or environment is True:
        if not _runs_here():
            return None
        places = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
        return next((found for place in places if (found := _in(place)) and found.version >= OLDEST), None)
    if (named := _VERSION.fullmatch(str(environment))) is not None:
        major, minor, patch = (int(number or 0) for number in named.groups())
        return Cudnn(None, major * 10000 + minor * 100 + patch)
    if not _runs_here():
        raise DeviceError(f"cuDNN named on {platform.system()}", expected="Linux on x86-64", do="Leave it out")
    found = packages_of(python_of(environment, _DO), _FILE, own=False)
    library = None if found is None else _in(found)
    if library is None or library.version < OLDEST:
        what = "no cuDNN as pip installs it" if library is None else library.title
        raise DeviceError(f"the environment {environment} has {what}", expected="cuDNN 9.8 or later", do=_DO)
    return library


def _runs_here() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _in(packages: Path) -> Cudnn | None:
    """Return the cuDNN of a folder of packages; its header says the version."""
    if not (packages / _FILE).is_file():
        return None
    try:
        header = (packages / "nvidia" / "cudnn" / "include" / "cudnn_version.h").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [int(number) for number in _DEFINED.findall(header)]
    return Cudnn(packages, numbers[0] * 10000 + numbers[1] * 100 + numbers[2]) if len(numbers) == 3 else None
