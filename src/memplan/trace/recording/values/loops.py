"""Lines whose number is the length of a loop: `range` takes a number in C, so that no stand-in sees it."""

from __future__ import annotations

import ast
import functools
import linecache
from typing import TypeGuard

from memplan.trace.recording.place import Line


def is_counted_to(frame: Line | None) -> bool:
    """Return whether `range` is called with what a line computes: in the same statement, or in the same function by
    the name that it is assigned to.

    A number that is handed to another function, which loops, is not seen.
    """
    return frame is not None and frame[1] in _lines(frame[0])


@functools.cache
def _lines(file: str) -> frozenset[int]:
    source = "".join(linecache.getlines(file))
    if "range(" not in source:
        return frozenset()
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return frozenset()
    found: set[int] = set()
    functions = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    for function in (tree, *functions):
        calls = [one for one in ast.walk(function) if _is_range(one)]
        names = {one.id for call in calls for one in ast.walk(call) if isinstance(one, ast.Name)} - {"range"}
        for call in calls:
            found.update(range(call.lineno, (call.end_lineno or call.lineno) + 1))
        for one in ast.walk(function) if names and function is not tree else ():
            if isinstance(one, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and names & _targets(one):
                found.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return frozenset(found)


def _is_range(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
