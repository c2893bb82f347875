"""Classify objects: plain values, containers, arrays, objects compared by identity."""

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

from memplan.planning.capture.reads.executed import is_user_code

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
         torch.memory_format, enum.Enum)  # fmt: skip
"""Types of immutable values."""
MISSING: Any = object()


_ENUM_ATTRIBUTES = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, or of another immutable type in `PLAIN`. Values of their subclasses
    with attributes, which could change, are not plain."""
    if not isinstance(value, PLAIN):
        return False
    attributes = getattr(value, "__dict__", None)
    if not isinstance(value, enum.Enum):
        return attributes is None
    member: Any = value
    return _ENUM_ATTRIBUTES.issuperset(attributes or ()) and _is_plain_or_tuple(member._value_)


def _is_plain_or_tuple(value: Any) -> bool:
    """Return whether a value is plain, or a tuple of plain values at any depth."""
    return is_plain(value) or (type(value) is tuple and all(map(_is_plain_or_tuple, value)))


def value_key(value: Any) -> Hashable:
    """Return a hashable key of a plain value: its type and value, where NaN equals itself and -0.0 is not 0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value


class Identity:
    """Identity of an object, by weak reference where the type allows. After the object is freed it equals nothing."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, Identity) and mine is not None and mine is other._ref()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def wrapped_parts(value: Any) -> tuple[Any, ...] | None:
    """Return the functions and arguments that a partial, property or method object wraps, else None."""
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if isinstance(value, property):
        return value.fget, None
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    return None


def iterate_builtin(container: Any) -> Iterator[Any]:
    """Iterate over a container by its builtin base class, ignoring overrides."""
    bases: tuple[Any, ...] = (tuple, list, set, frozenset, collections.deque)
    return next(base.__iter__(container) for base in bases if isinstance(container, base))


def cell_content(cell: Any) -> Any:
    """Return the content of a closure cell; MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return MISSING


def imported_modules(names: Iterable[str], package: str) -> Iterator[str]:
    """Yield the full names of the imported modules that ``names`` may refer to in code of a package, relative or
    absolute. Modules of torch and the standard library are left out."""
    parents = [package]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    for name in names:
        for parent in parents:
            full_name = f"{parent}.{name}" if parent and name else parent or name
            module = sys.modules.get(full_name)
            if module is not None and is_user_code(vars(module)):
                yield full_name


@functools.lru_cache(4096)
def dict_of(kind: type) -> dict[str, Any]:
    """Return the dict behind the proxy that is a class's ``__dict__``."""
    referents = gc.get_referents(vars(kind))
    return referents[0] if len(referents) == 1 and type(referents[0]) is dict else dict(vars(kind))


