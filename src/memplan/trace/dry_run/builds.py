"""Serializes a build for another process, perhaps of another Python: by name if possible, else as code."""

from __future__ import annotations

import importlib
import operator
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import TargetError, UsageError
from memplan.trace.naming.targets import module_from_file
from memplan.trace.recording.boundaries import Program

VERSION = sys.version_info[:2]


@dataclass(frozen=True)
class Packed:
    """A serialized build.

    Has either ``module`` and ``name`` (and the module's ``file``, to import if the name cannot be imported); or
    ``data``, a pickle; or ``code``, a pickle that contains code of Python ``version``.
    """

    module: str = ""
    name: str = ""
    file: str | None = None
    data: bytes | None = None
    code: bytes | None = None
    version: tuple[int, int] = VERSION


def packed(build: Callable[..., Any] | Program, version: tuple[int, int]) -> Packed:
    """Serialize a build for a process of this Python version. Raises UsageError if ``build`` cannot be serialized."""
    name, module = getattr(build, "__qualname__", ""), getattr(build, "__module__", None) or ""
    home = sys.modules.get(module)
    is_local = "<" in name  # <locals>, <lambda>
    if home is not None and name and not is_local and operator.attrgetter(name)(home) is build:
        file = getattr(home, "__file__", None)
        if module != "__main__" or file is not None:
            return Packed(module, name, None if file is None else os.path.abspath(file))
    try:
        data = pickle.dumps(build)
        if b"__main__" not in data:  # else it names a class of this process's main file
            return Packed(data=data)
    except Exception:  # pickle raises whatever a value's own code does
        pass
    if version != VERSION:
        raise UsageError(
            f"build is {name or type(build).__name__}, which has no name that Python {version[0]}.{version[1]} could "
            "import, and code of one version of Python does not run in another",
            expected="a function of a module or a file",
            do="Define it at the top of a file and pass it, or run memplan measure --dry FILE.py:function",
        )
    import cloudpickle

    try:
        return Packed(code=cloudpickle.dumps(build))
    except Exception as error:  # as above
        raise UsageError(
            f"build cannot be sent to another process ({type(error).__name__}: {error})",
            expected="a function that makes model, data and optimizer itself",
            do="Move what it takes from outside into it",
        ) from None


def unpacked(build: Packed) -> Any:
    """Restore a serialized build in this process: unpickle it, or import its module and look it up by name."""
    if build.data is not None or build.code is not None:
        return pickle.loads(build.data or build.code or b"")
    module = _import_module_of(build)
    try:
        return operator.attrgetter(build.name)(module)
    except AttributeError:
        raise TargetError(f"{build.module} has no {build.name!r} there", expected="the same module in both") from None


def _import_module_of(build: Packed) -> Any:
    """Import the module of a build by its name, or its file under that name if this process cannot find it."""
    try:
        if build.module != "__main__":
            return importlib.import_module(build.module)
    except ModuleNotFoundError as error:
        is_own_name = f"{build.module}.".startswith(f"{error.name or ''}.")  # else a module that it imports is missing
        if build.file is None or not is_own_name:
            raise
    assert build.file is not None, "packed so"
    name = "memplan_dry_target" if build.module == "__main__" else build.module
    return module_from_file(name, Path(build.file))
