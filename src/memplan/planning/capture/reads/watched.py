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
    """Keys of a dict that captured code may read: ``included`` (None: all) without ``excluded``."""

    __slots__ = ("excluded", "included")

    def __init__(self, included: frozenset[str] | None, excluded: frozenset[str] = frozenset()) -> None:
        self.included, self.excluded = included, excluded

    def select(self, namespace: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of a dict at these keys."""
        excluded = self.excluded
        if self.included is None:
            return {name: value for name, value in namespace.items() if name not in excluded}
        if len(namespace) <= len(self.included):
            included = self.included
            return {name: value for name, value in namespace.items() if name in included and name not in excluded}
        return {name: namespace[name] for name in self.included if name in namespace and name not in excluded}


class Attributes:
    """Attributes in dicts whose version does not change with them, and their values."""

    def __init__(self) -> None:
        self._watched: list[tuple[dict[str, Any], Names, dict[str, Any]]] = []
        self._dicts: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._gets: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._values: list[Any] = []

    def add(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch the attributes in a dict at the keys in ``names``, and return them by name."""
        values = names.select(namespace)
        self._watched.append((namespace, names, values))
        self._dicts.append(namespace)
        self._lengths.append(len(namespace))
        if values:
            first = next(iter(values))
            self._gets.append((operator.itemgetter(*values, first), namespace))  # of two names or more: returns a tuple
            self._values += [*values.values(), values[first]]
        return {name: values[name] for name in sorted(values)}

    def are_unchanged(self) -> bool:
        """Return whether all attributes are the same objects."""
        lengths = list(map(len, self._dicts))
        if lengths != self._lengths:
            if not all(_has_same_objects(*watched) for watched in self._watched):
                return False
            self._lengths = lengths
        now = list[Any]()
        try:
            for get, namespace in self._gets:
                now += get(namespace)
        except KeyError:
            return False
        return all(map(operator.is_, now, self._values))


class Watched:
    """Dict entries, cells and other references that were read, and their values."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._contents: list[tuple[Names | None, Any]] = []
        self._guards = _torch.DictGuards(())
        self._watched_namespaces: dict[Any, dict[str, Any]] = {}
        self._modules, self._instances = Attributes(), Attributes()
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._function_parts: list[Any] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._cells: list[types.CellType] = []
        self._in_cells: list[Any] = []
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        self._bytes: list[tuple[Callable[[], Any], Any]] = []

    def record_versions(self) -> None:
        """Record the versions of all watched dicts."""
        self._guards = _torch.DictGuards(self._dicts)
        self._function_parts = list(chain.from_iterable(map(_FUNCTION_PARTS, self._functions)))

    def unchanged(self, *, modules: bool = True) -> bool:
        """Return whether all references are to the same objects. ``modules``: check attributes of modules, too."""
        return (
            (not modules or self._modules.are_unchanged())
            and self._instances.are_unchanged()
            and (self._guards.hold() or self._are_values_unchanged())
            and all(map(operator.is_, map(type, self._objects), self._kinds))
            and all(map(operator.is_, chain.from_iterable(map(_FUNCTION_PARTS, self._functions)), self._function_parts))
            and all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self._lists)
            and self._are_cells_unchanged()
            and all(read() is then for read, then in self._reads)
            and all(read() == then for read, then in self._bytes)
        )

    def _are_cells_unchanged(self) -> bool:
        try:
            return all(map(operator.is_, map(_CELL_CONTENT, self._cells), self._in_cells))
        except ValueError:  # the variable was deleted
            return False

    def _are_values_unchanged(self) -> bool:
        """Return whether dicts with a new version still hold the same objects at the watched keys; then the new
        versions are valid, too."""
        versions = self._guards.now()
        for index, (now, then) in enumerate(zip(versions, self._guards.versions, strict=True)):
            if now == then:
                continue
            (names, content), watched_dict = self._contents[index], self._dicts[index]
            if names is not None:
                is_same = _has_same_objects(watched_dict, names, content)
            else:
                keys, values = dict.keys(watched_dict), dict.values(watched_dict)
                is_same = len(watched_dict) == len(content[0]) and all(
                    map(operator.is_, (*keys, *values), chain(*content))
                )
            if not is_same:
                return False
        self._guards.accept(versions)
        return True

    def watch_namespace(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch names in the dict of a class or a Python module."""
        place = id(namespace), names.included, names.excluded
        if place not in self._watched_namespaces:  # several classes can share a base class
            values = names.select(namespace)
            self._dicts.append(namespace)
            self._contents.append((names, values))
            self._watched_namespaces[place] = {name: values[name] for name in sorted(values)}
        return self._watched_namespaces[place]

    def watch_module_attributes(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of one of the model's modules."""
        return self._modules.add(namespace, names)

    def watch_instance(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of an object."""
        return (
            self.watch_namespace(namespace, names)
            if _torch.VERSIONS_SEE_ATTRIBUTES
            else self._instances.add(namespace, names)
        )

    def watch_dict(self, namespace: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Watch a whole dict, and return its keys and values in order."""
        content = tuple(dict.keys(namespace)), tuple(dict.values(namespace))
        self._dicts.append(namespace)
        self._contents.append((None, content))
        if not isinstance(namespace, collections.OrderedDict):
            return content
        order = collections.OrderedDict.__iter__(namespace)  # its order can change while the dict does not
        ordered = tuple(order)
        self.watch_container(namespace, ordered)
        return ordered, tuple(dict.__getitem__(namespace, key) for key in ordered)

    def watch_container(self, container: Any, content: tuple[Any, ...]) -> None:
        """Watch a container that has this content now."""
        self._lists.append((container, content))

    def watch_class(self, value: Any) -> None:
        """Watch the class of an object."""
        self._objects.append(value)
        self._kinds.append(type(value))

    def watch_function(self, function: types.FunctionType) -> None:
        """Watch code and defaults of a function, unless it is of an installed package."""
        if "site-packages" not in function.__code__.co_filename:
            self._functions.append(function)

    def watch_reference(self, read: Callable[[], Any]) -> Any:
        """Watch which object ``read`` returns."""
        value = read()
        self._reads.append((read, value))
        return value

    def watch_cell(self, cell: types.CellType) -> Any:
        """Watch the content of a closure cell, and return it; MISSING if it is empty."""
        content = cell_content(cell)
        if content is MISSING:
            return self.watch_reference(functools.partial(cell_content, cell))
        self._cells.append(cell)
        self._in_cells.append(content)
        return content

    def watch_value(self, read: Callable[[], Any]) -> Any:
        """Watch the value that ``read`` returns."""
        value = read()
        self._bytes.append((read, value))
        return value


def _has_same_objects(namespace: dict[str, Any], names: Names, content: dict[str, Any]) -> bool:
    values = names.select(namespace)
    return values.keys() == content.keys() and all(values[name] is content[name] for name in values)


_FUNCTION_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CELL_CONTENT = operator.attrgetter("cell_contents")
