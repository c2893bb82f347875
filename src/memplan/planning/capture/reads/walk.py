"""Number everything that captured code can have read, whatever its depth, so that equal states give equal lists."""

from __future__ import annotations

import abc
import collections
import contextvars
import enum
import functools
import gc
import io
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.planning.capture.reads.executed import GETTERS, Executed, code_counts, in_standard_library, uses_of
from memplan.planning.capture.reads.kinds import (
    MISSING,
    PLAIN,
    POINTER,
    STATES,
    Itself,
    cached_results,
    dict_of,
    imported,
    is_closed,
    is_open_class,
    is_plain,
    memory_of,
    module_of,
    objects_of,
    plainly,
    registered,
    slots_of,
    state_of,
    told,
    wrapped,
)
from memplan.planning.capture.reads.watched import Names, Watched

_CACHED = type(functools.lru_cache(lambda: None))
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_FIXED = (types.ModuleType, type)
_WRAPPING = ("contextlib", "functools")
"""Modules whose functions call those that they wrap."""
_NEVER = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__",
                    "__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__"})  # fmt: skip
_KNOWN = frozenset({"builtins", "torch", "numpy", "memplan"})
_OF_MODULES = frozenset({"training", "_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the code that ran can read."""

    codes: Mapping[int, tuple[types.CodeType, dict[str, Any]]]
    """Code and its globals, by the code's id."""
    names: frozenset[str]
    """Attributes that it names."""
    of_globals: frozenset[str]
    """Those that it takes of globals directly: of modules of torch and the standard library no others count."""
    whole: bool
    """Whether it reads attributes that it does not name."""
    whole_kinds: frozenset[type]
    """Classes of objects of which it does."""
    modules: frozenset[str]
    """Modules that it looked up by computed names."""

    def is_read(self, name: str, value: Any) -> bool:
        """Return whether an attribute of a class counts."""
        if name in self.names:
            return True
        if self.whole and not name.startswith("__") and isinstance(value, (*PLAIN, dict, list, tuple, set)):
            return True
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        return isinstance(function, types.FunctionType) and id(function.__code__) in self.codes

    def is_open_ended(self, kind: type) -> bool:
        """Return whether all attributes of a class's objects count: code reads them all, or answers for any."""
        if not self.whole_kinds.isdisjoint(kind.__mro__):
            return True
        for base in kind.__mro__:
            for name in ("__getattr__", "__getattribute__"):
                function = vars(base).get(name)
                if (
                    isinstance(function, types.FunctionType)
                    and id(function.__code__) in self.codes
                    and code_counts(function.__globals__)
                ):
                    return True
        return False


def recipe_of(executed: Executed) -> Recipe:
    """Return what the code that was observed can read."""
    uses = [uses_of(code) for code, _ in executed.codes.values()]
    names = frozenset(executed.names).union(*(one.names for one in uses))
    of_globals = frozenset[str]().union(*(one.of_globals for one in uses))
    whole = executed.whole or any(one.unnamed for one in uses)
    kinds, modules = frozenset(executed.whole_kinds), frozenset(executed.modules)
    return Recipe(dict(executed.codes), names, of_globals, whole, kinds, modules)


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """Everything readable at one time; equal where it is the same by value."""

    nodes: tuple[Any, ...]
    """Values, and objects as tuples of the numbers of what is in them."""
    labels: tuple[str, ...]
    """Where each was seen first, for people."""
    unseen: tuple[str, ...] = ()
    """What could not be looked into, and why."""
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Found) and self.nodes == other.nodes)

    def differing(self, other: Found) -> list[str]:
        """Return the names of what differs; only the first where there is more or less than before."""
        pairs = zip(self.nodes, other.nodes, self.labels, strict=False)
        found = [label for one, another, label in pairs if one != another]
        if len(self.nodes) != len(other.nodes):
            return found[:1] or [max(self.labels, other.labels, key=len)[-1]]
        return found


