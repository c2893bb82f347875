"""Lines whose number C code reads without a call of its methods, so that no stand-in sees it: indices of lists."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from memplan.trace.recording.place import is_users, local_variables

_LISTS = (list, tuple, str, bytes, range)
_READERS = ("numpy", "itertools")
"""Modules whose functions read numbers in C."""


_COMPUTES = (ast.Call, ast.BinOp, ast.UnaryOp)
_PRINTS = frozenset({
    "print", "debug", "info", "warning", "error", "critical", "exception", "log", "write", "set_description",
    "set_postfix", "add_scalar", "append",
})  # fmt: skip
"""Functions and methods that are given a number's text to be read by people."""


def is_printed() -> bool:
    """Return whether the user's line only prints what its numbers are written as."""
    frame = _users_frame()
    return frame is not None and frame.f_lineno in _prints(frame.f_code.co_filename)


def readers() -> Iterator[Any]:
    """Yield what reads the number in C that the user's line computes.

    In the same statement, or in the same function by the name that it is assigned to. A number that is handed to
    another function, or kept in an object, is not seen.
    """
    frame = _users_frame()
    if frame is not None:
        for node, is_operand in _uses(frame.f_code.co_filename).get(frame.f_lineno, ()):
            value = _value(node, frame)
            if isinstance(value, float) if is_operand else _reads(value):
                yield value


def _users_frame() -> FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _reads(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", kind.__module__)
    of_module = isinstance(module, str) and module.partition(".")[0] in _READERS
    return of_module or isinstance(value, _LISTS) or any(value is one for one in (enumerate, bytes, bytearray))


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what a name stands for, or an attribute of one; None where that is not there yet."""
    if isinstance(node, ast.Name):
        places = (local_variables(frame), frame.f_globals, vars(builtins))
        return next((one[node.id] for one in places if node.id in one), None)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    return None


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@functools.cache
def _prints(file: str) -> frozenset[int]:
    calls = [one for one in ast.walk(_tree(file)) if isinstance(one, ast.Call)]
    names = [(one, getattr(one.func, "id", getattr(one.func, "attr", None))) for one in calls]
    return frozenset(line for call, name in names if name in _PRINTS for line in _lines(call))


@functools.cache
def _uses(file: str) -> Mapping[int, tuple[tuple[ast.expr, bool], ...]]:
    """Return by line what is subscripted or called with what the line computes, or is an operand to the left of it."""
    tree = _tree(file)
    found = defaultdict[int, list[tuple[ast.expr, bool]]](list)
    for function in (one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.Lambda, ast.Module))):
        nodes = list(_within(function))
        given = [(one, one.value, [one.slice]) for one in nodes if isinstance(one, ast.Subscript)]
        given += [(one, one.func, [*one.args, *one.keywords]) for one in nodes if isinstance(one, ast.Call)]
        given += [(one, one.left, [one.right]) for one in nodes if isinstance(one, ast.BinOp)]
        given += [(one, one.left, one.comparators) for one in nodes if isinstance(one, ast.Compare)]
        assigned = defaultdict[str, list[int]](list)
        for node in nodes:
            for name, lines in _assigned(node):
                assigned[name] += lines
        for node, of, arguments in given:
            inner = [one for argument in arguments for one in ast.walk(argument)]
            lines = _lines(node) if any(isinstance(one, _COMPUTES) for one in inner) else []
            lines += [line for one in inner if isinstance(one, ast.Name) for line in assigned[one.id]]
            for line in lines:
                found[line].append((of, isinstance(node, (ast.BinOp, ast.Compare))))
    return {line: tuple(of) for line, of in found.items()}


def _within(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function consists of, without the functions in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield from _within(node)


def _assigned(node: ast.AST) -> Iterator[tuple[str, list[int]]]:
    """Yield each name that a statement assigns, and the lines of the value."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.comprehension, ast.NamedExpr)):
        targets = [node.target]
    value: Any = getattr(node, "iter", getattr(node, "value", None))
    for one in (name for target in targets for name in ast.walk(target)):
        if isinstance(one, ast.Name) and value is not None:
            yield one.id, _lines(value)


def _lines(node: ast.expr) -> list[int]:
    return list(range(node.lineno, (node.end_lineno or node.lineno) + 1))
