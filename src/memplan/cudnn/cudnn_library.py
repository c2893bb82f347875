"""Locates cuDNN, in an environment with a CUDA build of torch or with ``memplan[cudnn]``, without loading it."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memplan.dry.cuda_torch import packages_of, python_of
from memplan.errors import DeviceError

OLDEST = 90800
"""From cuDNN 9.8 on, a description of the card can replace the card (release notes)."""
VERSION_OF_TORCH = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}
"""cuDNN that PyPI's CUDA wheel of a torch version depends on."""
OLDEST_CAPABILITY, LAST_FOR_OLDER = (7, 5), 91002
"""Compute capability from which cuDNN 9.11 and later have kernels, and the last version for older cards. Builds of
torch with CUDA 12.6, which 2.14 is the last to have, come with it; others leave these cards out (pytorch#157517,
#172352, #190385). For a described V100, 9.19 names the workspace of 9.10 for 462 of 1,414 sampled convolutions only."""
_FILE = Path("nvidia", "cudnn", "lib", "libcudnn.so.9")
_DEPENDENCIES = ("libnvrtc-builtins.so.*", "libnvrtc.so.*", "libcublasLt.so.*", "libcublas.so.*")
_DEFINED = re.compile(r"#define CUDNN_(?:MAJOR|MINOR|PATCHLEVEL) (\d+)")
_VERSION = re.compile(r"(9)\.(\d+)(?:\.(\d+))?(?:\.\d+)?")
_DO = (
    "Name an environment with a CUDA build of torch, or with memplan[cudnn] (1.7 GB; pip takes another version there: "
    "nvidia-cudnn-cu13==9.10.2.21); or leave it out for expected workspaces"
)


@dataclass(frozen=True)
class Cudnn:
    """An installed cuDNN 9, or a version of it that is not installed: only stored answers and models are known."""

    packages: Path | None
    """The site-packages folder; None: not installed."""
    version: int
    """In cuDNN's own numbering: 91900 is 9.19.0."""
    is_default: bool = False
    """Whether nothing was named: it is this environment's own, or stands for that of the CUDA build of this torch."""

    @property
    def file(self) -> Path:
        """The shared library."""
        assert self.packages is not None, "read only where there is a library"
        return self.packages / _FILE

    @property
    def needed(self) -> tuple[Path, ...]:
        """The CUDA libraries that have to be loaded before it."""
        assert self.packages is not None, "read only where there is a library"
        versions = [sorted(self.packages.glob(f"nvidia/*/lib/{name}")) for name in _DEPENDENCIES]
        return tuple(files[-1] for files in versions if files)

    @property
    def title(self) -> str:
        """Name and version, such as ``cuDNN 9.19.0``."""
        return f"cuDNN {title_of(self.version)}"

    def for_card(self, capability: tuple[int, int]) -> Cudnn:
        """Return the version that this torch runs with on a card; the library itself if it was named.

        Args:
            capability: compute capability of the card.

        Example:
            >>> of_this_torch().for_card((7, 0)).title
            'cuDNN 9.10.2'
        """
        older = self.is_default and capability < OLDEST_CAPABILITY and self.version > LAST_FOR_OLDER
        return Cudnn(packages=None, version=LAST_FOR_OLDER, is_default=True) if older else self


def title_of(version: int) -> str:
    """Return a version number as text.

    Example:
        >>> title_of(91900)
        '9.19.0'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_cudnn(environment: str | os.PathLike[str] | bool | None) -> Cudnn | None:
    """Return the cuDNN to query; None: workspaces of convolutions stay intervals.

    Args:
        environment: folder of a virtual environment or path of its Python; or a version such as "9.19.0", to use only
            stored answers and the model of its choice. None: that of this environment if it has cuDNN 9.8 or later,
            else the version that the CUDA build of this torch comes with. True: the former only. False: no cuDNN.

    Raises:
        DeviceError: the named environment has no cuDNN from 9.8 on, or this system cannot load it.
    """
    if environment is False:
        return None
    if environment is None or environment is True:
        installed = _installed() if _is_supported() else None
        if environment is True:
            return installed
        return of_this_torch() if installed is None else replace(installed, is_default=True)
    if (named := _VERSION.fullmatch(str(environment))) is not None:
        major, minor, patch = (int(number or 0) for number in named.groups())
        return Cudnn(packages=None, version=major * 10000 + minor * 100 + patch)
    if not _is_supported():
        raise DeviceError(f"cuDNN named on {platform.system()}", expected="Linux on x86-64", do="Leave it out")
    packages = packages_of(python_of(environment, _DO), _FILE, own=False)
    library = None if packages is None else _library_in(packages)
    if library is None or library.version < OLDEST:
        title = "no cuDNN as pip installs it" if library is None else library.title
        raise DeviceError(f"the environment {environment} has {title}", expected="cuDNN 9.8 or later", do=_DO)
    return library


def _installed() -> Cudnn | None:
    """Return the cuDNN 9.8 or later of this environment, or None."""
    folders = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    libraries = (_library_in(folder) for folder in folders)
    return next((library for library in libraries if library is not None and library.version >= OLDEST), None)


def of_this_torch() -> Cudnn:
    """Return the version that the CUDA build of this torch depends on; of a newer torch the newest version that is
    known."""
    release = tuple(int(number) for number in torch.__version__.split(".")[:2])
    known = VERSION_OF_TORCH.get(release, VERSION_OF_TORCH[max(VERSION_OF_TORCH)])  # type: ignore[arg-type]
    return Cudnn(packages=None, version=known, is_default=True)


def _is_supported() -> bool:
    """Return whether cuDNN can be loaded on this system: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _library_in(packages: Path) -> Cudnn | None:
    """Return the cuDNN in a site-packages folder, with the version of its header; None: there is none."""
    if not (packages / _FILE).is_file():
        return None
    try:
        header = (packages / "nvidia" / "cudnn" / "include" / "cudnn_version.h").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [int(number) for number in _DEFINED.findall(header)]
    return Cudnn(packages, numbers[0] * 10000 + numbers[1] * 100 + numbers[2]) if len(numbers) == 3 else None
