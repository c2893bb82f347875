"""The owner of a leaked tensor, from Python's references to it: a list, an attribute, a closure, a hook."""

from __future__ import annotations

import gc
import inspect
import re
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._frames import callers
from memplan.trace.recording.place import format_frame, is_users

_DEEPEST = 6
"""Greatest number of references between a tensor and its owner."""
_WIDEST = 64
"""Greatest number of objects whose referrers are searched at each depth."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_PUTS = r"\s*(\.(append|appendleft|extend|add|insert|setdefault|update|put)\b|\[[^]]*\]\s*=[^=]|\+=)"
_ASSIGNS = r"\s*(:[^=]+)?=[^=]"
"""What follows a name in a line that puts an element into it, and in a line that assigns it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What keeps a tensor alive."""

    text: str
    """In words, for the report."""
    stored_at: str | None = None
    """``file:line`` of the code that stores the tensor there; None: unknown."""
    stores: bool = False
    """Whether that line puts an element into a container, rather than assigns a name."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A reference on the path from a tensor up to its owner."""

    text: str
    """The referrer in words."""
    key: Any
    """The key of the reference if the referrer is a dict, else None."""
    referrer: int
    """The referrer's id()."""

    @classmethod
    def of(cls, referrer: Any, referent: Any) -> _Link:
        """Return the reference from one object to another."""
        key = _key_of(referrer, referent)
        if isinstance(referrer, types.CellType):
            return cls("a closure", None, id(referrer))
        text = f"a {type(referrer).__name__}"
        return cls(f"{text} (key {key!r:.40})" if isinstance(key, (str, int)) else text, key, id(referrer))


_Chain = tuple[_Link, ...]
"""From the reference to the tensor itself up to the referrer that may be the owner."""

NOBODY = Owner("no Python object: autograd's graph, or something else in C++")


def tensors_on(keys: Collection[int]) -> dict[int, list[torch.Tensor]]:
    """Return the Python tensors on the storages with these keys, by key. Walks all of Python's objects once."""
    tensors: dict[int, list[torch.Tensor]] = {}
    for instance in gc.get_objects():
        if issubclass(type(instance), torch.Tensor):  # isinstance() would call __class__ of any library's proxies
            try:
                key = _torch.storage_key(instance.untyped_storage())
            except Exception:  # tensor subclasses without a storage raise errors of any type
                continue
            if key in keys:
                tensors.setdefault(key, []).append(instance)
    return tensors


