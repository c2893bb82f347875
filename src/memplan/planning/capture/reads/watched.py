"""Watch places in Python's objects: by versions and identities it is seen at once that nothing has changed."""

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
    """Which keys of a dict count."""

    __slots__ = ("only", "without")

    def __init__(self, only: frozenset[str] | None, without: frozenset[str] = frozenset()) -> None:
        self.only, self.without = only, without

    def of(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a dict that counts."""
        without = self.without
        if self.only is None:
            return {name: value for name, value in own.items() if name not in without}
        if len(own) <= len(self.only):
            only = self.only
            return {name: value for name, value in own.items() if name in only and name not in without}
        return {name: own[name] for name in self.only if name in own and name not in without}


class Attributes:
    """Attributes in dicts whose versions do not tell, and their values."""

    def __init__(self) -> None:
        self._watched: list[tuple[dict[str, Any], Names, dict[str, Any]]] = []
        self._dicts: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._gets: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._values: list[Any] = []

    def add(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
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


class Watched:
    """Places that were read, and what was there."""

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
        """Note the versions of everything that is watched."""
        self._guards = _torch.DictGuards(self._dicts)
        self._about = list(chain.from_iterable(map(_ABOUT, self._functions)))

    def unchanged(self, *, modules: bool = True) -> bool:
        """Return whether the same objects are in the same places. ``modules``: also attributes of the model's own."""
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
        except ValueError:  # unbound since
            return False

    def _still(self) -> bool:
        """Return whether dicts that were changed have the same objects where it counts."""
        versions = self._guards.now()
        for at, (now, then) in enumerate(zip(versions, self._guards.versions, strict=True)):
            if now == then:
                continue
            names, content = self._contents[at]
            own = self._dicts[at]
            if not (_same_content(own, content) if names is None else _same_names(own, names, content)):
                return False
        self._guards.accept(versions)
        return True

    def names(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch names in the dict of a class or a Python module."""
        place = id(own), names.only, names.without
        if place not in self._by_place:  # a base of several classes is one place
            found = names.of(own)
            self._dicts.append(own)
            self._contents.append((names, found))
            self._by_place[place] = {name: found[name] for name in sorted(found)}
        return self._by_place[place]

    def attributes(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of a module of the model's own."""
        return self._modules.add(own, names)

    def instance(self, own: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of an object."""
        return self.names(own, names) if _torch.VERSIONS_SEE_ATTRIBUTES else self._instances.add(own, names)

    def content(self, own: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Watch a whole dict, and return its keys and values in order."""
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
        """Watch a container, whose content these are."""
        self._lists.append((container, found))

    def kind(self, value: Any) -> None:
        """Watch the class of an object."""
        self._objects.append(value)
        self._kinds.append(type(value))

    def function(self, function: types.FunctionType) -> None:
        """Watch code and defaults of a function that may be edited while it runs: not of an installed package."""
        if "site-packages" not in function.__code__.co_filename:
            self._functions.append(function)

    def read(self, read: Callable[[], Any]) -> Any:
        """Watch which object this returns."""
        found = read()
        self._reads.append((read, found))
        return found

    def cell(self, cell: types.CellType) -> Any:
        """Watch the content of a function's cell, and return it; MISSING where it has none yet."""
        found = cell_content(cell)
        if found is MISSING:
            return self.read(functools.partial(cell_content, cell))
        self._cells.append(cell)
        self._in_cells.append(found)
        return found

    def bytes(self, read: Callable[[], Any]) -> Any:
        """Watch which value this returns."""
        found = read()
        self._bytes.append((read, found))
        return found


def _same_names(own: dict[str, Any], names: Names, content: dict[str, Any]) -> bool:
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
_CONTENT = operator.attrgetter("cell_contents")
