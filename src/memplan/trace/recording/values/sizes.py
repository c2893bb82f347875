"""Numbers that are not known, as arguments of torch's functions: which of them are sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.values.intervals import Range, union
from memplan.trace.recording.values.numbers import becomes_size, is_standin, range_of

_VALUES = ("tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor")
"""Functions that make a tensor of numbers."""
_NO_SIZES = frozenset({
    "index", "low", "high", "from", "to", "shifts", "correction", "decimals", "reduction", "padding_idx",
    "ignore_index", "blank",
})  # fmt: skip
"""Integers that are no sizes, whatever the function."""
_NO_SIZES_OF = frozenset({"tril", "triu", "tril_", "triu_"})
"""Functions whose integers are no sizes, though others have sizes under the same names."""
_SIZING_NUMBERS = {
    **dict.fromkeys(("arange", "range"), ("start", "end", "step")),
    **dict.fromkeys(("interpolate", "upsample"), ("scale_factor",)),
    **{f"fractional_max_pool{dims}d{form}": ("output_ratio",) for dims in (2, 3) for form in ("", "_with_indices")},
}
"""Functions whose results are as large as numbers say that need not be whole: the names of these."""
_NO_INTEGERS = ("float", "number", "complex", "bool", "str", "Tensor")
"""Words in the types of other arguments."""
_SHRINKING = ("start", "step", "stride", "dilation", "kernel_size", "hop_length")
"""Arguments that make a result smaller as they grow."""
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Put = Callable[[torch.Tensor, Range | None], None]
"""Told between what the elements of a tensor lie."""
Argument = tuple[str, str, bool, bool]
"""Name, type, whether it can be given by position, and whether it can be left out."""


class SizesByValue:
    """Sees the functions of torch that are given numbers which stand for others.

    Args:
        put: told between what the elements of a tensor lie that is made of such numbers.
    """

    def __init__(self, put: Put) -> None:
        self._put = put

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; say of the numbers among its arguments which become sizes."""
        numbers = [one for one in _leaves((args, tuple(kwargs.values()))) if is_standin(one)]
        if not numbers:
            return func(*args, **kwargs)
        for one in numbers:
            one.seen = True
        name = _torch.function_name(func)
        if name in _VALUES:
            result = func(*args, **kwargs)
            given = args[1 if name == "new_tensor" else 0 :]
            data = given[0] if given else next((kwargs[one] for one in ("data", "obj", "s") if one in kwargs), None)
            self._unknown(result, union([range_of(one) for one in _leaves(data)]))
            return result
        if not name.startswith("__"):  # the numbers of operators are operands
            sizes = sizes_of(func, len(args), len(kwargs))
            args = tuple(_taken(value, sizes.get(place, "")) for place, value in enumerate(args))
            kwargs = {place: _taken(value, sizes.get(place, "")) for place, value in kwargs.items()}
        result = func(*args, **kwargs)
        self._unknown(result, None)
        return result

    def _unknown(self, result: Any, values: Range | None) -> None:
        """What is computed of such a number is as unknown, whatever a fake tensor keeps."""
        if isinstance(result, _torch.FakeTensor) and result.constant is not None:
            result.constant = None
            self._put(result, values)


@functools.cache
def sizes_of(func: Any, positions: int, keywords: int) -> Mapping[int | str, str | None]:
    """Return which arguments of a call are sizes, by position and by keyword: their names, None for other arguments.

    Read from the schemas of torch's ops, and from the signatures of its functions that are written in Python. What is
    not there is a size: each further number of ``x.view(2, 3)``, and all that a function of which nothing is known is
    given.

    Args:
        func: function, method or op of torch.
        positions, keywords: how many arguments are given by position, and by keyword.
    """
    name = _torch.function_name(func).partition(".")[0]
    found: dict[int | str, str | None] = {}
    for form in _forms_that_fit(func, name, positions, keywords):
        for place, (argument, kind, by_position, _) in enumerate(form):
            size = argument if _is_size(name, argument, kind) else None
            for one in (place, argument) if by_position else (argument,):
                found[one] = found.get(one) or size
    return found


def _is_size(name: str, argument: str, kind: str) -> bool:
    if argument in _SIZING_NUMBERS.get(name, ()):
        return True
    integer = "int" in kind or not any(word in kind for word in _NO_INTEGERS)
    return integer and argument not in _NO_SIZES and name not in _NO_SIZES_OF


def _forms_that_fit(func: Any, name: str, positions: int, keywords: int) -> list[list[Argument]]:
    """Return the arguments of the forms of a function that can be called so; of all forms, where none can."""
    forms = _forms(func, name)
    by_position = [[optional for _, _, positional, optional in form if positional] for form in forms]
    fit = [
        form
        for form, optional in zip(forms, by_position, strict=True)
        if positions <= len(optional) and optional.count(False) <= positions + keywords
    ]
    return fit or forms


def _forms(func: Any, name: str) -> list[list[Argument]]:
    func = inspect.unwrap(func)
    if isinstance(func, FunctionType):
        return [[_of_python(one) for one in inspect.signature(func).parameters.values() if one.kind not in _SEVERAL]]
    packet = func if hasattr(func, "overloads") else getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    ops = [func] if hasattr(func, "overloadpacket") else [getattr(packet, one) for one in overloads]
    return [
        [(one.name, str(one.real_type), not one.kwarg_only, one.has_default_value()) for one in _torch.arguments(op)]
        for op in ops
        if "Tensor" in _torch.schema_of(op)
    ]


def _of_python(one: inspect.Parameter) -> Argument:
    optional, of_default = one.default is not one.empty, isinstance(one.default, (float, bool, str))
    given = type(one.default) if one.annotation is one.empty and of_default else one.annotation
    kind = "" if given is one.empty else given.__name__ if isinstance(given, type) else str(given)
    return one.name, kind, one.kind is not one.KEYWORD_ONLY, optional


def _taken(value: Any, name: str | None) -> Any:
    """Return what a value is taken as that is the argument of a name, None if it is no size: as what takes most."""
    if name is not None and isinstance(value, (list, tuple)):
        return [_taken(one, name) for one in value]
    if name is None or not is_standin(value):
        return value
    if name in _SHRINKING and value.low is not None:
        least = value.low if name == "start" else max(value.low, 1)
        becomes_size(value, least)
        return least
    becomes_size(value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value
