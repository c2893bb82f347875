"""Tell kinds of objects apart: which are plain values, which have content that Python sees, which do not count."""

from __future__ import annotations

import abc
import array
import collections
import ctypes
import dataclasses
import enum
import functools
import gc
import logging
import mmap
import sys
import threading
import weakref
from _abc import _get_dump  # pyright: ignore[reportMissingImports, reportMissingModuleSource, reportUnknownVariableType]  # of CPython
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memplan.planning.capture.reads.executed import code_counts

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
         torch.memory_format, enum.Enum)  # fmt: skip
"""Types of immutable values."""
MISSING: Any = object()


_OF_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})


def is_plain(value: Any) -> bool:
    """Return whether a value is immutable: one of `PLAIN` without attributes of its own that could change."""
    if not isinstance(value, PLAIN):
        return False
    own = getattr(value, "__dict__", None)
    if not isinstance(value, enum.Enum):
        return own is None
    member: Any = value
    return _OF_MEMBERS.issuperset(own or ()) and _is_immutable(member._value_)


def _is_immutable(value: Any) -> bool:
    return is_plain(value) or (type(value) is tuple and all(map(_is_immutable, value)))


def told(value: Any) -> Hashable:
    """Return the key of a plain value, its type and value: NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value


class Itself:
    """Identity of an object. It keeps the object alive only if that has no weak references; then it equals nothing once
    the object is gone."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, Itself) and mine is not None and mine is other._ref()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def wrapped(value: Any) -> tuple[Any, ...] | None:
    """Return what an object of Python's own wraps: functions and arguments."""
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if isinstance(value, property):
        return value.fget, None
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    return None


def plainly(container: Any) -> Iterator[Any]:
    """Iterate over a container as its base class does, whatever its own class says."""
    bases: tuple[Any, ...] = (tuple, list, set, frozenset, collections.deque)
    return next(base.__iter__(container) for base in bases if isinstance(container, base))


def cell_content(cell: Any) -> Any:
    """Return the content of a function's cell; MISSING where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return MISSING


def imported(names: Iterable[str], package: str) -> Iterator[str]:
    """Yield the modules outside of torch and the standard library that these names in imports can mean."""
    parents = [package]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    for name in names:
        for parent in parents:
            found = f"{parent}.{name}" if parent and name else parent or name
            module = sys.modules.get(found)
            if module is not None and code_counts(vars(module)):
                yield found


@functools.lru_cache(4096)
def dict_of(kind: type) -> dict[str, Any]:
    """Return the dict behind a class's ``__dict__``, which is a proxy of it."""
    found = gc.get_referents(vars(kind))
    return found[0] if len(found) == 1 and type(found[0]) is dict else dict(vars(kind))


@functools.lru_cache(4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the attributes that a class keeps in slots."""
    found = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__]
    names = [(base, name) for base, slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(
        f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for base, name in names
        if name not in ("__dict__", "__weakref__")
    )


@functools.lru_cache(4096)
def is_open_class(kind: type) -> bool:
    """Return whether attributes of a class count: those of users' and libraries' classes and of torch's layers."""
    module = module_of(kind)
    layer = module.startswith("torch.nn.") and kind is not nn.Module
    return layer or code_counts({"__name__": module})


_CLOSED = frozenset({
    "_io", "_thread", "asyncio", "io", "logging", "multiprocessing", "re", "socket", "subprocess", "unittest",
})  # fmt: skip


@functools.lru_cache(4096)
def is_closed(kind: type) -> bool:
    """Return whether objects of a class are compared by identity: loggers, locks, files and the like."""
    return module_of(kind).partition(".")[0] in _CLOSED or kind is dataclasses.Field


def module_of(kind: type) -> str:
    """Return the name of the module of a class; empty where it has none."""
    found = kind.__module__  # of classes that C makes it can be anything
    return found if isinstance(found, str) else ""


def _of_decimal() -> str:
    decimal = sys.modules.get("decimal")
    return "" if decimal is None else repr(decimal.getcontext())


def _of_numpy() -> str:
    numpy = sys.modules.get("numpy")
    return "" if numpy is None else repr((numpy.geterr(), numpy.get_printoptions()))


STATES: dict[str, Callable[[], Hashable]] = {
    "decimal": _of_decimal, "numpy": _of_numpy, "getrecursionlimit": sys.getrecursionlimit,
    "get_num_threads": torch.get_num_threads, "get_num_interop_threads": torch.get_num_interop_threads,
    "initial_seed": torch.initial_seed, "active_count": threading.active_count, "get_ident": threading.get_ident,
    "current_thread": lambda: threading.current_thread().name,
}  # fmt: skip
"""State of the process that only functions of C know, by the module or the function that reads it."""


def registered(kind: Any) -> Hashable:
    """Return the classes that are registered as subclasses of an abstract class and its subclasses, by weak reference:
    ``isinstance`` is true for their objects, and no class says so."""
    found, ahead = set[Any](), [kind]
    while ahead:
        one = ahead.pop()
        ahead += type.__subclasses__(one)
        if isinstance(one, abc.ABCMeta):
            found |= _get_dump(one)[0]
    return frozenset(found)


def state_of(value: Any) -> Callable[[], Any] | None:
    """Return what reads the state of an object of the standard library that is compared by identity otherwise: of
    loggers and values in shared memory. None of any other."""
    if isinstance(value, logging.Logger):
        return lambda: (value.getEffectiveLevel(), value.disabled, value.manager.disable)
    if module_of(type(value)) == "multiprocessing.sharedctypes":
        return lambda: bytes(memoryview(value.get_obj()))
    return None


_MOST_CACHED = 256
"""Results of a cache of functools that are looked at; of more, only their number."""


def cached_results(cache: Any) -> list[Any]:
    """Return what a function wrapped by `functools.cache` has stored; for `functools.lru_cache` the entries, which hide
    their results: another entry may have another result."""
    if cache.cache_info().currsize > _MOST_CACHED:
        return []
    tables = [table for table in gc.get_referents(cache) if isinstance(table, dict) and table is not vars(cache)]
    return [result for table in tables for result in table.values()]


POINTER: Any = ctypes.POINTER(ctypes.c_int).__base__
"""Class of pointers of ctypes: what they point to has no end that Python knows."""
_BUFFERS: tuple[Any, ...] = (bytearray, memoryview, array.array, mmap.mmap, ctypes.Structure.__base__)
_LARGEST_ARRAY = 1 << 24
"""Bytes of an array that are compared in each call; of a larger one it is seen only that it is another one."""


def memory_of(value: Any) -> Callable[[], Any] | None:
    """Return what reads an object whose content is memory, such as an array of numpy's; None of any other."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.nbytes > _LARGEST_ARRAY:
            itself = Itself(value)
            return lambda: (itself, value.dtype.str, value.shape)
        return lambda: (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, _BUFFERS):
        return lambda: bytes(memoryview(value))
    return None


def objects_of(value: Any) -> list[Any] | None:
    """Return the elements of an array of objects; None of anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return value.ravel().tolist()
    return None
