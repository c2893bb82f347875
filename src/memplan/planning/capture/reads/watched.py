"""Cheap guards on Python objects, by version of dicts and identity of values."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from memplan import _torch
from memplan.planning.capture.reads.kinds import MISSING, cell_content


class Names:
    """Keys of a dict that count."""

    __slots__ = ("only", "without")

    def __init__(self, only: frozenset[str] | None, without: frozenset[str] = frozenset()) -> None:
        self.only, self.without = only, without

    def of(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of a dict that count."""
        without = self.without
        if self.only is None:
            return {name: value for name, value in own.items() if name not in without}
        if len(own) <= len(self.only):
            only = self.only
            return {name: value for name, value in own.items() if name in only and name not in without}
        return {name: own[name] for name in self.only if name in own and name not in without}


class Attributes:
    """Attributes in dicts whose version does not change with them, and their values."""

    def __init__(self) -> None:
        self._watched: list[tuple[dict[str, Any], Names, dict[str, Any]]] = []
        self._dicts: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._gets: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._values: list[Any] = []

    def add(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch these attributes, and return them by name."""
        values = names.of(own)
        self._watched.append((own, names, values))
        self._dicts.append(own)
        self._lengths.append(len(own))
        if values:
            first = next(iter(values))
            self._gets.append((operator.itemgetter(*values, first), own))  # of two names or more: returns a tuple
            self._values += [*values.values(), values[first]]
        return {name: values[name] for name in sorted(values)}

    def same(self) -> bool:
        """Return whether all attributes are the same objects."""
        lengths = list(map(len, self._dicts))
        if lengths != self._lengths:
            if not all(_same_names(*watched) for watched in self._watched):
                return False
            self._lengths = lengths
        now = list[Any]()
        try:
            for get, own in self._gets:
                now += get(own)
        except KeyError:
            return False
        return all(map(operator.is_, now, self._values))


class Watched:
    """Dict entries, cells and other references that were read, and their values."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._contents: list[tuple[Names | None, Any]] = []
        self._guards = _torch.DictGuards(())
        self._by_place: dict[Any, dict[str, Any]] = {}
        self._modules, self._instances = Attributes(), Attributes()
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._about: list[Any] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._cells: list[types.CellType] = []
        self._in_cells: list[Any] = []
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        self._bytes: list[tuple[Callable[[], Any], Any]] = []

    def settle(self) -> None:
        """Record the versions of all watched dicts."""
        self._guards = _torch.DictGuards(self._dicts)
        self._about = list(chain.from_iterable(map(_ABOUT, self._functions)))

    def unchanged(self, *, modules: bool = True) -> bool:
        """Return whether all references are to the same objects. ``modules``: check attributes of modules, too."""
        return (
            (not modules or self._modules.same())
            and self._instances.same()
            and (self._guards.hold() or self._still())
            and all(map(operator.is_, map(type, self._objects), self._kinds))
            and all(map(operator.is_, chain.from_iterable(map(_ABOUT, self._functions)), self._about))
            and all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self._lists)
            and self._same_cells()
            and all(read() is then for read, then in self._reads)
            and all(read() == then for read, then in self._bytes)
        )

    def _same_cells(self) -> bool:
        try:
            return all(map(operator.is_, map(_CONTENT, self._cells), self._in_cells))
        except ValueError:  # the variable was deleted
            return False

    def _still(self) -> bool:
        """Return whether dicts with a new version still have the same objects at the keys that count."""
        versions = self._guards.now()
        for at, (now, then) in enumerate(zip(versions, self._guards.versions, strict=True)):
            if now == then:
                continue
            (names, content), own = self._contents[at], self._dicts[at]
            if names is not None:
                same = _same_names(own, names, content)
            else:
                keys, values = dict.keys(own), dict.values(own)
                same = len(own) == len(content[0]) and all(map(operator.is_, (*keys, *values), chain(*content)))
            if not same:
                return False
        self._guards.accept(versions)
        return True

    def names(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch names in the dict of a class or a Python module."""
        place = id(own), names.only, names.without
        if place not in self._by_place:  # several classes can share a base class
            values = names.of(own)
            self._dicts.append(own)
            self._contents.append((names, values))
            self._by_place[place] = {name: values[name] for name in sorted(values)}
        return self._by_place[place]

    def attributes(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of one of the model's modules."""
        return self._modules.add(own, names)

    def instance(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of an object."""
        return self.names(own, names) if _torch.VERSIONS_SEE_ATTRIBUTES else self._instances.add(own, names)

    def content(self, own: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Watch a whole dict, and return its keys and values in order."""
        content = tuple(dict.keys(own)), tuple(dict.values(own))
        self._dicts.append(own)
        self._contents.append((None, content))
        if not isinstance(own, collections.OrderedDict):
            return content
        order = collections.OrderedDict.__iter__(own)  # its order can change while the dict does not
        ordered = tuple(order)
        self.list(own, ordered)
        return ordered, tuple(dict.__getitem__(own, key) for key in ordered)

    def list(self, container: Any, content: tuple[Any, ...]) -> None:
        """Watch a container that has this content now."""
        self._lists.append((container, content))

    def kind(self, value: Any) -> None:
        """Watch the class of an object."""
        self._objects.append(value)
        self._kinds.append(type(value))

    def function(self, function: types.FunctionType) -> None:
        """Watch code and defaults of a function, unless it is of an installed package."""
        if "site-packages" not in function.__code__.co_filename:
            self._functions.append(function)

    def read(self, read: Callable[[], Any]) -> Any:
        """Watch which object ``read`` returns."""
        value = read()
        self._reads.append((read, value))
        return value

    def cell(self, cell: types.CellType) -> Any:
        """Watch the content of a closure cell, and return it; MISSING if it is empty."""
        content = cell_content(cell)
        if content is MISSING:
            return self.read(functools.partial(cell_content, cell))
        self._cells.append(cell)
        self._in_cells.append(content)
        return content

    def bytes(self, read: Callable[[], Any]) -> Any:
        """Watch the value that ``read`` returns."""
        value = read()
        self._bytes.append((read, value))
        return value


def _same_names(own: dict[str, Any], names: Names, content: dict[str, Any]) -> bool:
    values = names.of(own)
    return values.keys() == content.keys() and all(values[name] is content[name] for name in values)


_ABOUT = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CONTENT = operator.attrgetter("cell_contents")
