"""Who holds a tensor, by Python's own references: a list, an attribute, a closure, a hook; looked up once for a leak."""

from __future__ import annotations

import gc
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.trace.recording.place import format_frame, is_users

_DEEPEST = 6
"""References that lie between a tensor and what is named, at the most."""
_WIDEST = 64
"""Objects looked at in each of these levels, at the most."""
_CONTAINERS = (list, tuple, set, frozenset)
_STORES = r"\s*(\.(append|appendleft|extend|add|insert|setdefault|update)\b|\[[^]]*\]\s*=[^=]|\+?=[^=])"
"""What follows a name in the line that puts something into it."""

_EMPTY = r"([\[({]|None\b|(\w+\.)*(deque|list|dict|set|defaultdict)\b)"
"""What a container is made of: such a line stores nothing."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a tensor, in words, and ``file:line`` of what stored it there, where that was found."""

    text: str
    kept_at: str | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """How far the way up from a tensor has come: what it is in, in words, and the key under which a dict has it."""

    chain: str
    key: Any


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
        """Return who holds one of these tensors: what has a name in the user's code, else the nearest container."""
        first: Holder | None = None
        level, steps = list[Any](tensors), [_Step("", None)] * len(tensors)
        seen = {id(tensors), *map(id, tensors)}
        for _ in range(_DEEPEST):
            above, further = list[Any](), list[_Step]()
            seen |= {id(level), id(above)}  # not the user's
            for one, step in zip(level, steps, strict=True):
                for holder in gc.get_referrers(one):
                    if id(holder) in seen or isinstance(holder, types.FrameType):
                        continue
                    seen.add(id(holder))
                    named = self._named(holder, one, step)
                    if named is not None:
                        return named
                    text = _described(holder, one)
                    first = first or Holder(text)
                    above.append(holder)
                    further.append(_Step(f"{step.chain} in {text}" if step.chain else text, _key_of(holder, one)))
            level, steps = above[:_WIDEST], further[:_WIDEST]
        if first is None:
            return NOBODY if not tensors else Holder("a local variable, or something else that Python does not list")
        return first

    def _named(self, holder: Any, held: Any, step: _Step) -> Holder | None:
        """Return the holder where it has a name in the user's code."""
        inner = f" (it is in {step.chain})" if step.chain else ""
        if id(holder) in self._globals:
            name, module = _key_of(holder, held), self._globals[id(holder)]
            if name is None or not is_users(getattr(module, "__file__", None) or "<>"):
                return None
            return self._stored(f"{_kind(held)} `{name}`, a global{inner}", module, name)
        if id(holder) in self._locals:
            name, code = self._locals[id(holder)]
            return self._stored(f"{_kind(holder)} `{name}` of {code.co_name}{inner}", code, name)
        if isinstance(holder, types.FunctionType):
            return self._closure(holder, held) if is_users(holder.__code__.co_filename) else None
        if isinstance(holder, (dict, torch.Tensor, types.CellType, types.MethodType, *_CONTAINERS)):
            return None
        name = _attribute(holder, held, step.key)
        if name is None:
            return None
        layer = self._layers.get(id(holder))
        owner = f"layer {layer}" if layer is not None else f"a {type(holder).__name__}"
        return self._stored(f"the attribute `{name}` of {owner}{inner}", type(holder), rf"\w+\.{name}")

    def _closure(self, function: types.FunctionType, held: Any) -> Holder:
        code = function.__code__
        made = (code.co_filename, code.co_firstlineno)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        name = next((name for name, cell in cells if cell is held), None)
        if name is None:
            return Holder(f"the function {code.co_name}", format_frame(made))
        stored = self._stored(f"`{name}` in the closure of {code.co_name}", code, name)
        return stored if stored.kept_at else Holder(stored.text, format_frame(made))

    def _stored(self, text: str, source: Any, name: str) -> Holder:
        """Return a holder with the first line of some code that stores into a name."""
        found = _line_of(source, name)
        if found is None:
            return Holder(text)
        by = next((layer for code, layer in self._hooks if _contains(code, found)), None)
        return Holder(text + (f", filled by a hook of {by}" if by is not None else ""), format_frame(found))


def _is_module(module: Any) -> bool:
    return isinstance(module, types.ModuleType)


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
    return not isinstance(value, (torch.Tensor, nn.Module, int, float, str, type(None), types.ModuleType))


def _code_of(hook: Any) -> types.CodeType | None:
    function = inspect.unwrap(getattr(hook, "func", hook)) if callable(hook) else None
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _key_of(mapping: Any, value: Any) -> Any:
    if not isinstance(mapping, dict):
        return None
    return next((key for key, one in list(mapping.items()) if one is value), None)


def _attribute(holder: Any, held: Any, key: Any) -> str | None:
    """Return the name of an object's attribute that is ``held``, or that ``held``, its ``__dict__``, has under a key."""
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        own = None
    if own is held:
        return str(key)
    name = _key_of(own, held)
    if name is not None:
        return str(name)
    slots = [(name, one) for kind in type(holder).__mro__ for name, one in vars(kind).items()]
    members = (name for name, one in slots if isinstance(one, types.MemberDescriptorType))
    return next((name for name in members if getattr(holder, name, None) is held), None)


def _kind(holder: Any) -> str:
    return "the object" if type(holder) is object else f"the {type(holder).__name__}"


def _described(holder: Any, held: Any) -> str:
    if isinstance(holder, dict):
        key = _key_of(holder, held)
        return f"a dict (key {key!r:.40})" if isinstance(key, (str, int)) else "a dict"
    if isinstance(holder, types.CellType):
        return "a closure"
    return f"a {type(holder).__name__}"


def _line_of(source: Any, name: str) -> tuple[str, int] | None:
    """Return file and line of the first statement in a module, class or function that stores into a name."""
    try:
        file = inspect.getsourcefile(source)
        lines, start = inspect.getsourcelines(source)
    except (OSError, TypeError):
        return None
    pattern, plain = re.compile(rf"\b{name}{_STORES}"), re.compile(rf"\b{name}\s*=\s*{_EMPTY}")
    for at, line in enumerate(lines):
        if file is not None and pattern.search(line) and not plain.search(line):
            return file, max(start, 1) + at
    return None


def _contains(code: types.CodeType, line: tuple[str, int]) -> bool:
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return code.co_filename == line[0] and bool(numbers) and min(numbers) <= line[1] <= max(numbers)
