"""Files that commands read and write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from memplan.errors import InputError

GIVEN = "memplan.arguments"
"""Key of the context's ``meta`` under which the arguments of the command stand as typed."""


def is_trace(target: str) -> bool:
    """Return whether a target is a file that --trace wrote, by its name or by how it begins."""
    return target.endswith(".json") or begins_as_trace(target)


def begins_as_trace(target: str) -> bool:
    """Return whether a file begins as those that --trace wrote."""
    try:
        with open(target, encoding="utf-8") as file:
            return file.read(24).startswith('{"format":"memplan.trace')
    except (OSError, ValueError):
        return False


class OutputFile(click.ParamType):
    """A file that the command writes: checked before the work for it is done, and then an absolute path.

    A build that changes the directory does not change where the file goes. ``-`` is stdout.
    """

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path without links in it.

        Raises:
            InputError: as `writable` says.
        """
        option = param.opts[0] if param is not None else "the output"
        return writable(value, option, () if ctx is None else ctx.meta.get(GIVEN, ()))


OUTPUT = OutputFile()


def writable(path: str, option: str, given: Sequence[str] = ()) -> str:
    """See that a file can be written, and return its path without links in it; ``-`` as it is.

    Args:
        path: as typed.
        option: what it was given for.
        given: all arguments of the command; none of the others may name the same file.

    Raises:
        InputError: its folder does not exist or takes no new file, it is a folder itself, source code, or a file that
            another argument names.
    """
    if path == "-":
        return path
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    others = list(given)
    for own in (path, f"{option}={path}"):
        if own in others:
            others.remove(own)
            break
    if (reason := _unreachable(path)) is not None:
        found = f"{option} {path}: {reason}"
    elif os.path.isdir(real):
        found = f"{option} {path} is a folder"
    elif not os.path.isdir(folder):
        found = f"{option} {path}: there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        found = f"{option} {path}: the folder {folder} cannot be written to"
    elif (other := next((one for one in others if _names(one, real)), None)) is not None:
        raise InputError(
            f"{option} {path}: another argument, {other}, names the same file",
            expected="a file of its own for each output",
            do="Name another",
        )
    elif option != "--python" and real.lower().endswith(".py") and os.path.exists(real):
        found = f"{option} {path} is source code"
    else:
        return real
    raise InputError(found, expected="a file in a folder that can be written to", do="Choose another path")


def _unreachable(path: str) -> str | None:
    """Return why a path leads nowhere: a loop of links, a name that is too long; None where it does not."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _names(argument: str, real: str) -> bool:
    """Return whether an argument names a file: alone, behind an option's ``=``, or with ``:callable`` or ``#point``."""
    texts = {argument, argument.partition("=")[2]}
    texts |= {text.rpartition(mark)[0] for text in tuple(texts) for mark in ":#"}
    try:
        return any(text and os.path.realpath(text) == real for text in texts)
    except (OSError, ValueError):
        return False


def write(path: str, text: str) -> None:
    """Write a file in one move; ``-`` is stdout."""
    from memplan._text import write_whole

    if path == "-":
        sys.stdout.write(text)
    else:
        write_whole(path, text)


@dataclass(frozen=True)
class ResultFiles:
    """Files of a command's result, ``--json`` and ``--html``; None for those not asked for."""

    json: str | None = None
    html: str | None = None

    def checked(self) -> ResultFiles:
        """Return the same.

        Raises:
            InputError: a page for stdout.
            UsageError: what makes pages is not installed.
        """
        if self.html == "-":
            raise InputError("--html -", expected="a file: a page of some megabytes is for a browser", do="Name one")
        if self.html is not None:
            from memplan.reports.html.page import check_installed

            check_installed("--html")
        return self

    @property
    def takes_stdout(self) -> bool:
        """Return whether the JSON is on stdout, which then holds nothing else."""
        return self.json == "-"

    def write(self, dumps: Callable[[], str]) -> None:
        """Write a result to the files that were asked for; ``dumps`` returns its JSON text."""
        if self.json is None and self.html is None:
            return
        content = dumps()
        if self.json is not None:
            write(self.json, content)
        if self.html is not None:
            from memplan.reports.html.page import page_of
            from memplan.reports.html.saved_results import result_of

            write(self.html, page_of([result_of(content, "the result")]))
