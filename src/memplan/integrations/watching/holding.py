"""Who holds a tensor, by Python's own references: a list, an attribute, a closure, a hook. Looked up once a leak."""

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
from memplan.trace.recording.place import format_frame, is_users

_DEEPEST = 6
"""References that lie between a tensor and what is named, at the most."""
_WIDEST = 64
"""Objects looked at in each of these levels, at the most."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_PUTS = r"\s*(\.(append|appendleft|extend|add|insert|setdefault|update|put)\b|\[[^]]*\]\s*=[^=]|\+=)"
_ASSIGNS = r"\s*(:[^=]+)?=[^=]"
"""What follows a name in a line that puts something into it, and in one that assigns it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a tensor, in words, and ``file:line`` of what stored it there, where that was found."""

    text: str
    kept_at: str | None = None
    stores: bool = False
    """Whether that line puts something into a container, rather than gives it a name."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One reference on the way up from a tensor: what holds, in words, and under which key where that is a dict."""

    text: str
    key: Any
    holder: int
    """Its id()."""

    @classmethod
    def of(cls, holder: Any, held: Any) -> _Link:
        """Describe a reference."""
        key = _key_of(holder, held)
        if isinstance(holder, types.CellType):
            return cls("a closure", None, id(holder))
        text = f"a {type(holder).__name__}"
        return cls(f"{text} (key {key!r:.40})" if isinstance(key, (str, int)) else text, key, id(holder))


_Chain = tuple[_Link, ...]

NOBODY = Holder("no Python object: autograd's graph, or something else in C++")


def tensors_on(keys: Collection[int]) -> dict[int, list[torch.Tensor]]:
    """Return the tensors that Python knows on storages with these keys. It walks all objects once."""
    found: dict[int, list[torch.Tensor]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):  # isinstance would ask proxies of others for their class
            try:
                key = _torch.storage_key(one.untyped_storage())
            except Exception:  # a tensor without a storage, of any library, raises what it likes
                continue
            if key in keys:
                found.setdefault(key, []).append(one)
    return found


class Holders:
    """Looks up holders among what is running and loaded now."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._globals = {id(vars(module)): module for module in list(sys.modules.values()) if _is_module(module)}
        self._locals = dict(_locals())
        self._layers = dict[int, str]()
        self._hooks = list[tuple[types.CodeType, str]]()
        for model in models:
            for path, module in model.named_modules():
                layer = path or type(module).__name__
                self._layers.setdefault(id(module), layer)
                hooks = map(_code_of, _torch.hooks_of(module))
                self._hooks += [(code, layer) for code in hooks if code is not None]

    def of(self, tensors: list[torch.Tensor]) -> Holder:
        """Return who holds one of these tensors: what has a name in the user's code, else the nearest container.

        Of several names, that of the code whose line stores into it is told.
        """
        named, first = list[Holder](), NOBODY
        level, chains = list[Any](tensors), list[_Chain]([()] * len(tensors))
        seen, mark = {id(tensors), *map(id, tensors)}, object()
        for _ in range(_DEEPEST):
            above, further = list[Any](), list[_Chain]()
            seen |= {id(level), id(above)}  # not the user's
            places = {id(one): place for place, one in enumerate(level)}
            for holder in gc.get_referrers(*level, mark):
                if id(holder) in seen or isinstance(holder, (types.FrameType, types.ModuleType)):
                    continue
                if type(holder) is tuple and holder and holder[-1] is mark:
                    continue  # the arguments of this very call
                seen.add(id(holder))
                at = next(places[id(one)] for one in gc.get_referents(holder) if id(one) in places)
                held, link = level[at], _Link.of(holder, level[at])
                name = self._named(holder, held, (*chains[at], link))
                if name is not None:
                    named.append(name)
                first = Holder(link.text) if first is NOBODY else first
                if id(holder) not in self._globals and not isinstance(holder, type):
                    above.append(holder)
                    further.append((*chains[at], link))
            if any(one.stores for one in named) or not above:
                break
            level, chains = above[:_WIDEST], further[:_WIDEST]
        return next((one for one in named if one.stores), named[0] if named else first)

    def _named(self, holder: Any, held: Any, chain: _Chain) -> Holder | None:
        """Return the holder where it has a name in the user's code; the last link of the chain is its own."""
        key = chain[-1].key
        if id(holder) in self._globals:
            module = self._globals[id(holder)]
            if not _is_of_user(module):
                return None
            return self._stored(f"{_kind(held)} `{key}`, a global", chain[:-2], module, str(key))
        if id(holder) in self._locals and isinstance(holder, _CONTAINERS):
            name, code = self._locals[id(holder)]
            return self._stored(f"{_kind(holder)} `{name}` of {code.co_name}", chain[:-1], code, name)
        if isinstance(holder, types.FunctionType):
            return self._closure(holder, chain) if is_users(holder.__code__.co_filename) else None
        if isinstance(holder, (torch.Tensor, types.CellType, types.MethodType, *_CONTAINERS)):
            return None
        if isinstance(holder, type):
            return self._of_class(holder, chain)
        name, inner = _attribute(holder, held), chain[:-2]
        if name is None and chain[:-1] and _own_dict(holder) is held:
            name, inner = str(chain[-2].key), chain[:-3]
        if name is None:
            return None
        layer = self._layers.get(id(holder))
        owner = f"layer {layer}" if layer is not None else f"a {type(holder).__name__}"
        stored = self._stored(f"the attribute `{name}` of {owner}", inner, type(holder), rf"\w+\.{name}")
        return replace(stored, stores=stored.stores or layer is not None)  # above a layer there are only its parents

    def _of_class(self, kind: type, chain: _Chain) -> Holder | None:
        name = next((link.key for link in reversed(chain) if link.key in vars(kind)), None)
        if name is None or not _is_of_user(sys.modules.get(kind.__module__)):
            return None
        return self._stored(f"the attribute `{name}` of the class {kind.__name__}", chain[:-3], kind, rf"\w+\.{name}")

    def _closure(self, function: types.FunctionType, chain: _Chain) -> Holder:
        code = function.__code__
        made = (code.co_filename, code.co_firstlineno)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        met = {link.holder for link in chain}
        name = next((name for name, cell in cells if id(cell) in met), None)
        if name is None:
            return Holder(f"the function {code.co_name}", format_frame(made))
        stored = self._stored(f"`{name}` in the closure of {code.co_name}", (), code, name)
        if stored.kept_at is not None:
            return stored
        direct = len(chain) == 3  # a cell, the tuple of cells, the function: it is the tensor that the name stands for
        return Holder(stored.text, format_frame(made), direct)

    def _stored(self, text: str, chain: _Chain, source: Any, name: str) -> Holder:
        """Return a holder with the first line of some code that stores into a name."""
        text += f" (in {' in '.join(link.text for link in chain)})" if chain else ""
        found, stores = _line_of(source, name)
        by = next((layer for code, layer in self._hooks if found is not None and _contains(code, found)), None)
        text += f", filled by a hook of {by}" if by is not None else ""
        return Holder(text, format_frame(found), stores)


