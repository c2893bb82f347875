"""Traverse everything that captured code can have read into a list of nodes; equal states give equal lists."""

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from memplan import _torch
from memplan.planning.capture.reads.executed import GETTERS, Executed, in_standard_library, is_user_code, uses_of
from memplan.planning.capture.reads.kinds import (
    HIDDEN_STATES,
    MISSING,
    PLAIN,
    POINTER,
    Identity,
    array_objects,
    buffer_reader,
    cached_results,
    dict_of,
    has_relevant_attributes,
    imported_modules,
    is_compared_by_identity,
    is_plain,
    iterate_builtin,
    module_of,
    slots_of,
    state_reader,
    value_key,
    virtual_subclasses,
    wrapped_parts,
)
from memplan.planning.capture.reads.watched import Names, Watched

_CACHED = type(functools.lru_cache(lambda: None))
"""Class of functions decorated by `functools.cache` or `functools.lru_cache`."""
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_FIXED = (types.ModuleType, type)
"""Owners of builtin functions that are not part of a function's state: ``math`` of ``math.sqrt``."""
_WRAPPING = ("contextlib", "functools")
"""Modules whose functions wrap others."""
_IGNORED_NAMES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__",
                    "__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__"})  # fmt: skip
_KNOWN_PACKAGES = frozenset({"builtins", "torch", "numpy", "memplan"})
_MODULE_STATE = frozenset({"training", "_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """Description of the values that executed code can read."""

    codes: Mapping[int, tuple[types.CodeType, dict[str, Any]]]
    """Code and its globals, by id of the code."""
    names: frozenset[str]
    """Attributes that the code names."""
    attributes_of_globals: frozenset[str]
    """Attributes that it reads of globals directly: the only ones that count of modules of torch and the stdlib."""
    reads_all: bool
    """Whether it reads attributes that it does not name."""
    fully_read_classes: frozenset[type]
    """Classes of objects whose attributes it all reads."""
    modules: frozenset[str]
    """Modules that it looked up by computed names."""

    def is_read(self, name: str, value: Any) -> bool:
        """Return whether captured code may have read the attribute of a class that has this name and value."""
        if name in self.names:
            return True
        if self.reads_all and not name.startswith("__") and isinstance(value, (*PLAIN, dict, list, tuple, set)):
            return True
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)  # of a property or classmethod
        return self._has_run(function)

    def _has_run(self, function: Any) -> TypeGuard[types.FunctionType]:
        """Return whether a value is a function that ran during the capture."""
        return isinstance(function, types.FunctionType) and id(function.__code__) in self.codes

    def is_open_ended(self, kind: type) -> bool:
        """Return whether captured code may have read any attribute of a class's objects: it reads all of them, or the
        class's ``__getattr__`` may read them."""
        if not self.fully_read_classes.isdisjoint(kind.__mro__):
            return True
        hooks = [vars(base).get(name) for base in kind.__mro__ for name in ("__getattr__", "__getattribute__")]
        return any(self._has_run(hook) and is_user_code(hook.__globals__) for hook in hooks)


def recipe_of(executed: Executed) -> Recipe:
    """Return the recipe for the code that was observed."""
    uses = [uses_of(code) for code, _ in executed.codes.values()]
    return Recipe(
        codes=dict(executed.codes),
        names=frozenset(executed.names).union(*(use.names for use in uses)),
        attributes_of_globals=frozenset[str]().union(*(use.attributes_of_globals for use in uses)),
        reads_all=executed.reads_all or any(use.reads_unnamed for use in uses),
        fully_read_classes=frozenset(executed.fully_read_classes),
        modules=frozenset(executed.modules),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """Values at a point in time, compared by value."""

    nodes: tuple[Any, ...]
    """Keys of plain values; of objects, tuples with the numbers of the nodes that they refer to."""
    labels: tuple[str, ...]
    """Name of each node in messages: the path by which it was first reached."""
    unseen: tuple[str, ...] = ()
    """Objects that cannot be examined, with the reason."""
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Snapshot) and self.nodes == other.nodes)

    def differences(self, other: Snapshot) -> list[str]:
        """Return the labels of the nodes that differ; only the first if one snapshot has more nodes."""
        nodes = zip(self.nodes, other.nodes, self.labels, strict=False)
        labels = [label for own_node, other_node, label in nodes if own_node != other_node]
        if len(self.nodes) == len(other.nodes):
            return labels
        longer = max(self.labels, other.labels, key=len)
        return labels[:1] or [longer[-1]]


class Walk(Watched):
    """Breadth-first traversal of everything readable, which numbers nodes in the order of their discovery."""

    def __init__(self, recipe: Recipe, module_names: Mapping[int, str]) -> None:
        super().__init__()
        self._recipe, self._module_names = recipe, module_names
        self._nodes: list[Any] = []
        """What a snapshot compares of each node, by number."""
        self._labels: list[str] = []
        """Name of each node in messages."""
        self._numbers: dict[int, int] = {}
        """Number of an object's node, by the id of the object."""
        self._alive: list[Any] = []
        """Objects in `_numbers`, kept alive so that ids are not reused."""
        self._queue: collections.deque[tuple[int, Any, str]] = collections.deque()
        """(number, object, label) of nodes whose content is still to be read."""
        self._unseen: list[str] = []
        """Objects that cannot be examined, with the reason."""
        self.added_names = set[str]()
        """Attribute names that objects hold, such as an `operator.attrgetter`: they have to be added to the recipe."""
        self.reads_all = recipe.reads_all
        """Whether a function that reads unnamed attributes was reached, such as `getattr` in a partial."""
        self._appended_states = set[str]()
        """Names in `HIDDEN_STATES` that already have a node."""
        self._names = Names(None if recipe.reads_all else recipe.names, _IGNORED_NAMES)
        """Names of attributes that are read."""

    def snapshot(self) -> Snapshot:
        """Return the snapshot of all nodes. Called after `start`, once."""
        self._alive.clear()  # a snapshot keeps no object alive
        self._numbers.clear()
        return Snapshot(tuple(self._nodes), tuple(self._labels), tuple(self._unseen))

    def start(self, modules: list[tuple[str, dict[str, Any], frozenset[str], type]]) -> None:
        """Traverse from the model's modules and from the code. Modules are (name, attributes, names of attributes that
        do not count, class)."""
        for path, attributes, ignored, kind in modules:
            of_module = f" of {path}" if path else ""
            reads_all = self._recipe.reads_all or self._recipe.is_open_ended(kind)
            names = Names(included=None if reads_all else self._recipe.names, excluded=ignored | _torch.BOOKKEEPING)
            for name, value in self.watch_module_attributes(attributes, names).items():
                self._visit(value, f"attribute {name}{of_module}")
            self._visit(kind, f"class {kind.__qualname__}")
            for tensors in _torch.own_tensor_tables(attributes):
                for name, tensor in tensors.items():
                    tensor_attributes = getattr(tensor, "__dict__", None)
                    watched = self.watch_instance(tensor_attributes, self._names) if tensor_attributes else {}
                    for attribute, value in watched.items():
                        self._visit(value, f"attribute {name}.{attribute}{of_module}")
        self._visit_globals()
        for name in HIDDEN_STATES:
            if name in self._recipe.names:
                self._append_hidden_state(name)
        while self._queue:
            number, value, label = self._queue.popleft()
            self._nodes[number] = self._node_of(value, label)
        self.record_versions()

    def _visit_globals(self) -> None:
        """Visit the globals that captured code loads, and the modules that it imports."""
        namespaces: dict[int, dict[str, Any]] = {}  # globals of code, by id()
        loaded_names: dict[int, set[str]] = {}  # globals that code loads, by id() of the namespace
        modules = dict.fromkeys(imported_modules(sorted(self._recipe.modules), package=""))  # a set in order
        for code, namespace in self._recipe.codes.values():
            if str(namespace.get("__name__")).startswith("torch."):  # its flags and hooks are part of each key
                continue
            uses = uses_of(code)
            namespaces[id(namespace)] = namespace
            loaded_names.setdefault(id(namespace), set()).update(uses.loaded_globals)
            modules.update(dict.fromkeys(imported_modules(uses.imports, str(namespace.get("__package__") or ""))))
        for key, namespace in namespaces.items():
            module = namespace.get("__name__", "")
            prefix = "" if module == "__main__" else f"{module}."
            for name, value in self.watch_namespace(namespace, Names(frozenset(loaded_names[key]))).items():
                self._visit(value, f"global {prefix}{name}")
        for name in modules:
            self._visit(self.watch_reference(functools.partial(sys.modules.get, name)), f"module {name}")

    # -- values

    def _visit(self, value: Any, label: str) -> Any:
        """Return the number of a value's node. ``label``: its name in messages. A value that was not visited before
        gets a number and is queued; `start` fills in its node."""
        if is_plain(value):
            return self._append_node(value_key(value), label)
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        number = self._append_node(node=None, label=label)
        if not isinstance(value, tuple):  # whether equal tuples are the same object says nothing
            self._numbers[id(value)] = number
            self._alive.append(value)
        self._queue.append((number, value, label))
        return number

    def _element_node(self, value: Any, label: Callable[[], str]) -> Any:
        """Return the key of a plain element of a container, else the number of its node."""
        return value_key(value) if is_plain(value) else self._visit(value, label())

    def _append_node(self, node: Any, label: str) -> int:
        """Append a node, and return its number."""
        self._nodes.append(node)
        self._labels.append(label)
        return len(self._nodes) - 1

    def _node_of(self, value: Any, label: str) -> Any:
        """Return the node of a queued value, by its type. A node is hashable or a tuple: the value's identity, type or
        key, and the numbers of the nodes that it refers to. ``label``: the value's name in messages."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            attributes = getattr(value, "__dict__", None)
            watched = self.watch_instance(attributes, self._names) if attributes else {}
            return Identity(value), *self._attribute_nodes(watched, label)
        if id(value) in self._module_names:
            return "module", self._module_names[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function_node(value, label)
        if isinstance(value, types.MethodType):
            return kind, self._visit(value.__func__, label), self._visit(value.__self__, label)
        if isinstance(value, types.BuiltinFunctionType):
            owner: Any = value.__self__
            self.reads_all = self.reads_all or any(value is getter for getter in GETTERS)
            self._append_hidden_state(str(value.__module__))
            if isinstance(owner, _CONTAINERS) or (hasattr(owner, "__dict__") and not isinstance(owner, _FIXED)):
                return kind, value.__name__, self._visit(owner, label)
            return Identity(value)
        if isinstance(value, type):
            return self._class_node(value, label)
        if isinstance(value, types.ModuleType):
            return self._module_node(value)
        inner = wrapped_parts(value)
        if inner is not None:
            return kind, *(self._visit(part, label) for part in inner)
        if isinstance(value, _CACHED):
            self.watch_value(lambda: value.cache_info().currsize)
            results = cached_results(value)
            # The lambda keeps the results: their ids stay valid.
            self.watch_value(lambda: (len(results), [*map(id, cached_results(value))]))
            wrapped = [part for part in gc.get_referents(value) if not isinstance(part, (type, dict))]
            return kind, *(self._visit(part, label) for part in (*wrapped, *results))
        if isinstance(value, weakref.ref):
            return kind, self._visit(self.watch_reference(value), label)
        if isinstance(value, contextvars.ContextVar):
            return Identity(value), self._visit(self.watch_reference(lambda: value.get(MISSING)), label)
        if value is MISSING or kind is object:
            return Identity(value)
        return self._object_node(value, label)

    def _function_node(self, value: types.FunctionType, label: str) -> Any:
        """Return the node of a function: its code, closure, defaults and attributes if it ran during the capture, what
        it wraps if it is a wrapper, else its code or identity alone."""
        code = value.__code__
        if id(code) not in self._recipe.codes:
            if value.__globals__.get("__name__") in _WRAPPING:
                # of functools.singledispatch, whose closure has a cache, only the implementations by type
                parts = [vars(value)["registry"]] if "registry" in vars(value) else [
                    *map(self.watch_cell, value.__closure__ or ()), vars(value).get("__wrapped__")
                ]  # fmt: skip
                return Identity(value), *(self._visit(part, label) for part in parts)
            return Identity(value) if not is_user_code(value.__globals__) else (types.FunctionType, code)
        self.watch_function(value)
        parts = list[Any]()
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            parts.append(self._visit(self.watch_cell(cell), f"{label}, {name}"))
        if value.__defaults__:
            parts.append(self._visit(value.__defaults__, f"{label}, its defaults"))
        if value.__kwdefaults__:
            parts.append(self._visit(value.__kwdefaults__, f"{label}, its defaults"))
        parts += self._attribute_nodes(self.watch_instance(value.__dict__, self._names), label)
        return types.FunctionType, code, *parts

    def _class_node(self, kind: type, label: str) -> Any:
        """Return the node of a class: its identity, its virtual subclasses, and those attributes of it and its base
        classes that captured code may have read."""
        if issubclass(kind, enum.Enum):
            members: Mapping[str, Any] = kind.__members__
            return Identity(kind), *(self._visit(member, label) for member in members.values() if not is_plain(member))
        self._append_hidden_state(module_of(kind))
        parts = list[Any]()
        if isinstance(kind, abc.ABCMeta):
            self.watch_value(abc.get_cache_token)
            parts.append(virtual_subclasses(kind))
        for base in kind.__mro__:
            if not has_relevant_attributes(base):
                continue
            attributes = dict_of(base)
            if "__match_args__" in self._recipe.names:  # ``case Point(x, y)`` reads the attributes listed there
                self.added_names.update(attributes.get("__match_args__", ()))
            read_names = frozenset(name for name, value in attributes.items() if self._recipe.is_read(name, value))
            base_label = label if base is kind and not label.startswith("class ") else f"class {base.__qualname__}"
            names = Names(self._recipe.names | read_names, _IGNORED_NAMES)
            parts += self._namespace_nodes(attributes, base_label, names)
        metaclass = type(kind)
        is_relevant = has_relevant_attributes(metaclass)
        parts.append(self._visit(metaclass, f"class {metaclass.__qualname__}") if is_relevant else None)
        return Identity(kind), *parts

    def _append_hidden_state(self, name: str) -> None:
        """Add the state of a module or a function of `HIDDEN_STATES`, once."""
        if name in HIDDEN_STATES and name not in self._appended_states:
            self._appended_states.add(name)
            self._append_node(self.watch_value(HIDDEN_STATES[name]), f"state of {name}")

    def _module_node(self, value: types.ModuleType) -> Any:
        """Return the node of a Python module: its identity and the globals that captured code names."""
        namespace, name = vars(value), value.__name__
        if name == "builtins":
            return Identity(value)
        self._append_hidden_state(name)
        names = self._recipe.names if is_user_code(namespace) else self._recipe.attributes_of_globals
        ignored = _IGNORED_NAMES | {"modules"} if value is sys else _IGNORED_NAMES
        return Identity(value), *self._namespace_nodes(namespace, f"global {name}", Names(names, ignored))

    # -- objects and containers

    def _object_node(self, value: Any, label: str) -> Any:
        """Return the node of an object: its class, the elements of a container, and its further content.

        That is the first that applies of: the bytes of an array, the state of a logger, the object's identity (locks,
        files), the attributes and slots that the code names, the content of an object written in C.
        """
        kind = type(value)
        parts = [kind if module_of(kind) == "builtins" else self._visit(kind, f"class {kind.__qualname__}")]
        if isinstance(value, POINTER):
            self._unseen.append(f"the {label}, a pointer of ctypes")
        elements = self._container_nodes(value, label)
        parts += elements or ()
        read_buffer = buffer_reader(value) if elements is None else None
        if read_buffer is not None:
            return *parts, self.watch_value(read_buffer)
        read_state = state_reader(value)
        if read_state is not None:
            return *parts, Identity(value), repr(self.watch_value(read_state))
        if is_compared_by_identity(kind) and not isinstance(value, threading.local):
            return *parts, Identity(value)
        if isinstance(value, PLAIN):
            parts.append(value_key(value))
        if isinstance(value, enum.Enum):
            parts.append(self._visit(value._value_, label))
        names = self._attributes_to_read(value)
        attributes, slots = getattr(value, "__dict__", None), slots_of(kind)
        if isinstance(attributes, dict):
            self.watch_class(value)
            parts += self._attribute_nodes(self.watch_instance(attributes, names), label)
        for name in slots:
            if names.included is None or name in names.included:
                content = self.watch_reference(functools.partial(getattr, value, name, MISSING))
                parts.append((name, self._visit(content, _attribute_label(label, name))))
        is_c_object = elements is None and not isinstance(attributes, dict) and not slots
        return (*parts, self._c_object_node(value, label)) if is_c_object else tuple(parts)

    def _attributes_to_read(self, value: Any) -> Names:
        """Return the names of the attributes of an object that captured code may have read."""
        kind, names = type(value), self._names
        if self._recipe.is_open_ended(kind) or in_standard_library(module_of(kind)):
            names = Names(included=None, excluded=_IGNORED_NAMES)
        if isinstance(value, nn.Module):
            included = None if names.included is None else names.included | _MODULE_STATE
            names = Names(included, _torch.BOOKKEEPING - _MODULE_STATE)
        return names

    def _container_nodes(self, value: Any, label: str) -> list[Any] | None:
        """Return the nodes of the elements of a dict, array of objects, sequence or set; None for other objects."""
        if isinstance(value, dict):
            nodes = list[Any]()
            for key, item in zip(*self.watch_dict(value), strict=True):
                key_node = self._element_node(key, lambda: label)
                nodes.append((key_node, self._element_node(item, lambda key=key: f"{label}[{key!r:.40}]")))
            return nodes
        objects = array_objects(value)
        if objects is not None:
            # The lambda keeps the objects: their ids stay valid.
            self.watch_value(lambda: (len(objects), [*map(id, array_objects(value) or ())]))
            return self._sequence_nodes(objects, label)
        if isinstance(value, types.MappingProxyType):
            return [self._visit(gc.get_referents(value)[0], label)]
        if not isinstance(value, (tuple, list, set, frozenset, collections.deque)):
            return None
        content = tuple(iterate_builtin(value))
        if not isinstance(value, (tuple, frozenset)):
            self.watch_container(value, content)
        if isinstance(value, (set, frozenset)):
            plain_keys = frozenset(value_key(element) for element in content if is_plain(element))
            return [plain_keys, *(Identity(element) for element in content if not is_plain(element))]
        return self._sequence_nodes(content, label)

    def _sequence_nodes(self, items: Iterable[Any], label: str) -> list[Any]:
        """Return the nodes of the elements of a sequence. ``label``: its name in messages."""
        return [self._element_node(item, lambda index=index: f"{label}[{index}]") for index, item in enumerate(items)]

    def _c_object_node(self, value: Any, label: str) -> Any:
        """Return the node of an object of a class written in C, whose content has no names in Python."""
        kind = type(value)
        if isinstance(value, types.CellType):
            return self._visit(self.watch_cell(value), label)
        if isinstance(value, threading.local):
            return self._namespace_nodes(value.__dict__, label, Names(included=None))
        if isinstance(value, (operator.attrgetter, operator.methodcaller, operator.itemgetter)):
            arguments = value.__reduce__()[1]
            if not isinstance(value, operator.itemgetter):
                self.added_names.update(name for path in arguments if isinstance(path, str) for name in path.split("."))
            return self._visit(arguments, label)
        if hasattr(kind, "__next__") and not isinstance(value, io.IOBase):
            self._unseen.append(f"the {label}, an iterator ({kind.__name__}), which each reading moves on")
            return Identity(value)
        if kind.__hash__ is not object.__hash__ and kind.__hash__ is not None and kind.__eq__ is not object.__eq__:
            return value_key(value)  # an immutable value
        if module_of(kind).partition(".")[0] not in _KNOWN_PACKAGES and not in_standard_library(module_of(kind)):
            self._unseen.append(f"the {label}, an object of {module_of(kind)}.{kind.__qualname__}, whose content "
                                "Python does not see")  # fmt: skip
        return Identity(value)

    def _namespace_nodes(self, namespace: dict[str, Any], label: str, names: Names) -> list[Any]:
        """Return (name, number of the node) of the attributes of a class or module that are in ``names``."""
        return self._attribute_nodes(self.watch_namespace(namespace, names), label)

    def _attribute_nodes(self, values: Mapping[str, Any], label: str) -> list[Any]:
        """Return (name, number of the node) of each attribute of the object with this label. ``values``: by name."""
        return [(name, self._visit(value, _attribute_label(label, name))) for name, value in values.items()]


def _attribute_label(label: str, name: str) -> str:
    """Return the label of an attribute, as in ``attribute config.scale of layer``."""
    head, of, path = label.partition(" of ")
    return f"{head}.{name}{of}{path}"