@functools.lru_cache(4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and its base classes, with private names mangled."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


@functools.lru_cache(4096)
def has_relevant_attributes(kind: type) -> bool:
    """Return whether captured code may read attributes of a class: a user's, a library's, or a torch layer."""
    module = module_of(kind)
    is_layer = module.startswith("torch.nn.") and kind is not nn.Module
    return is_layer or is_user_code({"__name__": module})


_COMPARED_BY_IDENTITY = frozenset({
    "_io", "_thread", "asyncio", "io", "logging", "multiprocessing", "re", "socket", "subprocess", "unittest",
})  # fmt: skip


@functools.lru_cache(4096)
def is_compared_by_identity(kind: type) -> bool:
    """Return whether objects of a class are compared by identity: loggers, locks, files."""
    return module_of(kind).partition(".")[0] in _COMPARED_BY_IDENTITY or kind is dataclasses.Field


def module_of(kind: type) -> str:
    """Return the name of the module of a class, or the empty string."""
    module = kind.__module__  # can be any object for classes written in C
    return module if isinstance(module, str) else ""


def _settings_of(module: str, read: Callable[[Any], Any]) -> Callable[[], str]:
    """Return a function that returns the text of a module's settings; "" while it is not imported."""
    return lambda: repr(read(sys.modules[module])) if module in sys.modules else ""


HIDDEN_STATES: dict[str, Callable[[], Hashable]] = {
    "decimal": _settings_of("decimal", lambda decimal: decimal.getcontext()),
    "numpy": _settings_of("numpy", lambda numpy: (numpy.geterr(), numpy.get_printoptions())),
    "getrecursionlimit": sys.getrecursionlimit,
    "get_num_threads": torch.get_num_threads, "get_num_interop_threads": torch.get_num_interop_threads,
    "initial_seed": torch.initial_seed, "active_count": threading.active_count, "get_ident": threading.get_ident,
    "current_thread": lambda: threading.current_thread().name,
}  # fmt: skip
"""Functions that read state of the process hidden in C, by the module or function through which code reads it."""


_HEAP_TYPE = 1 << 9
"""Flag of types that Python code defines (Py_TPFLAGS_HEAPTYPE in CPython's object.h)."""


def virtual_subclasses(kind: Any) -> Hashable:
    """Return weak references to the virtual subclasses (``ABC.register``) of an abstract class and of its subclasses.
    ``isinstance`` depends on them.

    Types of extension modules that are registered with the standard library's classes do not count. Each module that
    Cython wrote registers some with ``Sequence`` when it is imported, which any call may do.
    """
    registered, queue = set[Any](), [kind]
    while queue:
        subclass = queue.pop()
        queue += type.__subclasses__(subclass)
        if isinstance(subclass, abc.ABCMeta):
            is_standard = module_of(subclass).partition(".")[0] in sys.stdlib_module_names
            registered |= {
                reference for reference in _get_dump(subclass)[0]
                if not is_standard or getattr(reference(), "__flags__", 0) & _HEAP_TYPE
            }  # fmt: skip
    return frozenset(registered)


def state_reader(value: Any) -> Callable[[], Any] | None:
    """Return a function that reads the state of a logger or of a `multiprocessing` value in shared memory. None for
    other objects."""
    if isinstance(value, logging.Logger):
        return lambda: (value.getEffectiveLevel(), value.disabled, value.manager.disable)
    if module_of(type(value)) == "multiprocessing.sharedctypes":
        return lambda: bytes(memoryview(value.get_obj()))
    return None


_MAX_CACHED = 256
"""Most results of a functools cache that are compared; of larger caches only the size is."""


def cached_results(cache: Any) -> list[Any]:
    """Return the results that a function decorated by `functools.cache` has cached. For `functools.lru_cache` these are
    its link objects, which hide the results. Empty for more than `_MAX_CACHED`."""
    if cache.cache_info().currsize > _MAX_CACHED:
        return []
    # The dict of results is an attribute in C: the garbage collector knows it.
    tables = [table for table in gc.get_referents(cache) if isinstance(table, dict) and table is not vars(cache)]
    return [result for table in tables for result in table.values()]


POINTER: Any = ctypes.POINTER(ctypes.c_int).__base__
"""Base class of ctypes pointers, whose targets have unknown size."""
_BUFFERS: tuple[Any, ...] = (bytearray, memoryview, array.array, mmap.mmap, ctypes.Structure.__base__)
_LARGEST_ARRAY = 1 << 24
"""Largest array in bytes that is compared by value in each call; larger arrays are compared by identity."""


def buffer_reader(value: Any) -> Callable[[], Any] | None:
    """Return a function that reads the content of a buffer such as a numpy array, to be compared with ``==``. None for
    objects that are no buffers."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.nbytes > _LARGEST_ARRAY:
            identity = Identity(value)
            return lambda: (identity, value.dtype.str, value.shape)
        return lambda: (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, _BUFFERS):
        return lambda: bytes(memoryview(value))
    return None


def array_objects(value: Any) -> list[Any] | None:
    """Return the elements of a numpy array of objects, None for other values."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return value.ravel().tolist()
    return None
