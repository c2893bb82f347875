"""Parse the values of an axis from text: ``1,2,4,8``, ``64:256:32``, ``fp32,bf16``, ``(3,3),(5,5)``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from memplan.errors import InputError
from memplan.trace.naming.parsing import literal

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?", re.ASCII)
_LONGEST = 100
"""Most characters of a range."""
_MOST = 10_000
"""Most values of a range."""


def values_of(values: Any, name: str) -> tuple[Any, ...]:
    """Return the distinct values of an axis, in their order.

    Args:
        values: an iterable of values, or text: values joined by commas, each a Python literal, a word, or a range
            ``first:last`` or ``first:last:step`` that includes its end.
        name: name of the axis or option in messages.

    Raises:
        InputError: no values, or an empty or reversed range.

    Example:
        >>> values_of("64:160:32", "size"), values_of("fp32,bf16", "precision"), values_of("(3,3),5", "kernel")
        ((64, 96, 128, 160), ('fp32', 'bf16'), ((3, 3), 5))
    """
    if isinstance(values, str):
        listed = [value for part in parts_of(values, name) for value in _parse(part, name)]
    else:
        listed = list(values) if isinstance(values, Iterable) else [values]
    if not listed:
        raise InputError(f"{name} has no values", expected="at least one, as in 1,2,4 or 64:256:32", do="Give some")
    distinct: list[Any] = []
    for value in listed:
        if not any(value == other and type(value) is type(other) for other in distinct):  # lists are not hashable
            distinct.append(value)
    return tuple(distinct)


def parts_of(text: str, name: str) -> Iterator[str]:
    """Split text at the commas that are not in brackets; messages call it ``name``. Raises InputError: an empty part,
    or an open bracket."""
    depth, begin = 0, 0  # number of open brackets; index at which the present part begins
    for index, character in enumerate(f"{text},"):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            part = text[begin:index].strip()
            if not part:
                raise InputError(
                    f"{name} {text!r} has an empty value", expected="values joined by commas, as in 1,2,4", do="Fill it"
                )
            yield part
            begin = index + 1
    if depth > 0:
        raise InputError(f"{name} {text!r} has an open bracket", expected="each bracket closed", do="Close it")


def _parse(part: str, name: str) -> Iterable[Any]:
    """Return the values of a range ``first:last:step``, or the single value that the text is."""
    match = _RANGE.fullmatch(part)
    if match is None:
        return [literal(part)]
    if len(part) > _LONGEST:
        raise InputError(f"{name} {part:.40}... is a range of long numbers", expected="first:last:step", do="Change it")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step == 0:
        raise InputError(
            f"{name} {part} has a step of 0", expected="first:last:step with a step above 0", do="Change it"
        )
    if step < 0 or last < first:
        raise InputError(
            f"{name} {part} is {'reversed' if last < first else 'a range with a negative step'}, and so empty",
            expected="first:last:step, with the smaller end first and a step above 0",
            do=f"Write {min(first, last)}:{max(first, last)}:{abs(step)}",
        )
    if (last - first) // step >= _MOST:
        raise InputError(
            f"{name} {part} has {(last - first) // step + 1} values", expected=f"at most {_MOST}", do="Raise the step"
        )
    return range(first, last + 1, step)