class Walk(Watched):
    """Numbers everything that is readable, breadth first, so that equal states give equal lists."""

    def __init__(self, recipe: Recipe, places: Mapping[int, str]) -> None:
        super().__init__()
        self._recipe, self._places = recipe, places
        self._nodes: list[Any] = []
        self._labels: list[str] = []
        self._known: dict[int, int] = {}
        self._alive: list[Any] = []
        """What is numbered by its id: a new object must not get the id of one that is gone."""
        self._ahead: collections.deque[tuple[int, Any, str]] = collections.deque()
        self._unseen: list[str] = []
        self.named = set[str]()
        """Attributes that no code names and objects do, such as `operator.attrgetter`: the recipe has to have them."""
        self.whole = recipe.whole
        """Whether there is a function that reads attributes which nothing names, such as `getattr` in a partial."""
        self._states = set[str]()
        self._names = Names(None if recipe.whole else recipe.names, _NEVER)

    def found(self) -> Found:
        """Return what was numbered."""
        self._alive.clear()
        self._known.clear()
        return Found(tuple(self._nodes), tuple(self._labels), tuple(self._unseen))

    def start(self, modules: list[tuple[str, dict[str, Any], frozenset[str], type]]) -> None:
        """Number everything that can be read from these modules and from the code.

        Args:
            modules: names, attributes, those that do not count, and classes.
        """
        for path, own, without, kind in modules:
            of = f" of {path}" if path else ""
            without |= _torch.BOOKKEEPING
            only = None if self._recipe.whole or self._recipe.is_open_ended(kind) else self._recipe.names
            for name, value in self.attributes(own, Names(only, without)).items():
                self._visit(value, f"attribute {name}{of}")
            self._visit(kind, f"class {kind.__qualname__}")
            for table in _torch.own_tensor_tables(own):
                for name, tensor in table.items():
                    own_of_tensor = getattr(tensor, "__dict__", None)
                    for inner, value in self.instance(own_of_tensor, self._names).items() if own_of_tensor else ():
                        self._visit(value, f"attribute {name}.{inner}{of}")
        self._globals()
        for name in STATES:
            if name in self._recipe.names:
                self._state(name)
        while self._ahead:
            number, value, label = self._ahead.popleft()
            self._nodes[number] = self._inside(value, label)
        self.settle()

    def _globals(self) -> None:
        by_module: dict[int, tuple[dict[str, Any], set[str]]] = {}
        modules = dict.fromkeys(imported(sorted(self._recipe.modules), ""))
        for code, own in self._recipe.codes.values():
            uses = uses_of(code)
            if str(own.get("__name__")).startswith("torch."):  # its flags and hooks are part of each key
                continue
            by_module.setdefault(id(own), (own, set()))[1].update(uses.loaded)
            modules.update(dict.fromkeys(imported(uses.imports, str(own.get("__package__") or ""))))
        for own, names in by_module.values():
            module = own.get("__name__", "")
            prefix = "" if module == "__main__" else f"{module}."
            for name, value in self.names(own, Names(frozenset(names))).items():
                self._visit(value, f"global {prefix}{name}")
        for name in modules:
            self._visit(self.read(functools.partial(sys.modules.get, name)), f"module {name}")

    # -- values

    def _visit(self, value: Any, label: str) -> Any:
        """Return the number of a value's node, under which the node of the object that refers to it has it. A new value
        is put in the queue. ``label`` names the value for people."""
        if is_plain(value):
            return self._add(told(value), label)
        known = self._known.get(id(value))
        if known is not None:
            return known
        number = self._add(None, label)
        if not isinstance(value, tuple):
            self._known[id(value)] = number
            self._alive.append(value)
        self._ahead.append((number, value, label))
        return number

    def _part(self, value: Any, label: Callable[[], str]) -> Any:
        return told(value) if is_plain(value) else self._visit(value, label())

    def _add(self, node: Any, label: str) -> int:
        self._nodes.append(node)
        self._labels.append(label)
        return len(self._nodes) - 1

    def _inside(self, value: Any, label: str) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, label)
        if id(value) in self._places:
            return "module", self._places[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value, label)
        if isinstance(value, types.MethodType):
            return kind, self._visit(value.__func__, label), self._visit(value.__self__, label)
        if isinstance(value, types.BuiltinFunctionType):
            owner: Any = value.__self__
            self.whole = self.whole or any(value is one for one in GETTERS)
            self._state(str(value.__module__))
            if isinstance(owner, _CONTAINERS) or (hasattr(owner, "__dict__") and not isinstance(owner, _FIXED)):
                return kind, value.__name__, self._visit(owner, label)
            return Itself(value)
        if isinstance(value, type):
            return self._class(value, label)
        if isinstance(value, types.ModuleType):
            return self._module(value, label)
        inner = wrapped(value)
        if inner is not None:
            return kind, *(self._visit(one, label) for one in inner)
        if isinstance(value, _CACHED):
            self.bytes(lambda: value.cache_info().currsize)
            results = cached_results(value)  # their ids are theirs as long as this list is there
            self.bytes(lambda: (len(results), [*map(id, cached_results(value))]))
            inside = [one for one in gc.get_referents(value) if not isinstance(one, (type, dict))]
            return kind, *(self._visit(one, label) for one in (*inside, *results))
        if isinstance(value, weakref.ref):
            return kind, self._visit(self.read(value), label)
        if isinstance(value, contextvars.ContextVar):
            return Itself(value), self._visit(self.read(lambda: value.get(MISSING)), label)
        if value is MISSING or kind is object:
            return Itself(value)
        return self._object(value, label)

    def _tensor(self, value: torch.Tensor, label: str) -> Any:
        own = getattr(value, "__dict__", None)
        found = self.instance(own, self._names) if own else {}
        return Itself(value), *((name, self._visit(one, _inner(label, name))) for name, one in found.items())

    def _function(self, value: types.FunctionType, label: str) -> Any:
        code = value.__code__
        if id(code) not in self._recipe.codes:
            if value.__globals__.get("__name__") in _WRAPPING:
                return Itself(value), *(self._visit(one, label) for one in self._wrapped(value))
            return Itself(value) if not code_counts(value.__globals__) else (types.FunctionType, code)
        self.function(value)
        parts = list[Any]()
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            parts.append(self._visit(self.cell(cell), f"{label}, {name}"))
        if value.__defaults__:
            parts.append(self._visit(value.__defaults__, f"{label}, its defaults"))
        if value.__kwdefaults__:
            parts.append(self._visit(value.__kwdefaults__, f"{label}, its defaults"))
        found = self.instance(value.__dict__, self._names)
        parts += [(name, self._visit(one, _inner(label, name))) for name, one in found.items()]
        return types.FunctionType, code, *parts

    def _wrapped(self, value: types.FunctionType) -> list[Any]:
        """Return what a function of contextlib or functools calls: what it closes over, and implementations by type."""
        if "registry" in vars(value):  # of functools.singledispatch, whose closure has a cache
            return [vars(value)["registry"]]
        return [*map(self.cell, value.__closure__ or ()), vars(value).get("__wrapped__")]

    def _class(self, kind: type, label: str) -> Any:
        if issubclass(kind, enum.Enum):
            members: Mapping[str, Any] = kind.__members__
            return Itself(kind), *(self._visit(member, label) for member in members.values() if not is_plain(member))
        self._state(module_of(kind))
        found = list[Any]()
        if isinstance(kind, abc.ABCMeta):
            self.bytes(abc.get_cache_token)
            found.append(registered(kind))
        for base in kind.__mro__:
            if not is_open_class(base):
                continue
            own = dict_of(base)
            if "__match_args__" in self._recipe.names:
                self.named.update(own.get("__match_args__", ()))
            read = frozenset(name for name, one in own.items() if self._recipe.is_read(name, one))
            of = label if base is kind and not label.startswith("class ") else f"class {base.__qualname__}"
            found += self._named(own, of, Names(self._recipe.names | read, _NEVER))
        meta = type(kind)
        return (
            Itself(kind),
            *found,
            self._visit(meta, f"class {meta.__qualname__}") if is_open_class(meta) else None,
        )

    def _state(self, name: str) -> None:
        """Read the state behind a module or a function of `STATES`."""
        if name in STATES and name not in self._states:
            self._states.add(name)
            self._add(self.bytes(STATES[name]), f"state of {name}")

    def _module(self, value: types.ModuleType, label: str) -> Any:
        own, name = vars(value), value.__name__
        if name == "builtins":
            return Itself(value)
        self._state(name)
        names = self._recipe.names if code_counts(own) else self._recipe.of_globals
        without = _NEVER | {"modules"} if value is sys else _NEVER
        return Itself(value), *self._named(own, f"global {name}", Names(names, without))

    # -- objects and containers

    def _object(self, value: Any, label: str) -> Any:
        """Return the node of an object: its class, and what of it the captured code can read.

        That is the first that applies of: the elements of a container, the bytes of an array, the state of a
        logger, the object's identity (locks, files), the attributes and slots that the code names.
        """
        kind = type(value)
        parts = [kind if module_of(kind) == "builtins" else self._visit(kind, f"class {kind.__qualname__}")]
        if isinstance(value, POINTER):
            self._unseen.append(f"the {label}, a pointer of ctypes")
        known = self._content(value, label)
        parts += known or ()
        read = memory_of(value) if known is None else None
        if read is not None:
            return *parts, self.bytes(read)
        state = state_of(value)
        if state is not None:
            return *parts, Itself(value), repr(self.bytes(state))
        if is_closed(kind) and not isinstance(value, threading.local):
            return *parts, Itself(value)
        if isinstance(value, PLAIN):
            parts.append(told(value))
        if isinstance(value, enum.Enum):
            parts.append(self._visit(value._value_, label))
        names = self._names
        if self._recipe.is_open_ended(kind) or in_standard_library(module_of(kind)):
            names = Names(None, _NEVER)
        if isinstance(value, nn.Module):
            names = Names(None if names.only is None else names.only | _OF_MODULES, _torch.BOOKKEEPING - _OF_MODULES)
        own, seen = getattr(value, "__dict__", None), known is not None
        if isinstance(own, dict):
            self.kind(value)
            found = self.instance(own, names)
            parts += [(name, self._visit(one, _inner(label, name))) for name, one in found.items()]
            seen = True
        for name in slots_of(kind):
            if names.only is None or name in names.only:
                content = self.read(functools.partial(getattr, value, name, MISSING))
                parts.append((name, self._visit(content, _inner(label, name))))
            seen = True
        return tuple(parts) if seen else (*parts, self._opaque(value, label))

    def _content(self, value: Any, label: str) -> list[Any] | None:
        if isinstance(value, dict):
            keys, values = self.content(value)
            return [
                (self._part(key, lambda: label), self._part(one, lambda key=key: f"{label}[{key!r:.40}]"))
                for key, one in zip(keys, values, strict=True)
            ]
        objects = objects_of(value)
        if objects is not None:  # their ids are theirs as long as this list is there
            self.bytes(lambda: (len(objects), [*map(id, objects_of(value) or ())]))
            return [self._part(one, lambda at=at: f"{label}[{at}]") for at, one in enumerate(objects)]
        if isinstance(value, types.MappingProxyType):
            return [self._visit(gc.get_referents(value)[0], label)]
        if not isinstance(value, (tuple, list, set, frozenset, collections.deque)):
            return None
        content = tuple(plainly(value))
        if not isinstance(value, (tuple, frozenset)):
            self.list(value, content)
        if isinstance(value, (set, frozenset)):
            plain = [element for element in content if is_plain(element)]
            others = [Itself(element) for element in content if not is_plain(element)]
            return [frozenset(map(told, plain)), *others]
        return [self._part(one, lambda at=at: f"{label}[{at}]") for at, one in enumerate(content)]

    def _opaque(self, value: Any, label: str) -> Any:
        """Return the key of an object of a class written in C, of which Python sees no content."""
        kind = type(value)
        if isinstance(value, types.CellType):
            return self._visit(self.cell(value), label)
        if isinstance(value, threading.local):
            return self._named(value.__dict__, label, Names(None))
        if isinstance(value, (operator.attrgetter, operator.methodcaller, operator.itemgetter)):
            arguments = value.__reduce__()[1]
            if not isinstance(value, operator.itemgetter):
                self.named.update(name for path in arguments if isinstance(path, str) for name in path.split("."))
            return self._visit(arguments, label)
        if hasattr(kind, "__next__") and not isinstance(value, io.IOBase):
            self._unseen.append(f"the {label}, an iterator ({kind.__name__}), which each reading moves on")
            return Itself(value)
        if kind.__hash__ is not object.__hash__ and kind.__hash__ is not None and kind.__eq__ is not object.__eq__:
            return told(value)  # an immutable value
        if module_of(kind).partition(".")[0] not in _KNOWN and not in_standard_library(module_of(kind)):
            self._unseen.append(f"the {label}, an object of {module_of(kind)}.{kind.__qualname__}, whose content "
                                "Python does not see")  # fmt: skip
        return Itself(value)

    def _named(self, own: dict[str, Any], label: str, names: Names) -> list[Any]:
        return [(name, self._visit(value, _inner(label, name))) for name, value in self.names(own, names).items()]


def _inner(label: str, name: str) -> str:
    """Name an attribute of a thing: ``attribute config.scale of layer``."""
    head, of, path = label.partition(" of ")
    return f"{head}.{name}{of}{path}"
