"""Fingerprint what the Python code of a captured step can read beside its tensors, to any depth.

A capture observes which code runs (`executed`). What that code can have read is walked from the model's modules, from
the globals that the code loads, and from what its functions close over: through containers, through objects as far as
the code names their attributes, and through classes, whatever the depth. All of it is read once, by value. From then
on objects at the same places are compared by identity, dicts by a version, which is fast; where anything is another
object, everything is walked again.

What cannot be looked into is named in `Found.unseen`.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import io
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import RecordingError
from memplan.planning.capture.executed import Executed, code_counts, in_standard_library, uses_of
from memplan.planning.capture.side_effects import computed

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
         torch.memory_format, enum.Enum)  # fmt: skip
"""Types of immutable values."""
_LARGEST_ARRAY = 1 << 24
"""Bytes of an array that are compared in each call; of a larger one it is seen only that it is another one."""
_CACHED = type(functools.lru_cache(lambda: None))
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_FIXED = (types.ModuleType, type)
_NEVER = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__",
                    "__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__"})  # fmt: skip
_MISSING: Any = object()


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


def recipe_of(executed: Executed) -> Recipe:
    """Return what the code that was observed can read."""
    uses = [uses_of(code) for code, _ in executed.codes.values()]
    names = frozenset(executed.names).union(*(one.names for one in uses))
    of_globals = frozenset[str]().union(*(one.of_globals for one in uses))
    return Recipe(dict(executed.codes), names, of_globals, executed.whole, frozenset(executed.whole_kinds))


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


class Reads:
    """What a captured step can have read, and its values then."""

    def __init__(self, readable: Readable) -> None:
        self.readable, self.found = readable, readable.now()

    def hold(self, moment: object = None) -> bool:
        """Return whether all of it is as it was. ``moment``: as for `Readable.now`."""
        now = self.readable.now(moment)
        if now is not self.found and now == self.found:
            self.found = now
        return now is self.found

    def differing(self) -> list[str]:
        """Return the names of what is not as it was."""
        return self.found.differing(self.readable.now())

    def share(self, other: Reads) -> None:
        """Read together with what reads the same."""
        if self.readable.recipe == other.readable.recipe:
            self.readable = other.readable


class Readable:
    """Reads what a recipe names. The model itself is not kept alive."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self._modules = [(name, vars(module), computed(module), type(module)) for name, module in model.named_modules()]
        self._places = {id(module): name for name, module in model.named_modules()}
        self._moment: object = None
        self._walk: _Walk | None = None
        self._found: Found | None = None

    def now(self, moment: object = None) -> Found:
        """Return the present values: the same object as the last time where nothing has changed.

        Args:
            moment: the same object as long as no module's attributes have changed; None: that is not known.
        """
        settled = moment is not None and moment is self._moment
        if self._found is None or self._walk is None or not self._walk.unchanged(modules=not settled):
            walk = _Walk(self.recipe, self._places)
            walk.start(self._modules)
            self._walk, self._found = walk, walk.found()
        self._moment = moment
        return self._found