class Owners:
    """Finds the owners of tensors in the running functions and loaded modules at the time of construction. Layers of
    the models, and their hooks, are named in the answers."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Look at the running functions and loaded modules as they are now. ``models``: whose layers and hooks have
        names in answers."""
        modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
        self._globals = {id(vars(module)): module for module in modules}
        """By id() of a loaded module's globals: the module."""
        self._local_containers = dict(_local_containers())
        """By id() of a container in a local variable of a running function: the variable's name and the function's
        code."""
        self._layers = dict[int, str]()
        """Name of each module, by its id()."""
        self._hooks = list[tuple[types.CodeType, str]]()
        """(code of a hook, name of its layer)."""
        for model in models:
            for path, module in model.named_modules():
                layer = path or type(module).__name__
                self._layers.setdefault(id(module), layer)
                hooks = map(_code_of, _torch.hooks_of(module))
                self._hooks += [(code, layer) for code in hooks if code is not None]

    def of(self, tensors: list[torch.Tensor]) -> Owner:
        """Return the owner of these aliasing tensors: the nearest named in the user's code, else the nearest container.

        A named owner with a line that puts elements into it is preferred to one that is only assigned.
        """
        named, nearest = list[Owner](), NOBODY
        level, chains = list[Any](tensors), list[_Chain]([()] * len(tensors))  # objects, and the path to each
        seen, sentinel = {id(tensors), *map(id, tensors)}, object()
        for _ in range(_DEEPEST):
            next_level, next_chains = list[Any](), list[_Chain]()
            seen |= {id(level), id(next_level)}  # these lists are referrers too, but ours
            positions = {id(referent): position for position, referent in enumerate(level)}
            for referrer in gc.get_referrers(*level, sentinel):
                if id(referrer) in seen or isinstance(referrer, (types.FrameType, types.ModuleType)):
                    continue
                if type(referrer) is tuple and referrer and referrer[-1] is sentinel:
                    continue  # the argument tuple of this very call
                seen.add(id(referrer))
                # no variable for the referents: it would be found as a referrer of the next level
                position = next(positions[id(item)] for item in gc.get_referents(referrer) if id(item) in positions)
                chain = (*chains[position], _Link.of(referrer, level[position]))
                owner = self._named_owner(referrer, level[position], chain)
                if owner is not None:
                    named.append(owner)
                nearest = Owner(chain[-1].text) if nearest is NOBODY else nearest
                if id(referrer) not in self._globals and not isinstance(referrer, type):
                    next_level.append(referrer)
                    next_chains.append(chain)
            if any(owner.stores for owner in named) or not next_level:
                break
            level, chains = next_level[:_WIDEST], next_chains[:_WIDEST]
        return next((owner for owner in named if owner.stores), named[0] if named else nearest)

    def _named_owner(self, referrer: Any, referent: Any, chain: _Chain) -> Owner | None:
        """Return the owner if the referrer has a name in the user's code, else None. ``chain`` has the references from
        the tensor up to the referrer, which its last link describes."""
        key = chain[-1].key
        if id(referrer) in self._globals:
            module = self._globals[id(referrer)]
            if not _is_of_user(module):
                return None
            inner = chain[:-2]  # without the module's dict and the global itself, which the text names
            return self._owner_with_line(f"{_type_text(referent)} `{key}`, a global", inner, module, str(key))
        if id(referrer) in self._local_containers and isinstance(referrer, _CONTAINERS):
            name, code = self._local_containers[id(referrer)]
            return self._owner_with_line(f"{_type_text(referrer)} `{name}` of {code.co_name}", chain[:-1], code, name)
        if isinstance(referrer, types.FunctionType):
            return self._closure(referrer, chain) if is_users(referrer.__code__.co_filename) else None
        if isinstance(referrer, (torch.Tensor, types.CellType, types.MethodType, *_CONTAINERS)):
            return None
        if isinstance(referrer, type):
            return self._class_attribute(referrer, chain)
        # ``inner`` are the links below the attribute's value: without the instance, the value and, if the instance
        # refers to it through its ``__dict__``, that dict
        name, inner = _attribute(referrer, referent), chain[:-2]
        if name is None and chain[:-1] and _own_dict(referrer) is referent:
            name, inner = str(chain[-2].key), chain[:-3]
        if name is None:
            return None
        layer = self._layers.get(id(referrer))
        instance = f"layer {layer}" if layer is not None else f"a {type(referrer).__name__}"
        owner = self._owner_with_line(f"the attribute `{name}` of {instance}", inner, type(referrer), rf"\w+\.{name}")
        return replace(owner, stores=owner.stores or layer is not None)  # above a layer there are only its parents

    def _class_attribute(self, kind: type, chain: _Chain) -> Owner | None:
        """Return a class of the user as owner, by the attribute on the path to the tensor; None for other classes."""
        name = next((link.key for link in reversed(chain) if link.key in vars(kind)), None)
        if name is None or not _is_of_user(sys.modules.get(kind.__module__)):
            return None
        text = f"the attribute `{name}` of the class {kind.__name__}"
        # the last links are those to the class, its dict and the attribute's own value: the text names them
        return self._owner_with_line(text, chain[:-3], kind, rf"\w+\.{name}")

    def _closure(self, function: types.FunctionType, chain: _Chain) -> Owner:
        """Return a function as owner, by the variable of its closure through which it refers to the tensor."""
        code = function.__code__
        definition = format_frame((code.co_filename, code.co_firstlineno))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        in_chain = {link.referrer for link in chain}
        name = next((name for name, cell in cells if id(cell) in in_chain), None)
        if name is None:
            return Owner(f"the function {code.co_name}", definition)
        owner = self._owner_with_line(f"`{name}` in the closure of {code.co_name}", (), code, name)
        if owner.stored_at is not None:
            return owner
        is_tensor = len(chain) == 3  # cell, tuple of cells, function: the name stands for the tensor itself
        return Owner(owner.text, definition, is_tensor)

    def _owner_with_line(self, text: str, chain: _Chain, source: Any, name: str) -> Owner:
        """Return an owner with the first line of ``source`` that stores into ``name``. The containers of ``chain``,
        between the tensor and the owner, are appended to ``text``; ``source`` is a module, class or code object,
        ``name`` a regular expression."""
        text += f" (in {' in '.join(link.text for link in chain)})" if chain else ""
        line, stores = _line_of(source, name)
        by = next((layer for code, layer in self._hooks if line is not None and _contains_line(code, line)), None)
        text += f", filled by a hook of {by}" if by is not None else ""
        return Owner(text, format_frame(line), stores)


