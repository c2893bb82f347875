"""Modules that a script imports: its own run again in its next run, those of libraries outside of any recording."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from memplan import _torch


@contextmanager
def imports_apart(folder: str) -> Iterator[None]:
    """Tell a script's own modules, those below its folder, from those of libraries.

    What a library makes when it is imported is real and stays for all runs. The script's own modules are forgotten at
    the end: their code runs again in the next run, and the tensors of this one are of no use there.
    """
    with _torch.no_modes():
        pass  # imports what it needs, which it could not in the middle of another import
    before = set(sys.modules)
    execute = SourceFileLoader.exec_module
    root = os.path.join(os.path.realpath(folder), "")

    def is_own(file: object) -> bool:
        return isinstance(file, str) and os.path.realpath(file).startswith(root) and "-packages" not in file

    def executed(loader: Any, module: ModuleType) -> None:
        if is_own(loader.path):
            return execute(loader, module)
        with _torch.no_modes():
            return execute(loader, module)

    try:
        with _torch.patched(SourceFileLoader, exec_module=executed):
            yield
    finally:
        for name in [name for name in sys.modules if name not in before]:
            if is_own(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
