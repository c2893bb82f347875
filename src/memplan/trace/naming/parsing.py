"""Parses texts of options into values, and offers near names in error messages."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memplan.errors import InputError

_WORDS = {"true": True, "false": False, "none": None}


def literal(text: str) -> Any:
    """Return the value of a Python literal, else the text; ``true``, ``false``, ``none`` in any case.

    Example:
        >>> literal("8"), literal("1e-3"), literal("(16, 32)"), literal("false"), literal("batch")
        (8, 0.001, (16, 32), False, 'batch')
    """
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


def named(pairs: Iterable[str], option: str) -> dict[str, str]:
    """Parse ``["a=1", "b=2"]`` to ``{"a": "1", "b": "2"}``. Raises InputError: no "=", no name, a name twice."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise InputError(f"{option} {pair!r}", expected=f"{option} name=value", do="Write it so")
        if name in values:
            raise InputError(
                f"{option} {name} was given twice ({values[name]} and {value})", expected="it once", do="Leave one out"
            )
        values[name] = value
    return values


def keywords(text: str, option: str) -> dict[str, Any]:
    """Parse ``"lr=0.1,betas=(0.9,0.95)"`` to ``{"lr": 0.1, "betas": (0.9, 0.95)}``. Raises InputError if ``text`` is no
    such list."""
    try:
        call = ast.parse(f"f(\n{text}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)  # "a=1)(b=2" would parse as f(a=1)(b=2)
        or call.args
        or any(word.arg is None for word in call.keywords)
    ):
        raise InputError(f"{option} options {text!r}", expected="name=value,name=value", do="Write them so")
    return {str(word.arg): literal(ast.unparse(word.value)) for word in call.keywords}


def offer(name: str, among: Iterable[str]) -> str:
    """Return ``Did you mean x?``, or a list of the names if none is near; "" for no names."""
    names = sorted(set(among))
    near = difflib.get_close_matches(name, names, n=3)
    if not near:
        lowered = {other.lower(): other for other in names}
        near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3)]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if not names:
        return ""
    return f"There is {_first_ten(names)}"


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a callable by name, or None if it has no signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, title: str, option: str, first: int = 0
) -> None:
    """Check that a callable accepts these keyword arguments and requires no others.

    Args:
        option: the option that the arguments came from: ``--arg``.
        first: number of leading parameters that get positional arguments.

    Raises:
        InputError: an unknown argument, or a missing required one.
    """
    known = parameters(function)
    if known is None:
        return
    kinds = inspect.Parameter
    variadic = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    names = [name for name, parameter in known.items() if parameter.kind not in variadic][first:]
    takes_any = any(parameter.kind is kinds.VAR_KEYWORD for parameter in known.values())
    settable = [name for name in names if known[name].kind is not kinds.POSITIONAL_ONLY]
    for name in arguments:
        if name not in settable and not takes_any:
            near = difflib.get_close_matches(name, settable, n=1)
            raise InputError(
                f"{title} has no argument {name!r}",
                expected=f"one of {_first_ten(settable)}" if settable else "none: it takes no arguments",
                do=offer(name, settable) if near else f"Change {option}, or leave it out",
            )
    missing = [name for name in names if known[name].default is kinds.empty and name not in arguments]
    if missing:
        raise InputError(
            f"{title} needs {_first_ten(missing)}, without a default",
            expected="a value for each argument without a default",
            do=f"Give {' '.join(f'{option} {name}=VALUE' for name in missing)}",
        )


def _first_ten(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
