"""Fingerprint what a model's Python code can read beside its tensors: attributes, closures, globals.

All of it is read once, by value. From then on the objects at the same places are compared by identity, which is fast;
where one of them is another object, everything is read again.

Attributes of modules are taken whole. Of functions (the model's loss, the ``forward`` of its classes, the functions
that these name) the globals that they load count, and of objects the attributes that their code names. There are
limits: torch, numpy and the standard library count as constant, objects are read to a modest depth and containers to a
modest size, and modules that are not registered are compared by identity.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import operator
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.planning.capture.side_effects import computed

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
         torch.memory_format, enum.Enum)  # fmt: skip
"""Types of immutable values."""
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_DEEPEST = 4
_OBJECT = 2
"""Depth that an object counts for; a function counts for 1, a container for 0."""
_LARGEST = 256
"""Number of a container's elements that are read, the first ones."""
_MOST = 20_000
"""Number of containers and objects that are read."""
_FUNCTIONS = 64
"""Number of functions that are followed from one."""
_LIBRARIES = frozenset({"torch", "numpy", "memplan", "lightning", "pytorch_lightning"})
"""Packages whose code reads only its arguments, and whose objects (optimizers, trainers) change all the time."""
_WHOLE = frozenset({"vars", "__dict__", "asdict"})
"""Names by which code reads all attributes of an object."""
_NAMESPACES = frozenset({"types.SimpleNamespace", "argparse.Namespace"})


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """Readables at one time, by name; equal where they are the same by value."""

    parts: Mapping[str, Hashable]
    hash: int

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Found) and self.hash == other.hash and self.parts == other.parts)

    def __hash__(self) -> int:
        return self.hash

    def differing(self, other: Found) -> list[str]:
        """Return the names of readables that differ; for an object in several places, the first."""
        found = dict[Hashable, str]()
        for name in {**self.parts, **other.parts}:
            pair = self.parts.get(name, _MISSING), other.parts.get(name, _MISSING)
            if pair[0] != pair[1]:
                found.setdefault(pair, name)
        return list(found.values())


class Readable:
    """Read what a model's code can read. The model itself is not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, vars(module), computed(module)) for name, module in model.named_modules()]
        self._classes = dict.fromkeys(type(module) for module in model.modules() if not _is_library(type(module)))
        self._walk, self._last, self._found = _Walk(), list[Any](), None

    def now(self) -> Found:
        """Return the present readables: the same object as the last time where nothing has changed."""
        now = self._walk.read()
        if self._found is None or now is None or not _same(now, self._last):
            self._found = self._look()
        return self._found

    def _look(self) -> Found:
        self._walk = walk = _Walk()
        parts = dict[str, Hashable]()
        for path, own, without in self._modules:
            names = [name for name in _torch.attribute_names(own) if name not in without]
            walk.watch(own, names)
            for name in names:
                parts[f"attribute {name}{f' of {path}' if path else ''}"] = walk.told(own[name])
        for kind in self._classes:
            parts[f"class {kind.__module__}.{kind.__qualname__}"] = walk.of_class(kind), walk.forward(kind)
        self._last = walk.read() or []
        return Found(parts, hash(tuple(parts.items())))


def told(value: Any) -> Hashable:
    """Return the key of a plain value, its type and value: NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value


_MISSING = object()


