"""From the text of an option to a value, and the words for a text that is none."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memplan.errors import InputError

_WORDS = {"true": True, "false": False, "none": None}


def literal(text: str) -> Any:
    """Return a Python literal where the text is one, else the text; ``true``, ``false``, ``none`` in any case.

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
    """Read ``["a=1", "b=2"]`` as ``{"a": "1", "b": "2"}``.

    Raises:
        InputError: no "=", no name, a name twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise InputError(f"{option} {pair!r}", expected=f"{option} name=value", do="Write it so")
        if name in found:
            raise InputError(
                f"{option} {name} was given twice ({found[name]} and {value})",
                expected="it once",
                do="Leave one out",
            )
        found[name] = value
    return found


def keywords(text: str, option: str) -> dict[str, Any]:
    """Read ``"lr=0.1,betas=(0.9,0.95)"`` as ``{"lr": 0.1, "betas": (0.9, 0.95)}``.

    Raises:
        InputError: not such a list.
    """
    try:
        call = ast.parse(f"f(\n{text}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)  # "a=1)(b=2" calls what a call returned
        or call.args
        or any(word.arg is None for word in call.keywords)
    ):
        raise InputError(f"{option} options {text!r}", expected="name=value,name=value", do="Write them so")
    return {str(word.arg): literal(ast.unparse(word.value)) for word in call.keywords}


def offer(name: str, among: Iterable[str]) -> str:
    """Say ``Did you mean x?``, or list the names where none is near; "" where there are none."""
    names = sorted(set(among))
    near = difflib.get_close_matches(name, names, n=3)
    if not near:
        lowered = {other.lower(): other for other in names}
        near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3)]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if not names:
        return ""
    return f"There is {_listed(names)}"


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a callable by name; None where Python cannot see them."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def check_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], *, title: str, option: str, first: int = 0
) -> None:
    """See that a callable takes the keyword arguments given, and that it needs no others.

    Args:
        function: the callable.
        given: its arguments by name.
        title: what to call it.
        option: the option that the arguments came from: ``--arg``.
        first: how many positional arguments it gets besides.

    Raises:
        InputError: an argument that it does not have, or one that it needs and does not get.
    """
    known = parameters(function)
    if known is None:
        return
    kinds = inspect.Parameter
    free = [p.name for p in known.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)][first:]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in known.values())
    settable = [name for name in free if known[name].kind is not kinds.POSITIONAL_ONLY]
    for name in given:
        if name not in settable and not takes_any:
            raise InputError(
                f"{title} has no argument {name!r}",
                expected=f"one of {_listed(settable)}" if settable else "none: it takes no arguments",
                do=offer(name, settable) if _is_near(name, settable) else f"Change {option}, or leave it out",
            )
    missing = [name for name in free if known[name].default is kinds.empty and name not in given]
    if missing:
        raise InputError(
            f"{title} needs {_listed(missing)}, without a default",
            expected="a value for each argument without a default",
            do=f"Give {' '.join(f'{option} {name}=VALUE' for name in missing)}",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _is_near(name: str, among: Sequence[str]) -> bool:
    return bool(difflib.get_close_matches(name, among, n=1))