class Passes:
    """What forward() can have read in each pass of a capture, which runs it more than once."""

    def __init__(self, model: nn.Module, executed: Executed) -> None:
        self.executed = executed
        self._model = model
        self._readable: Readable | None = None
        self._first: Found | None = None
        self._changing: list[str] = []

    def ended(self) -> None:
        """Note that a pass has ended."""
        self.executed.paused = True
        try:
            if self._first is None or self._readable is None:
                self._readable = Readable(self._model, recipe_of(self.executed))
                self._first = self._readable.now()
            else:
                self._changing = self._changing or self._first.differing(self._readable.now())
        finally:
            self.executed.paused = False

    def refuse(self) -> None:
        """Raise RecordingError where what was read is not the same in the next call, or cannot be compared."""
        if self.executed.outside is not None:
            function, where = self.executed.outside
            raise RecordingError(
                f"forward() calls {function}: a planned step would not call it again",
                expected="code that reads its arguments, attributes and globals",
                do="Call it outside of forward(), and pass what comes out as an input",
                where=where,
            )
        if self._changing:
            raise RecordingError(
                f"forward() changes what it reads: the {self._changing[0]}",
                expected="the same values in each call: a planned step does not run forward() again",
                do="Keep what changes in a buffer (register_buffer(), changed in place), or change it outside of "
                "forward()",
            )
        unseen = self.reads().found.unseen
        if unseen:
            raise RecordingError(
                f"forward() reads {unseen[0]}",
                expected="values that can be compared before each planned call",
                do="Read it outside of forward(), and pass what comes out as an input",
            )

    def reads(self) -> Reads:
        """Return what was read, and its present values."""
        return Reads(Readable(self._model, recipe_of(self.executed)))


