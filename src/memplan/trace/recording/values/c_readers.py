"""Functions of C that read a number's digits themselves, so that no method of a stand-in is called."""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from memplan import _torch
from memplan.trace.recording.place import is_users
from memplan.trace.recording.values.intervals import computed
from memplan.trace.recording.values.numbers import (
    becomes_plain,
    becomes_size,
    decides,
    is_standin,
    of_range,
    plain,
    range_of,
)

_RANGE = range
_CHECKS = ("isfinite", "isinf", "isnan")
_CHECKED = "is checked for nan or inf, and taken to be neither"


@contextmanager
def math_seen() -> Iterator[None]:
    """Answer `range` and the functions of `math` where they are given numbers that stand for others.

    Functions that a module has imported by name are replaced there, too.
    """
    functions = [name for name, value in vars(math).items() if callable(value) and not name.startswith("_")]
    instead = {id(getattr(math, name)): _seen(name) for name in functions}
    with ExitStack() as stack:
        stack.enter_context(_torch.patched(builtins, range=_Range))
        for module in [math, *filter(_may_compute, list(sys.modules.values()))]:
            if not instead.keys().isdisjoint(map(id, list(vars(module).values()))):
                found = {name: instead[id(one)] for name, one in list(vars(module).items()) if id(one) in instead}
                stack.enter_context(_torch.patched(module, **found))
        yield


def _may_compute(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(".py") and is_users(file)


class _RangeType(type):
    """Counts as `range`, whose instances it makes."""

    def __call__(cls, *args: Any) -> Any:
        unknown = [one for one in args if is_standin(one)]
        if len(unknown) == 2 == len(args) and len({one.origin[0] for one in unknown}) == 1:  # from i to i + 8
            return _RANGE(*args)
        for one in unknown:
            becomes_plain(one)
            becomes_size(one)
        if len(args) > 1 and is_standin(args[0]) and args[0].low is not None:  # from as low as can be
            args = (args[0].low, *args[1:])
        return _RANGE(*args)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _RANGE)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _RANGE)


class _Range(metaclass=_RangeType):
    """Stands in for `range`: a number becomes the length of a loop."""


def _seen(name: str) -> Callable[..., Any]:
    function = getattr(math, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        leaves = [leaf for one in args for leaf in (one if isinstance(one, (list, tuple)) else [one])]
        unknown = [one for one in leaves if is_standin(one)]
        if not unknown:
            return function(*args, **kwargs)
        result = function(*map(_plain, args), **kwargs)
        if isinstance(result, tuple):
            return tuple(of_range(one, None, unknown) for one in result)
        if not isinstance(result, bool):
            return of_range(result, computed(name, *map(range_of, args)), unknown)
        if name not in _CHECKS:
            return decides(result, *unknown)
        unknown[0].reader.used(_CHECKED)
        return result

    return call


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return plain(value) if is_standin(value) else value
