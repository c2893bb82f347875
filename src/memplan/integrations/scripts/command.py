"""The command line of a script or module, as after ``python``."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memplan._display import Printed
from memplan.errors import InputError


@dataclass(frozen=True)
class Command(Printed):
    """A script or a module, and its arguments."""

    target: str
    """Path of a script, or the dotted name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return " ".join((f"-m {self.target}" if self.is_module else self.target, *self.arguments))

    @property
    def name(self) -> str:
        """Return the script's file name, or the module's name."""
        return self.target if self.is_module else os.path.basename(self.target.rstrip("/"))

    @property
    def folder(self) -> str:
        """Return the folder that the script imports from first."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.abspath(self.target))

    def checked(self) -> Command:
        """Return this command, after checking that the script exists. Raises InputError if there is no such file."""
        if not self.is_module and not os.path.exists(self.target):
            folder = Path(self.target).parent
            near = sorted(str(path) for path in folder.glob("*.py")) if folder.is_dir() else []
            raise InputError(
                f"there is no file {self.target}",
                expected="a script, as after python, or -m and a module",
                do=f"Name one, such as {near[0]}" if near else "Check the path and the working directory",
            )
        return self

    def execute(self) -> None:
        """Run the script or module as ``__main__``, as ``python`` does. Its exceptions are not caught."""
        with _process_state(self):
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(self.target), run_name="__main__")


@contextmanager
def _process_state(command: Command) -> Iterator[None]:
    """Set arguments and import path as ``python`` does; at exit restore these, folder and environment."""
    arguments, path, folder, variables = sys.argv, sys.path[:], os.getcwd(), dict(os.environ)
    sys.argv = [command.target, *command.arguments]
    sys.path[:] = [command.folder, *path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
