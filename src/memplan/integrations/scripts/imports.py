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
def library_imports_unrecorded(folder: str) -> Iterator[None]:
    """Within this context, import libraries outside of the recording; at its end, forget the script's own modules.

    Tensors that a library creates on import are real and stay for all runs. Modules below the script's folder run again
    in the next run, as their tensors belong to the recording of the current run.
    """
    with _torch.no_modes():
        pass  # its first use imports modules, which would fail in the middle of another import
    before = set(sys.modules)
    execute = SourceFileLoader.exec_module
    root = os.path.join(os.path.realpath(folder), "")

    def is_own(file: object) -> bool:
        """Return whether a module's file lies below the script's folder and belongs to no installed package."""
        return isinstance(file, str) and os.path.realpath(file).startswith(root) and "-packages" not in file

    def execute_unrecorded(loader: Any, module: ModuleType) -> None:
        """Run a module's code as the import system does, a library's outside of the recording."""
        if is_own(loader.path):
            return execute(loader, module)
        with _torch.no_modes():
            return execute(loader, module)

    try:
        with _torch.patched(SourceFileLoader, exec_module=execute_unrecorded):
            yield
    finally:
        for name in [name for name in sys.modules if name not in before]:
            if is_own(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