def _is_module(module: Any) -> bool:
    return isinstance(module, types.ModuleType)


def _is_of_user(module: Any) -> bool:
    """Return whether a module is the user's; what a notebook runs has no file."""
    return getattr(module, "__name__", "") == "__main__" or is_users(getattr(module, "__file__", None) or "<>")


def _locals() -> Iterator[tuple[int, tuple[str, types.CodeType]]]:
    """Yield the ids of what local variables of the user's running functions hold, with name and function."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED and is_users(code.co_filename):
            values = frame.f_locals
            yield from [(id(value), (name, code)) for name, value in values.items() if _is_named_by_local(value)]
            if type(values) is dict:  # before Python 3.13 a copy that the frame keeps, and with it all that is in it
                values.clear()
        frame = frame.f_back


def _is_named_by_local(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _code_of(hook: Any) -> types.CodeType | None:
    function = inspect.unwrap(getattr(hook, "func", hook)) if callable(hook) else None
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _key_of(mapping: Any, value: Any) -> Any:
    if not isinstance(mapping, dict):
        return None
    return next((key for key, one in list(mapping.items()) if one is value), None)


def _own_dict(holder: Any) -> Any:
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None


def _attribute(holder: Any, held: Any) -> str | None:
    """Return the name of the attribute of an object that is another one."""
    name = _key_of(_own_dict(holder), held)
    if name is not None:
        return str(name)
    slots = [(name, one) for kind in type(holder).__mro__ for name, one in vars(kind).items()]
    members = (name for name, one in slots if isinstance(one, types.MemberDescriptorType))
    return next((name for name in members if getattr(holder, name, None) is held), None)


def _kind(holder: Any) -> str:
    return "the object" if type(holder) is object else f"the {type(holder).__name__}"


def _line_of(source: Any, name: str) -> tuple[tuple[str, int] | None, bool]:
    """Return file and line of the first statement in a module, class or function that puts something into a name, and
    true; else of the first that assigns it, and false."""
    try:
        file = inspect.getsourcefile(source)
        lines, start = inspect.getsourcelines(source)
    except (OSError, TypeError):
        return None, False
    if file is None or not is_users(file):
        return None, False
    for form, stores in ((_PUTS, True), (_ASSIGNS, False)):
        pattern = re.compile(rf"\b{name}{form}")
        found = next((at for at, line in enumerate(lines) if pattern.search(line)), None)
        if found is not None:
            return (file, max(start, 1) + found), stores
    return None, False


def _contains(code: types.CodeType, line: tuple[str, int]) -> bool:
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return code.co_filename == line[0] and bool(numbers) and min(numbers) <= line[1] <= max(numbers)