class _Itself:
    """Identity of an object. It keeps the object alive only if that has no weak references; then it equals nothing once
    the object is gone."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Itself) and mine is not None and mine is other._ref()

    def __hash__(self) -> int:
        return self._hash


class _Walk:
    """Make keys of values, and remember the places that were read."""

    def __init__(self) -> None:
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self._reads: list[Callable[[], Iterable[Any]]] = []
        self._known: dict[Hashable, Hashable] = {}
        self._under: set[int] = set()

    def read(self) -> list[Any] | None:
        """Re-read all places; None where a container changed its size or lost a name."""
        if list(map(len, self._sized)) != self._sizes:
            return None
        found = list[Any]()
        try:
            for get, mapping in self._getters:
                found += get(mapping)
        except KeyError:
            return None
        for read in self._reads:
            found += read()
        return found

    def watch(self, mapping: Mapping[str, Any], names: list[str], *, whole: bool = True) -> None:
        """Remember to read these names; ``whole``: the mapping must have no others."""
        if whole:
            self._sized.append(mapping)
            self._sizes.append(len(mapping))
        if names:
            self._getters.append((operator.itemgetter(*names, names[0]), mapping))

    def told(self, value: Any, depth: int = _DEEPEST, names: frozenset[str] | None = None) -> Hashable:
        """Return the key of a value.

        Args:
            value: any.
            depth: how far objects and functions are read.
            names: attributes of objects that count; None: all.
        """
        if isinstance(value, PLAIN):
            return told(value)
        key = id(value), depth, names
        if key in self._known:
            return self._known[key]
        if id(value) in self._under:
            return "itself"
        if len(self._known) >= _MOST:
            return type(value) if isinstance(value, _CONTAINERS) else _Itself(value)
        self._under.add(id(value))
        found = self._known[key] = self._inside(value, depth, names)
        self._under.discard(id(value))
        return found

    def _inside(self, value: Any, depth: int, names: frozenset[str] | None) -> Hashable:
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth, names)
        if isinstance(value, nn.Module):
            self._reads.append(lambda: (value.training,))
            return _Itself(value), value.training
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            return functools.partial, *(self.told(part, depth, names) for part in parts)
        if isinstance(value, types.FunctionType):
            return self._function(value, None, depth)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            return self._method(value.__func__, value.__self__, depth)
        if isinstance(value, type) and not _is_library(value):
            return _Itself(value), self.of_class(value)
        if depth < _OBJECT or _is_closed(value):
            return _Itself(value)
        call = _static(type(value), "__call__")
        if isinstance(call, types.FunctionType):
            return self._method(call, value, depth)
        return self._object(value, depth, names)

    def _container(self, value: Any, depth: int, names: frozenset[str] | None) -> Hashable:
        if not isinstance(value, (tuple, frozenset)):
            self._reads.append(functools.partial(_content, value))
        found = [self.told(part, depth, names) for part in _content(value)]
        if isinstance(value, dict):
            self._reads.append(lambda: islice(dict.keys(value), _LARGEST))
            keys = [self.told(key, depth) for key in islice(dict.keys(value), _LARGEST)]
            return type(value), tuple(zip(keys, found, strict=True))
        return type(value), frozenset(found) if isinstance(value, (set, frozenset)) else tuple(found)

    def _object(self, value: Any, depth: int, names: frozenset[str] | None) -> Hashable:
        own, slots = getattr(value, "__dict__", {}), _slots(type(value))
        if isinstance(value, types.ModuleType):
            names = names or frozenset()
        picked = [name for name in own if names is None or name in names]
        self.watch(own, picked, whole=not isinstance(value, types.ModuleType))
        if slots:
            self._reads.append(lambda: [getattr(value, name, _MISSING) for name in slots])
        elif not isinstance(getattr(value, "__dict__", None), dict):
            return _Itself(value)
        content = [(name, own[name]) for name in picked] + [(name, getattr(value, name, _MISSING)) for name in slots]
        return type(value), *((name, self.told(part, depth - _OBJECT, names)) for name, part in content)

    def of_class(self, kind: type) -> Hashable:
        """Return the plain defaults that a class gives its instances."""
        found = list[Hashable]()
        for base in kind.__mro__:
            if not _is_library(base):
                own = vars(base)
                names = [name for name, one in own.items() if isinstance(one, PLAIN) and not name.startswith("__")]
                self.watch(own, names)
                found += ((name, told(own[name])) for name in names)
        return tuple(found)

    def forward(self, kind: type) -> Hashable:
        """Return the key of what the ``forward`` of a class can read beside its module."""
        found = _static(kind, "forward")
        return self._function(found, kind, _DEEPEST) if isinstance(found, types.FunctionType) else None

    def _method(self, function: types.FunctionType, owner: Any, depth: int) -> Hashable:
        kind = owner if isinstance(owner, type) else type(owner)
        code = self._function(function, kind, depth)
        if isinstance(owner, nn.Module) or depth < _OBJECT or _is_closed(owner):
            return code, _Itself(owner)
        return code, self._object(owner, depth, _names(_reached(function, kind)))

    def _function(self, function: types.FunctionType, owner: type | None, depth: int) -> Hashable:
        if depth == 0 or _is_library(function):
            return _Itself(function)
        functions = _reached(function, owner)
        names, known = _names(functions), set(map(id, functions))
        return tuple([self._read_by(one, known, depth - 1, names) for one in functions])

    def _read_by(
        self, function: types.FunctionType, known: set[int], depth: int, names: frozenset[str] | None
    ) -> Hashable:
        """Return the key of what one function reads. Known functions have keys of their own."""
        self._reads.append(lambda: (function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            self._reads.append(functools.partial(_cell, cell))
        loaded = [name for name in _loads(function.__code__) if name in function.__globals__]
        self.watch(function.__globals__, loaded, whole=False)
        values = _values(function)
        return function.__code__, *("function" if id(one) in known else self.told(one, depth, names) for one in values)


def _content(container: Any) -> Iterable[Any]:
    return islice(dict.values(container) if isinstance(container, dict) else container, _LARGEST)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


# -- functions


def _reached(function: types.FunctionType, owner: type | None) -> list[types.FunctionType]:
    """Return the function, and those that it and they name, if they are Python code outside of libraries."""
    found = dict[int, types.FunctionType]()
    ahead = collections.deque([(function, owner)])
    while ahead and len(found) < _FUNCTIONS:
        one, owner = ahead.popleft()
        if id(one) in found or _is_library(one):
            continue
        found[id(one)] = one
        named = _mentions(one.__code__)
        for value in _values(one):
            ahead.extend(_functions(value, named))
        if owner is not None:
            ahead.extend(_methods(owner, named))
    return list(found.values())


def _values(function: types.FunctionType) -> list[Any]:
    """Return what a function closes over, its defaults, and the globals that it loads."""
    cells = [part for cell in function.__closure__ or () for part in _cell(cell)]
    loaded = [function.__globals__[name] for name in _loads(function.__code__) if name in function.__globals__]
    return [*cells, function.__defaults__, function.__kwdefaults__, *loaded]


def _functions(value: Any, named: frozenset[str]) -> Iterator[tuple[types.FunctionType, type | None]]:
    """Yield the functions that code with a value can call by these names."""
    if isinstance(value, types.FunctionType):
        yield value, None
    elif isinstance(value, types.MethodType):
        if isinstance(value.__func__, types.FunctionType):
            yield value.__func__, type(value.__self__)
    elif isinstance(value, functools.partial):
        yield from _functions(value.func, named)
    elif isinstance(value, types.ModuleType):
        if not _is_closed(value):
            for name in sorted(named & vars(value).keys()):
                if isinstance(vars(value)[name], types.FunctionType):
                    yield vars(value)[name], None
    elif not isinstance(value, (*PLAIN, *_CONTAINERS, nn.Module, type)) and not _is_closed(value):
        yield from _methods(type(value), named | {"__call__"})


def _methods(owner: type, named: frozenset[str]) -> Iterator[tuple[types.FunctionType, type | None]]:
    for name in sorted(named):
        one = _static(owner, name)
        one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        if isinstance(one, types.FunctionType):
            yield one, owner


def _static(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _cell(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not bound yet
        return ()


def _names(functions: list[types.FunctionType]) -> frozenset[str] | None:
    """Return the attributes that these functions can read; None: all."""
    found = frozenset[str]().union(*(_mentions(one.__code__) for one in functions))
    return None if found & _WHOLE else found


@functools.lru_cache(4096)
def _mentions(code: types.CodeType) -> frozenset[str]:
    """Return all names and strings in the code, as getattr() takes strings."""
    inner = [_mentions(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    texts = [part for part in code.co_consts if isinstance(part, str)]
    return frozenset([*code.co_names, *texts]).union(*inner)


@functools.lru_cache(4096)
def _loads(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that the code and functions in it load."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found.update(_loads(part))
    return tuple(sorted(found))


# -- what is not read


def _is_closed(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, types.ModuleType):
        return _in_library(value.__name__)
    if isinstance(value, (torch.Tensor, type, weakref.ref)):
        return True
    return _is_library(kind) and f"{kind.__module__}.{kind.__qualname__}" not in _NAMESPACES


def _is_library(value: Any) -> bool:
    return _in_library(getattr(value, "__module__", None) or "builtins")


@functools.cache
def _in_library(module: str) -> bool:
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names:
        return root in _LIBRARIES
    origin = getattr(getattr(sys.modules.get(root), "__spec__", None), "origin", None)  # a user's package named `code`
    return origin in ("built-in", "frozen") or str(origin).startswith(sysconfig.get_path("stdlib"))


@functools.lru_cache(1024)
def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