def _is_of_user(module: Any) -> bool:
    """Return whether a module is the user's own code. Notebook cells have no file and count as the user's."""
    return getattr(module, "__name__", "") == "__main__" or is_users(getattr(module, "__file__", None) or "<>")


def _local_containers() -> Iterator[tuple[int, tuple[str, types.CodeType]]]:
    """Yield (id, (variable, function)) of each container in a local variable of the user's running functions."""
    for frame in callers():
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED and is_users(code.co_filename):
            values = frame.f_locals
            yield from [(id(value), (name, code)) for name, value in values.items() if isinstance(value, _CONTAINERS)]
            if type(values) is dict:  # before Python 3.13 a copy: the frame would keep its values alive
                values.clear()


def _code_of(hook: Any) -> types.CodeType | None:
    """Return the code of a function, method or partial; None for other callables."""
    function = inspect.unwrap(getattr(hook, "func", hook)) if callable(hook) else None
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _key_of(mapping: Any, value: Any) -> Any:
    """Return the key of a dict whose value is this very object; None if there is none, or for other types."""
    if not isinstance(mapping, dict):
        return None
    return next((key for key, item in list(mapping.items()) if item is value), None)


def _own_dict(instance: Any) -> Any:
    """Return the ``__dict__`` of an object, which its class may hide; None if it has none."""
    try:
        return object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None


def _attribute(instance: Any, value: Any) -> str | None:
    """Return the name of the instance's attribute, in its ``__dict__`` or a slot, that is this value; None: no such."""
    name = _key_of(_own_dict(instance), value)
    if name is not None:
        return str(name)
    members = [item for kind in type(instance).__mro__ for item in vars(kind).items()]
    slots = (name for name, member in members if isinstance(member, types.MemberDescriptorType))
    return next((name for name in slots if getattr(instance, name, None) is value), None)


def _type_text(value: Any) -> str:
    return "the object" if type(value) is object else f"the {type(value).__name__}"


def _line_of(source: Any, name: str) -> tuple[tuple[str, int] | None, bool]:
    """Return (file, line) of the line that stores into a name, and whether it puts an element into it.

    It is the first line of a module, class or function that puts an element into the name, else the first that assigns
    the name. (None, False) if there is neither. ``name`` is a regular expression.
    """
    try:
        file = inspect.getsourcefile(source)
        lines, start = inspect.getsourcelines(source)
    except (OSError, TypeError):
        return None, False
    if file is None or not is_users(file):
        return None, False
    for form, stores in ((_PUTS, True), (_ASSIGNS, False)):
        pattern = re.compile(rf"\b{name}{form}")
        offset = next((offset for offset, line in enumerate(lines) if pattern.search(line)), None)
        if offset is not None:
            return (file, max(start, 1) + offset), stores
    return None, False


def _contains_line(code: types.CodeType, line: tuple[str, int]) -> bool:
    """Return whether a line (file, number) lies between the first and the last line of a function's code."""
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return code.co_filename == line[0] and bool(numbers) and min(numbers) <= line[1] <= max(numbers)