def told(value: Any) -> Hashable:
    """Return the key of a plain value, its type and value: NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value


class _Itself:
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
        return isinstance(other, _Itself) and mine is not None and mine is other._ref()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class _Names:
    """Which keys of a dict count."""

    __slots__ = ("only", "without")

    def __init__(self, only: frozenset[str] | None, without: frozenset[str] = frozenset()) -> None:
        self.only, self.without = only, without

    def of(self, own: Mapping[str, Any]) -> dict[str, Any]:
        without = self.without
        if self.only is None:
            return {name: value for name, value in own.items() if name not in without}
        if len(own) <= len(self.only):
            only = self.only
            return {name: value for name, value in own.items() if name in only and name not in without}
        return {name: own[name] for name in self.only if name in own and name not in without}


class _Attributes:
    """Attributes in dicts whose versions do not tell, and their values."""

    def __init__(self) -> None:
        self._watched: list[tuple[dict[str, Any], _Names, dict[str, Any]]] = []
        self._dicts: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._gets: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._values: list[Any] = []

    def add(self, own: dict[str, Any], names: _Names) -> dict[str, Any]:
        """Watch these attributes, and return them by name."""
        found = names.of(own)
        self._watched.append((own, names, found))
        self._dicts.append(own)
        self._lengths.append(len(own))
        if found:
            first = next(iter(found))
            self._gets.append((operator.itemgetter(*found, first), own))
            self._values += [*found.values(), found[first]]
        return {name: found[name] for name in sorted(found)}

    def same(self) -> bool:
        """Return whether the same objects are there."""
        lengths = list(map(len, self._dicts))
        if lengths != self._lengths:
            if not all(_same_names(*one) for one in self._watched):
                return False
            self._lengths = lengths
        now = list[Any]()
        try:
            for get, own in self._gets:
                now += get(own)
        except KeyError:
            return False
        return all(map(operator.is_, now, self._values))


class _Watched:
    """Places that were read, and what was there."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._contents: list[tuple[_Names | None, Any]] = []
        self._versions: list[int] = []
        self._modules, self._instances = _Attributes(), _Attributes()
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._about: list[Any] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        self._bytes: list[tuple[Callable[[], Any], Any]] = []

    def settle(self) -> None:
        self._versions = list(map(_torch.dict_version, self._dicts))
        self._about = list(chain.from_iterable(map(_ABOUT, self._functions)))

    def unchanged(self, *, modules: bool = True) -> bool:
        """Return whether the same objects are in the same places. ``modules``: also attributes of the model's own."""
        versions = list(map(_torch.dict_version, self._dicts))
        return (
            (not modules or self._modules.same())
            and self._instances.same()
            and (versions == self._versions or self._still(versions))
            and all(map(operator.is_, map(type, self._objects), self._kinds))
            and all(map(operator.is_, chain.from_iterable(map(_ABOUT, self._functions)), self._about))
            and all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self._lists)
            and all(read() is then for read, then in self._reads)
            and all(read() == then for read, then in self._bytes)
        )

    def _still(self, versions: list[int]) -> bool:
        """Return whether dicts that were changed have the same objects where it counts."""
        for at, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
            if now == then:
                continue
            names, content = self._contents[at]
            own = self._dicts[at]
            if not (_same_content(own, content) if names is None else _same_names(own, names, content)):
                return False
        self._versions = versions
        return True

    def names(self, own: dict[str, Any], names: _Names) -> dict[str, Any]:
        found = names.of(own)
        self._dicts.append(own)
        self._contents.append((names, found))
        return {name: found[name] for name in sorted(found)}

    def attributes(self, own: dict[str, Any], names: _Names) -> dict[str, Any]:
        """Watch attributes of a module of the model's own."""
        return self._modules.add(own, names)

    def instance(self, own: dict[str, Any], names: _Names) -> dict[str, Any]:
        """Watch attributes of an object."""
        return self.names(own, names) if _torch.VERSIONS_SEE_ATTRIBUTES else self._instances.add(own, names)

    def content(self, own: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        found = tuple(dict.keys(own)), tuple(dict.values(own))
        self._dicts.append(own)
        self._contents.append((None, found))
        if not isinstance(own, collections.OrderedDict):
            return found
        order = collections.OrderedDict.__iter__(own)  # it can change without a change of the dict
        ordered = tuple(order)
        self.list(own, ordered)
        return ordered, tuple(dict.__getitem__(own, key) for key in ordered)

    def list(self, container: Any, found: tuple[Any, ...]) -> None:
        self._lists.append((container, found))

    def kind(self, value: Any) -> None:
        self._objects.append(value)
        self._kinds.append(type(value))

    def function(self, function: types.FunctionType) -> None:
        self._functions.append(function)

    def read(self, read: Callable[[], Any]) -> Any:
        found = read()
        self._reads.append((read, found))
        return found

    def bytes(self, read: Callable[[], Any]) -> Any:
        found = read()
        self._bytes.append((read, found))
        return found


def _same_names(own: dict[str, Any], names: _Names, content: dict[str, Any]) -> bool:
    found = names.of(own)
    return found.keys() == content.keys() and all(found[name] is content[name] for name in found)


def _same_content(own: dict[Any, Any], content: tuple[tuple[Any, ...], tuple[Any, ...]]) -> bool:
    keys, values = content
    return (
        len(own) == len(keys)
        and all(map(operator.is_, dict.keys(own), keys))
        and all(map(operator.is_, dict.values(own), values))
    )


_ABOUT = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class _Walk(_Watched):
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
        self._names = _Names(None if recipe.whole else recipe.names, _NEVER)

    def found(self) -> Found:
        self._alive.clear()
        self._known.clear()
        return Found(tuple(self._nodes), tuple(self._labels), tuple(self._unseen))

    def start(self, modules: list[tuple[str, dict[str, Any], frozenset[str], type]]) -> None:
        for path, own, without, kind in modules:
            of = f" of {path}" if path else ""
            without |= _torch.BOOKKEEPING
            only = None if self._recipe.whole or self._is_open_ended(kind) else self._recipe.names
            for name, value in self.attributes(own, _Names(only, without)).items():
                self._visit(value, f"attribute {name}{of}")
            self._visit(kind, f"class {kind.__qualname__}")
            for table in _torch.own_tensor_tables(own):
                for name, tensor in table.items():
                    own_of_tensor = getattr(tensor, "__dict__", None)
                    for inner, value in self.instance(own_of_tensor, self._names).items() if own_of_tensor else ():
                        self._visit(value, f"attribute {name}.{inner}{of}")
        self._globals()
        while self._ahead:
            number, value, label = self._ahead.popleft()
            self._nodes[number] = self._inside(value, label)
        self.settle()

    def _globals(self) -> None:
        by_module: dict[int, tuple[dict[str, Any], set[str]]] = {}
        imported = dict[str, None]()
        for code, own in self._recipe.codes.values():
            uses = uses_of(code)
            if str(own.get("__name__")).startswith("torch."):  # its flags and hooks are part of each key
                continue
            by_module.setdefault(id(own), (own, set()))[1].update(uses.loaded)
            imported.update(dict.fromkeys(_imported(uses.imports, str(own.get("__package__") or ""))))
        for own, names in by_module.values():
            module = own.get("__name__", "")
            prefix = "" if module == "__main__" else f"{module}."
            for name, value in self.names(own, _Names(frozenset(names))).items():
                self._visit(value, f"global {prefix}{name}")
        for name in imported:
            self._visit(sys.modules[name], f"module {name}")

    # -- values

    def _visit(self, value: Any, label: str) -> Any:
        """Return what stands for a value in the object that has it: its number, or itself where it is plain."""
        if isinstance(value, PLAIN):
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
        return told(value) if isinstance(value, PLAIN) else self._visit(value, label())

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
            if isinstance(owner, _CONTAINERS) or (hasattr(owner, "__dict__") and not isinstance(owner, _FIXED)):
                return kind, value.__name__, self._visit(owner, label)
            return _Itself(value)
        if isinstance(value, type):
            return self._class(value, label)
        if isinstance(value, types.ModuleType):
            return self._module(value, label)
        wrapped = _wrapped(value)
        if wrapped is not None:
            return kind, *(self._visit(one, label) for one in wrapped)
        if isinstance(value, _CACHED):
            self.bytes(lambda: value.cache_info().currsize)
            inside = [one for one in gc.get_referents(value) if not isinstance(one, (type, dict))]
            return kind, *(self._visit(one, label) for one in inside)
        if isinstance(value, weakref.ref):
            return kind, self._visit(self.read(value), label)
        if isinstance(value, contextvars.ContextVar):
            return _Itself(value), self._visit(self.read(lambda: value.get(_MISSING)), label)
        if value is _MISSING or kind is object:
            return _Itself(value)
        return self._object(value, label)

    def _tensor(self, value: torch.Tensor, label: str) -> Any:
        own = getattr(value, "__dict__", None)
        found = self.instance(own, self._names) if own else {}
        return _Itself(value), *((name, self._visit(one, _inner(label, name))) for name, one in found.items())

    def _function(self, value: types.FunctionType, label: str) -> Any:
        code = value.__code__
        if id(code) not in self._recipe.codes:
            return _Itself(value) if not code_counts(value.__globals__) else (types.FunctionType, code)
        self.function(value)
        parts = list[Any]()
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            parts.append(self._visit(self.read(functools.partial(_cell, cell)), f"{label}, {name}"))
        if value.__defaults__:
            parts.append(self._visit(value.__defaults__, f"{label}, its defaults"))
        if value.__kwdefaults__:
            parts.append(self._visit(value.__kwdefaults__, f"{label}, its defaults"))
        found = self.instance(value.__dict__, self._names)
        parts += [(name, self._visit(one, _inner(label, name))) for name, one in found.items()]
        return types.FunctionType, code, *parts

    def _class(self, kind: type, label: str) -> Any:
        if issubclass(kind, enum.Enum):
            return _Itself(kind)
        found = list[Any]()
        for base in kind.__mro__:
            if not _is_open_class(base):
                continue
            own = _dict_of(base)
            read = frozenset(name for name, one in own.items() if self._is_read(name, one))
            of = label if base is kind and not label.startswith("class ") else f"class {base.__qualname__}"
            found += self._named(own, of, _Names(self._recipe.names | read, _NEVER))
        meta = type(kind)
        return (
            _Itself(kind),
            *found,
            self._visit(meta, f"class {meta.__qualname__}") if _is_open_class(meta) else None,
        )

    def _is_read(self, name: str, value: Any) -> bool:
        if name in self._recipe.names:
            return True
        if self._recipe.whole and not name.startswith("__") and isinstance(value, (*PLAIN, dict, list, tuple, set)):
            return True
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        return isinstance(function, types.FunctionType) and id(function.__code__) in self._recipe.codes

    def _is_open_ended(self, kind: type) -> bool:
        """Return whether all attributes of a class's objects count: code reads them all, or answers for any."""
        if not self._recipe.whole_kinds.isdisjoint(kind.__mro__):
            return True
        for base in kind.__mro__:
            for name in ("__getattr__", "__getattribute__"):
                function = vars(base).get(name)
                if (
                    isinstance(function, types.FunctionType)
                    and id(function.__code__) in self._recipe.codes
                    and code_counts(function.__globals__)
                ):
                    return True
        return False

    def _module(self, value: types.ModuleType, label: str) -> Any:
        own, name = vars(value), value.__name__
        if name == "builtins":
            return _Itself(value)
        names = self._recipe.names if code_counts(own) else self._recipe.of_globals
        without = _NEVER | {"modules"} if value is sys else _NEVER
        return _Itself(value), *self._named(own, f"global {name}", _Names(names, without))

    # -- objects and containers

    def _object(self, value: Any, label: str) -> Any:
        kind = type(value)
        parts = [kind if _module_of(kind) == "builtins" else self._visit(kind, f"class {kind.__qualname__}")]
        known = self._content(value, label)
        parts += known or ()
        array = known is None and self._array(value, label)
        if array:
            return *parts, array
        if _is_closed(kind) and not isinstance(value, threading.local):
            return *parts, _Itself(value)
        names = self._names
        if self._is_open_ended(kind) or in_standard_library(_module_of(kind)):
            names = _Names(None, _NEVER)
        if isinstance(value, nn.Module):
            names = _Names(None if names.only is None else names.only | _OF_MODULES, _torch.BOOKKEEPING - _OF_MODULES)
        own, seen = getattr(value, "__dict__", None), known is not None
        if isinstance(own, dict):
            self.kind(value)
            found = self.instance(own, names)
            parts += [(name, self._visit(one, _inner(label, name))) for name, one in found.items()]
            seen = True
        for name in _slots(kind):
            if names.only is None or name in names.only:
                content = self.read(functools.partial(getattr, value, name, _MISSING))
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
        if isinstance(value, types.MappingProxyType):
            return [self._visit(gc.get_referents(value)[0], label)]
        if not isinstance(value, (tuple, list, set, frozenset, collections.deque)):
            return None
        content = tuple(_plainly(value))
        if not isinstance(value, (tuple, frozenset)):
            self.list(value, content)
        if isinstance(value, (set, frozenset)):
            plain = [one for one in content if isinstance(one, PLAIN)]
            others = [_Itself(one) for one in content if not isinstance(one, PLAIN)]
            return [frozenset(map(told, plain)), *others]
        return [self._part(one, lambda at=at: f"{label}[{at}]") for at, one in enumerate(content)]

    def _array(self, value: Any, label: str) -> Any:
        """Return the key of an object whose content is memory, such as an array of numpy's; None of any other."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return value.dtype.str, value.tobytes()
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.hasobject:
                return self._visit(value.tolist(), label)
            if value.nbytes > _LARGEST_ARRAY:
                return _Itself(value), value.dtype.str, value.shape
            return self.bytes(lambda: (value.dtype.str, value.shape, value.tobytes()))
        if isinstance(value, (bytes, bytearray, memoryview)) or _module_of(type(value)) in ("array", "mmap", "ctypes"):
            return self.bytes(lambda: bytes(memoryview(value)))
        return None

    def _opaque(self, value: Any, label: str) -> Any:
        """Return the key of an object of a class written in C, of which Python sees no content."""
        kind = type(value)
        if isinstance(value, types.CellType):
            return self._visit(self.read(functools.partial(_cell, value)), label)
        if isinstance(value, threading.local):
            return self._named(value.__dict__, label, _Names(None))
        if isinstance(value, (operator.attrgetter, operator.methodcaller, operator.itemgetter)):
            return self._visit(value.__reduce__()[1], label)
        if hasattr(kind, "__next__") and not isinstance(value, io.IOBase):
            self._unseen.append(f"the {label}, an iterator ({kind.__name__}), which each reading moves on")
            return _Itself(value)
        if kind.__hash__ is not object.__hash__ and kind.__hash__ is not None and kind.__eq__ is not object.__eq__:
            return told(value)  # an immutable value
        if _module_of(kind).partition(".")[0] not in _KNOWN and not in_standard_library(_module_of(kind)):
            self._unseen.append(f"the {label}, an object of {_module_of(kind)}.{kind.__qualname__}, whose content "
                                "Python does not see")  # fmt: skip
        return _Itself(value)

    def _named(self, own: dict[str, Any], label: str, names: _Names) -> list[Any]:
        return [(name, self._visit(value, _inner(label, name))) for name, value in self.names(own, names).items()]


_KNOWN = frozenset({"builtins", "torch", "numpy", "memplan"})
_OF_MODULES = frozenset({"training", "_parameters", "_buffers", "_modules"})


def _inner(label: str, name: str) -> str:
    """Name an attribute of a thing: ``attribute config.scale of layer``."""
    head, of, path = label.partition(" of ")
    return f"{head}.{name}{of}{path}"


def _plainly(container: Any) -> Iterator[Any]:
    """Iterate over a container as its base class does, whatever its own class says."""
    bases: tuple[Any, ...] = (tuple, list, set, frozenset, collections.deque)
    return next(base.__iter__(container) for base in bases if isinstance(container, base))


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _MISSING


def _wrapped(value: Any) -> tuple[Any, ...] | None:
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


def _imported(names: Iterable[str], package: str) -> Iterator[str]:
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
def _dict_of(kind: type) -> dict[str, Any]:
    """Return the dict behind a class's ``__dict__``, which is a proxy of it."""
    found = gc.get_referents(vars(kind))
    return found[0] if len(found) == 1 and type(found[0]) is dict else dict(vars(kind))


@functools.lru_cache(4096)
def _slots(kind: type) -> tuple[str, ...]:
    found = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__]
    names = [(base, name) for base, slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(
        f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for base, name in names
        if name not in ("__dict__", "__weakref__")
    )


@functools.lru_cache(4096)
def _is_open_class(kind: type) -> bool:
    """Return whether attributes of a class count: those of users' and libraries' classes and of torch's layers."""
    module = _module_of(kind)
    layer = module.startswith("torch.nn.") and kind is not nn.Module
    return layer or code_counts({"__name__": module})


_CLOSED = frozenset({
    "_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "re", "socket", "subprocess",
    "threading", "unittest",
})  # fmt: skip


@functools.lru_cache(4096)
def _is_closed(kind: type) -> bool:
    """Return whether objects of a class are compared by identity: loggers, locks, files and the like."""
    return _module_of(kind).partition(".")[0] in _CLOSED or kind is dataclasses.Field


def _module_of(kind: type) -> str:
    found = kind.__module__  # of classes that C makes it can be anything
    return found if isinstance(found, str) else ""


# -- of captures that failed

_of_errors: weakref.WeakKeyDictionary[BaseException, Reads] = weakref.WeakKeyDictionary()


def note_reads(error: BaseException, reads: Reads) -> None:
    """Note what had been read when a capture failed."""
    _of_errors[error] = reads


def reads_of(error: BaseException) -> Reads | None:
    """Return what had been read when the capture failed that an error is about; None where that is not known."""
    seen: BaseException | None = error
    while seen is not None:
        if seen in _of_errors:
            return _of_errors[seen]
        seen = seen.__cause__
    return None
