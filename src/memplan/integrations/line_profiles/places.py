"""The option ``--lines``, which names functions to profile: ``FILE.py`` or ``FILE.py:FUNCTION``."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from memplan._text import printable
from memplan.errors import InputError
from memplan.explanation.line_profile import LineProfile
from memplan.trace.recording.followed.line_watch import Followed

_EXPECTED = "FILE.py or FILE.py:FUNCTION, such as train.py:Trainer.step"


def parse_lines_option(text: str) -> Followed:
    """Parse the option: return its file, and its function or None for all functions of the file. Raises InputError if
    the file does not exist, is not Python, or has no such function."""
    file, function = _split(text)
    path = Path(file)
    if not path.is_file():
        near = sorted(map(str, path.parent.glob("*.py"))) if path.parent.is_dir() else []
        near = get_close_matches(file, near, 1, 0.0)
        do = f"Name one, such as {near[0]}" if near else "Check the path and the working directory"
        raise InputError(f"--lines {text}: there is no file {file}", expected=_EXPECTED, do=do)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        raise InputError(f"--lines {text}: {file} is not Python", expected=_EXPECTED, do="Name another file") from None
    known = list(_functions(tree, prefix=""))
    if function is not None and not any(function in (name, name.rpartition(".")[2]) for name in known):
        near = get_close_matches(function, known, 3, 0.0)
        raise InputError(
            f"--lines {text}: {file} has no function {function}",
            expected=f"one that it has, such as {', '.join(near)}" if near else "a file with functions",
            do="Name one, or the file alone for all of them",
        )
    return Followed(os.path.realpath(file), function)


def unused_options(texts: Sequence[str], profiles: Sequence[LineProfile]) -> Iterator[str]:
    """Yield a message for each option ``--lines`` whose functions have no profile: no line of them ran."""
    for text in texts:
        file, function = _split(text)
        ran = (profile.function for profile in profiles if os.path.basename(profile.file) == os.path.basename(file))
        if not any(function in (None, name, name.rpartition(".")[2]) for name in ran):
            yield printable(
                f"--lines {text}: no line of it ran. Expected what the script calls until it is ended. "
                "Name another, or see more steps (--steps)."
            )


def _split(text: str) -> tuple[str, str | None]:
    """Return the file and the function of ``FILE.py:FUNCTION``; None without a function."""
    file, colon, function = text.rpartition(":")
    if not colon or function.endswith(".py") or os.sep in function:  # a colon of the path, as in C:\train.py
        return text, None
    return file, function


def _functions(tree: ast.AST, prefix: str) -> Iterator[str]:
    """Yield the qualified names of the functions and methods that are defined below a syntax node. ``prefix`` is the
    qualified name of the node with a dot, "" for a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name
        is_scope = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from _functions(node, f"{prefix}{node.name}." if is_scope else prefix)
