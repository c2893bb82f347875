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
    """The names of attributes or globals, keys of a ``__dict__``, that captured code may read."""

    __slots__ = ("excluded", "included")

    def __init__(self, included: frozenset[str] | None, excluded: frozenset[str] = frozenset()) -> None:
        """Select the names ``included`` (None: all names) but for those in ``excluded``."""
        self.included, self.excluded = included, excluded

    def select(self, namespace: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of a dict whose keys are among these names."""
        excluded = self.excluded
        if self.included is None:
            return {name: value for name, value in namespace.items() if name not in excluded}
        if len(namespace) <= len(self.included):  # the shorter loop
            included = self.included
            return {name: value for name, value in namespace.items() if name in included and name not in excluded}
        return {name: namespace[name] for name in self.included if name in namespace and name not in excluded}


class Attributes:
    """Attributes and their values, in dicts whose version does not change when an attribute is set."""

    def __init__(self) -> None:
        self._watched: list[tuple[dict[str, Any], Names, dict[str, Any]]] = []
        """(namespace, keys that may be read, values of these keys)."""
        self._dicts: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        """Length of each of `_dicts`: without a change of it no attribute was added."""
        self._getters: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        """(function that gets all watched values of a namespace, the namespace)."""
        self._values: list[Any] = []
        """What `_getters` returned, one after another."""

    def add(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch the attributes in a dict at the keys in ``names``, and return them by name."""
        values = names.select(namespace)
        self._watched.append((namespace, names, values))
        self._dicts.append(namespace)
        self._lengths.append(len(namespace))
        if values:
            first = next(iter(values))  # repeated, as itemgetter returns a tuple only for two names or more
            self._getters.append((operator.itemgetter(*values, first), namespace))
            self._values += [*values.values(), values[first]]
        return {name: values[name] for name in sorted(values)}

    def are_unchanged(self) -> bool:
        """Return whether all attributes are the same objects."""
        lengths = list(map(len, self._dicts))
        if lengths != self._lengths:  # attributes were added or removed, maybe others than the watched ones
            if not all(_has_same_objects(*watched) for watched in self._watched):
                return False
            self._lengths = lengths
        now = list[Any]()
        try:
            for get, namespace in self._getters:
                now += get(namespace)
        except KeyError:  # an attribute was deleted
            return False
        return all(map(operator.is_, now, self._values))


class Watched:
    """Dict entries, cells and other references that were read, and their values."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        """Dicts that are compared by version."""
        self._contents: list[tuple[Names | None, Any]] = []
        """For each of `_dicts`, the watched names and their values; or None, and all keys and values."""
        self._guards = _torch.DictGuards(())
        """Versions of `_dicts`."""
        self._watched_namespaces: dict[Any, dict[str, Any]] = {}
        """(id() of a namespace, included names, excluded names) -> values by name."""
        self._modules, self._instances = Attributes(), Attributes()
        self._objects: list[Any] = []
        """Objects that must keep their class."""
        self._classes: list[type] = []
        """Class of each of `_objects`."""
        self._functions: list[types.FunctionType] = []
        self._function_parts: list[Any] = []
        """`_FUNCTION_PARTS` of each of `_functions`, one after another."""
        self._containers: list[tuple[Any, tuple[Any, ...]]] = []
        """(container, its elements)."""
        self._cells: list[types.CellType] = []
        self._cell_contents: list[Any] = []
        """Content of each of `_cells`."""
        self._references: list[tuple[Callable[[], Any], Any]] = []
        """(function, object that it returned), compared by identity."""
        self._values: list[tuple[Callable[[], Any], Any]] = []
        """(function, value that it returned), compared by value."""

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
            and all(map(operator.is_, map(type, self._objects), self._classes))
            and all(map(operator.is_, chain.from_iterable(map(_FUNCTION_PARTS, self._functions)), self._function_parts))
            and all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self._containers)
            and self._are_cells_unchanged()
            and all(read() is then for read, then in self._references)
            and all(read() == then for read, then in self._values)
        )

    def _are_cells_unchanged(self) -> bool:
        """Return whether all watched closure cells have the same objects as content."""
        try:
            return all(map(operator.is_, map(_CELL_CONTENT, self._cells), self._cell_contents))
        except ValueError:  # the variable was deleted
            return False

    def _are_values_unchanged(self) -> bool:
        """Return whether dicts with a new version still have the same objects at the watched keys. If so, the new
        versions are recorded."""
        versions = self._guards.now()
        for index, (now, then) in enumerate(zip(versions, self._guards.versions, strict=True)):
            if now == then:
                continue
            (names, content), watched_dict = self._contents[index], self._dicts[index]
            if names is not None:
                is_same = _has_same_objects(watched_dict, names, content)
            else:
                content_now = (*dict.keys(watched_dict), *dict.values(watched_dict))
                content_before = (*content[0], *content[1])  # keys and values
                is_same = len(content_now) == len(content_before)
                is_same = is_same and all(map(operator.is_, content_now, content_before))
            if not is_same:
                return False
        self._guards.accept(versions)
        return True

    def watch_namespace(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch names in the dict of a class or a Python module, and return their values by name."""
        key = id(namespace), names.included, names.excluded
        if key not in self._watched_namespaces:  # several classes can share a base class
            values = names.select(namespace)
            self._dicts.append(namespace)
            self._contents.append((names, values))
            self._watched_namespaces[key] = {name: values[name] for name in sorted(values)}
        return self._watched_namespaces[key]

    def watch_module_attributes(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of one of the model's modules, and return their values by name."""
        return self._modules.add(namespace, names)

    def watch_instance(self, namespace: dict[str, Any], names: Names) -> dict[str, Any]:
        """Watch attributes of an object, and return their values by name. ``namespace``: its ``__dict__``."""
        if _torch.VERSIONS_SEE_ATTRIBUTES:
            return self.watch_namespace(namespace, names)
        # Python 3.13 sets attributes without a new version of the ``__dict__``: compare their values in each call
        return self._instances.add(namespace, names)

    def watch_dict(self, namespace: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Watch a whole dict, and return its keys and values in order."""
        content = tuple(dict.keys(namespace)), tuple(dict.values(namespace))
        self._dicts.append(namespace)
        self._contents.append((None, content))
        if not isinstance(namespace, collections.OrderedDict):
            return content
        keys = tuple(collections.OrderedDict.__iter__(namespace))  # move_to_end() does not change the dict's version
        self.watch_container(namespace, keys)
        return keys, tuple(dict.__getitem__(namespace, key) for key in keys)

    def watch_container(self, container: Any, content: tuple[Any, ...]) -> None:
        """Watch a container. ``content``: its elements, in the order of iteration."""
        self._containers.append((container, content))

    def watch_class(self, value: Any) -> None:
        """Watch the class of an object."""
        self._objects.append(value)
        self._classes.append(type(value))

    def watch_function(self, function: types.FunctionType) -> None:
        """Watch code and defaults of a function, unless it is of an installed package."""
        if "site-packages" not in function.__code__.co_filename:
            self._functions.append(function)

    def watch_reference(self, read: Callable[[], Any]) -> Any:
        """Watch which object ``read()`` returns, and return it."""
        value = read()
        self._references.append((read, value))
        return value

    def watch_cell(self, cell: types.CellType) -> Any:
        """Watch the content of a closure cell, and return it; MISSING if it is empty."""
        content = cell_content(cell)
        if content is MISSING:
            return self.watch_reference(functools.partial(cell_content, cell))
        self._cells.append(cell)
        self._cell_contents.append(content)
        return content

    def watch_value(self, read: Callable[[], Any]) -> Any:
        """Watch the value that ``read()`` returns, compared with ``==``, and return it."""
        value = read()
        self._values.append((read, value))
        return value


def _has_same_objects(namespace: dict[str, Any], names: Names, content: dict[str, Any]) -> bool:
    """Return whether a dict still has the same objects as in ``content`` at all keys in ``names``."""
    values = names.select(namespace)
    return values.keys() == content.keys() and all(values[name] is content[name] for name in values)


_FUNCTION_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CELL_CONTENT = operator.attrgetter("cell_contents")
