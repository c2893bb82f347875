"""Optimizers that iterate until they converge (`torch.optim.LBFGS`): recorded with all of their iterations."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from types import FrameType

import torch

from memplan._frames import callers
from memplan.trace.recording.place import is_users

_FILE = inspect.getfile(torch.optim.LBFGS)
ITERATES = "an optimizer asked whether it is done, and is taken to make all of its iterations"


def goes_on() -> bool | None:
    """Return the truth value of the running condition for which `torch.optim.LBFGS` continues iterating; None for a
    condition in other code.

    A line search accepts its first step, which leaves the most iterations.
    """
    frame = _frame_of_optimizer()
    if frame is None:
        return None
    would_stop = frame.f_code.co_name == "step" and frame.f_lineno in _ends()
    return not would_stop


def is_optimizing() -> bool:
    """Return whether the optimizer's own code is running, rather than the closure that it calls."""
    return _frame_of_optimizer() is not None


def _frame_of_optimizer() -> FrameType | None:
    """Return the innermost frame of `torch.optim.LBFGS`'s own code, unless it called the user's closure since."""
    for frame in callers():
        if frame.f_code.co_filename == _FILE:
            return frame
        if is_users(frame.f_code.co_filename):
            return None
    return None


@functools.cache
def _ends() -> frozenset[int]:
    """Return the lines of LBFGS's file with a condition to stop: its body is a single ``break`` or ``return``."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(Path(_FILE).read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], (ast.Break, ast.Return)):
            lines.update(range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1))
    return frozenset(lines)
