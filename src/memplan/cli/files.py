"""Files that commands read and write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from memplan.errors import InputError

if TYPE_CHECKING:
    from memplan.reports.document import Document

TYPED = "memplan.arguments"
"""Key in ``click.Context.meta`` of the command's arguments as typed."""


def is_trace(target: str) -> bool:
    """Return whether a target is a file that --trace wrote, by its name or its first bytes."""
    return target.endswith(".json") or begins_as_trace(target)


def begins_as_trace(target: str) -> bool:
    """Return whether a file has the first bytes of those that --trace writes."""
    try:
        with open(target, encoding="utf-8") as file:
            return file.read(24).startswith('{"format":"memplan.trace')
    except (OSError, ValueError):
        return False


class OutputFile(click.ParamType):
    """A file that the command writes, checked before anything runs; ``-`` is stdout.

    Its value is an absolute path, as the user's code may change the directory.
    """

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the real path. Raises InputError: see `writable`."""
        option = param.opts[0] if param is not None else "the output"
        return writable(value, option, () if ctx is None else ctx.meta.get(TYPED, ()))


OUTPUT = OutputFile()


def writable(path: str, option: str, typed: Sequence[str] = ()) -> str:
    """Check that a file can be written, and return its real path; ``-`` is returned unchanged. None of ``typed``, the
    other arguments of the command, may name the same file. Raises InputError if its folder does not exist or takes no
    new file, it is a folder itself, source code, or a file that another argument names."""
    if path == "-":
        return path
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    problem = None
    reason = _path_error(path)
    if reason is not None:
        problem = f"{option} {path}: {reason}"
    elif os.path.isdir(real):
        problem = f"{option} {path} is a folder"
    elif not os.path.isdir(folder):
        problem = f"{option} {path}: there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        problem = f"{option} {path}: the folder {folder} cannot be written to"
    if problem is None:
        others = list(typed)
        this_argument = next((text for text in (path, f"{option}={path}") if text in others), None)
        if this_argument is not None:
            others.remove(this_argument)
        same = [argument for argument in others if _names_file(argument, real)]
        if same:
            raise InputError(
                f"{option} {path}: another argument, {same[0]}, names the same file",
                expected="a file of its own for each output",
                do="Name another",
            )
        if option != "--python" and real.lower().endswith(".py") and os.path.exists(real):
            problem = f"{option} {path} is source code"
    if problem is not None:
        raise InputError(problem, expected="a file in a folder that can be written to", do="Choose another path")
    return real


def _path_error(path: str) -> str | None:
    """Return why a path cannot exist, such as a loop of links or a name that is too long; None if it can."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _names_file(argument: str, real: str) -> bool:
    """Return whether an argument names the file ``real``, also in ``--option=``, before ``:callable`` or ``#point``."""
    texts = {argument, argument.partition("=")[2]}
    texts |= {text.rpartition(separator)[0] for text in tuple(texts) for separator in ":#"}
    try:
        return any(text and os.path.realpath(text) == real for text in texts)
    except (OSError, ValueError):
        return False


def write(path: str, text: str) -> None:
    """Write a file atomically; ``-`` is stdout."""
    from memplan._text import write_whole

    if path == "-":
        sys.stdout.write(text)
    else:
        write_whole(path, text)


@dataclass(frozen=True)
class ResultFiles:
    """Paths of ``--json`` and ``--html``; None for options that were not used."""

    json: str | None = None
    html: str | None = None

    def checked(self) -> ResultFiles:
        """Check and return the paths. Raises InputError for ``--html -``, and UsageError if the libraries for pages are
        not installed."""
        if self.html == "-":
            raise InputError("--html -", expected="a file: a page of some megabytes is for a browser", do="Name one")
        if self.html is not None:
            from memplan.reports.html.page import check_installed

            check_installed("--html")
        return self

    @property
    def takes_stdout(self) -> bool:
        """Return whether the JSON goes to stdout, so that nothing else may be printed."""
        return self.json == "-"

    def write(self, dumps: Callable[[], str]) -> None:
        """Write a result to the files. ``dumps`` returns its JSON text."""
        if self.json is None and self.html is None:
            return
        content = dumps()
        if self.json is not None:
            write(self.json, content)
        if self.html is not None:
            from memplan.reports.html.page import page_of
            from memplan.reports.html.saved_results import results_of

            write(self.html, page_of(results_of(content, "the result")))

    def write_and_show(self, dumps: Callable[[], str], report: Callable[[], Document]) -> None:
        """Write a result to the files, and print its report unless its JSON goes to stdout. ``dumps()`` returns the
        JSON, ``report()`` the document."""
        self.write(dumps)
        if not self.takes_stdout:
            from memplan.reports.terminal import show

            show(report())
