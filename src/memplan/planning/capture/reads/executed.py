"""Observe which Python code a capture executes: only what that code names can decide what was traced.

On Python 3.12 and newer by `sys.monitoring`, which can switch itself off for code that does not count; before, by
`sys.setprofile` in this thread, which pauses inside of torch's dispatch (see `Executed.following`).

Code of the user and of libraries counts. Of torch counts what layers and distributions execute, of the standard
library what code that counts calls; torch's machinery (modes, fake tensors, dispatch) and memplan's own do not.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import functools
import gc
import importlib.util
import io
import itertools
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from memplan import _torch
from memplan._interrupts import outside_of
from memplan.trace.recording.place import format_frame

_CLOSED = frozenset({
    "torch", "memplan", "numpy", "sympy", "mpmath", "networkx", "filelock", "typing_extensions", "jinja2", "fsspec",
    "optree", "triton", "functorch", "setuptools", "pkg_resources", "_distutils_hack",
})  # fmt: skip
"""Packages whose code does not count: torch, and what torch itself calls."""
_LAYERS = ("torch.nn.", "torch.distributions.")
_WRAPPERS = frozenset({"memplan.planning.capture.loss_module", "memplan.rewriting.backend"})
"""Modules of memplan that stand for the user's step."""
_CALLER = "memplan.planning.capture.flat_call"
"""Module of memplan that calls the model."""
_MACHINERY = frozenset({
    "_weakrefset", "abc", "ast", "contextlib", "dis", "enum", "functools", "gc", "importlib", "inspect", "linecache",
    "logging", "re", "reprlib", "sre_compile", "sre_parse", "tempfile", "threading", "tokenize", "traceback", "types",
    "typing", "unittest", "warnings", "weakref",
})  # fmt: skip
"""Modules of the standard library that keep records of their own, on which no result depends."""
_WHOLE = frozenset({
    "copy.copy", "copy.deepcopy", "copyreg.__reduce_ex__", "dataclasses._asdict_inner", "dataclasses._astuple_inner",
    "dataclasses.replace", "dataclasses._replace", "inspect.getmembers", "pprint.pformat",
})  # fmt: skip
"""Functions of the standard library that read all attributes of what they are called with."""
_ATTRIBUTE_HOOKS = frozenset({"__getattr__", "__getattribute__"})
GETTERS: tuple[Any, ...] = (getattr, hasattr, vars, dir)
"""Functions that read attributes whose names are not in the code."""
_OUTSIDE: frozenset[Any] = frozenset({
    time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
    time.process_time, time.localtime, time.gmtime, time.ctime, time.strftime, io.open, os.stat, os.access, os.getcwd,
    os.listdir, os.scandir, os.urandom, os.read, builtins.input, builtins.globals, sys._getframe,
})  # fmt: skip
"""Functions that read the clock, files or the terminal, or globals whose names are not known."""


_THREADS = frozenset({("threading", "Thread.start"), ("concurrent", "ThreadPoolExecutor.submit")})
"""Functions whose work runs in another thread, which is not observed, by package and qualified name."""
_FILES = frozenset(("numpy", name) for name in ("load", "loadtxt", "genfromtxt", "fromregex", "memmap.__new__",
                                                "open_memmap"))  # fmt: skip
"""Functions that read files by code that does not count."""
_IMPORT = "importlib", "import_module"
_CHECKPOINT = "torch", "checkpoint"
"""Function that runs code a second time, in the backward pass; while a step is captured it does not."""
_REPORTED = frozenset(name for _, name in (*_THREADS, *_FILES, _IMPORT, _CHECKPOINT))
"""Qualified names of functions of which each call is looked at, though their code does not count."""


class Executed:
    """Python code that this thread executed while `following` was open."""

    def __init__(self) -> None:
        self.codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        """Code that counts and its globals, by the code's id."""
        self.names: set[str] = set()
        """Attributes that `getattr` was called with."""
        self.whole = False
        """Whether code reads attributes whose names are not known, of objects that are not known: then all count."""
        self.whole_kinds: set[type] = set()
        """Classes of objects of which all attributes count."""
        self.modules: set[str] = set()
        """Modules that `importlib.import_module` was called for."""
        self.outside: tuple[str, str | None] | None = None
        """What code that counts did first that cannot be compared in later calls, such as "calls time.time", and the
        line."""
        self.reads_late = False
        """Whether code that ran in the backward pass read more than tensors and immutable values of its arguments."""
        self.paused = False
        """Whether what runs is memplan's own work."""
        callbacks = [getattr(one, "__code__", None) for one in gc.callbacks]  # run whenever Python collects garbage
        self._ignored: dict[int, CodeType] = {id(code): code for code in callbacks if code is not None}
        self._undecided: dict[int, tuple[CodeType, bool | None]] = {}
        """Code that has not counted so far, and whether it does whoever calls it (`_counts`)."""
        self._open_ended: set[int] = set()
        """Code that reads ``__dict__``."""
        self._thread = threading.get_ident()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Observe what this thread executes, but for handlers of signals."""
        with outside_of(self.pause), _monitored(self) if sys.version_info >= (3, 12) else _profiled(self):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what runs in here."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def started(self, code: CodeType, frame: FrameType) -> bool:
        """Note a function that begins to run, if its code counts: a user's or a library's, or the standard library's
        when such code calls it.

        Returns:
            Whether its code never counts, so that no later call need be reported.
        """
        if self.paused:
            return False
        number = id(code)
        if code.co_qualname in _REPORTED:
            self._reported(code, frame)
        if number not in self.codes and not self._begins_to_count(code, frame):
            return number in self._ignored
        if number in self._open_ended:
            self._reads_all_of(_before_dict(code), frame)
        if not self.reads_late and _torch.backward_pass() >= 0:
            self.reads_late = _reads_state(code, frame)
        return False

    def _begins_to_count(self, code: CodeType, frame: FrameType) -> bool:
        """Return whether code counts from now on, that has not so far, and note it."""
        number, module = id(code), str(frame.f_globals.get("__name__") or "")
        if number in self._ignored:
            return False
        if number in self._undecided:
            counts = self._undecided[number][1]
        else:
            imported = code.co_name == "<module>" and code.co_filename != "<string>"  # that of eval and exec counts
            counts = False if imported else _counts(module)
            if counts is False:
                if code.co_qualname not in _REPORTED:
                    self._ignored[number] = code
                return False
            self._undecided[number] = code, counts
        if not (self._is_called(frame) if counts else self._is_called_directly(frame)):
            return False
        self.codes[number] = code, frame.f_globals
        self.whole |= f"{module}.{code.co_name}" in _WHOLE
        if counts and uses_of(code).computed_modules:
            self._does_outside("looks a module up by a computed name", frame)
        if counts and "__dict__" in code.co_names and code.co_name not in _ATTRIBUTE_HOOKS:
            self._open_ended.add(number)
        return True

    def _reported(self, code: CodeType, frame: FrameType) -> None:
        function = str(frame.f_globals.get("__name__")).partition(".")[0], code.co_qualname
        self.reads_late |= function == _CHECKPOINT
        if not self._is_called_directly(frame):
            return
        if function in _THREADS:
            self._does_outside("calls a thread's " + code.co_name, frame.f_back or frame)
        elif function in _FILES:
            self._does_outside("calls " + ".".join(function).removesuffix(".__new__"), frame.f_back or frame)
        elif function == _IMPORT:
            name, package = frame.f_locals["name"], frame.f_locals["package"]
            with suppress(ImportError):  # import_module raises it, too
                self.modules.add(importlib.util.resolve_name(str(name), package or ""))

    def _reads_all_of(self, owners: list[tuple[str, ...] | None], frame: FrameType) -> None:
        """Note that all attributes are read of what variables, or attributes of variables, are now."""
        for owner in owners:
            value = None if owner is None else _value_of(owner, frame)
            if value is None:
                self.whole = True
            elif isinstance(value, ModuleType):
                if code_counts(vars(value)):
                    self._does_outside(f"reads the module {value.__name__} by computed names", frame)
            else:
                self.whole_kinds.add(value if isinstance(value, type) else type(value))

    def _is_called_directly(self, frame: FrameType) -> bool:
        """Return whether code that counts is the caller, or what calls the model."""
        caller = frame.f_back
        return caller is not None and (id(caller.f_code) in self.codes or caller.f_globals.get("__name__") == _CALLER)

    def _is_called(self, frame: FrameType) -> bool:
        """Return whether code runs for the step, and not because something imports its module."""
        caller = frame.f_back
        while caller is not None and id(caller.f_code) not in self.codes:
            if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__") != "__main__":
                return False
            if caller.f_globals.get("__name__") == "importlib._bootstrap":
                return False
            caller = caller.f_back
        return True

    def called(self, function: Any, frame: FrameType, offset: int) -> None:
        """Note a call of a function written in C by code that counts."""
        if self.paused:
            return
        if any(function is one for one in GETTERS):
            owner, name = _arguments(frame, offset)
            if name is not None:
                self.names.add(name)
            elif frame.f_code.co_name not in _ATTRIBUTE_HOOKS:
                self._reads_all_of([owner], frame)
        elif self.outside is None and _is_outside(function):
            module = getattr(function, "__module__", None) or "datetime"
            self._does_outside(f"calls {module}.{function.__name__}", frame)

    def _does_outside(self, what: str, frame: FrameType) -> None:
        self.outside = self.outside or (what, format_frame((frame.f_code.co_filename, frame.f_lineno)))


def _reads_state(code: CodeType, frame: FrameType) -> bool:
    """Return whether a function that is called in the backward pass can read what changes between the passes: variables
    of other functions, globals, and objects among its arguments. Those on a context (``ctx``) count, too."""
    if not {"__class__"}.issuperset(code.co_freevars):
        return True
    own = frame.f_globals
    if not str(own.get("__name__")).startswith("torch.") and not all(
        _is_constant(own[name]) for name in uses_of(code).loaded if name in own
    ):
        return True
    return not all(map(_is_immutable, frame.f_locals.values()))


def _is_constant(value: Any) -> bool:
    """Return whether a global is a function, whose own code is looked at, or a module or class of torch's."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math")
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (ModuleType, type(None)))
    return isinstance(value, FunctionType) or (isinstance(value, type) and str(value.__module__).startswith("torch."))


def _is_immutable(value: Any) -> bool:
    if isinstance(value, torch.autograd.function.FunctionCtx):
        return all(map(_is_immutable, vars(value).values()))
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return isinstance(value, _IMMUTABLE) or _is_constant(value)


_IMMUTABLE = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
              torch.memory_format)  # fmt: skip


def _is_outside(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return function.__name__ in ("now", "today", "utcnow")
    if getattr(function, "__module__", None) == "numpy":
        return function.__name__ == "fromfile"
    try:
        return function in _OUTSIDE
    except TypeError:  # a method of something that has no hash
        return False


@contextmanager
def _monitored(to: Executed) -> Iterator[None]:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009  # of Python 3.12
    events, done, thread = monitoring.events, monitoring.DISABLE, threading.get_ident()
    tool = next((number for number in (4, 3, 5) if monitoring.get_tool(number) is None), None)
    if tool is None:
        with _profiled(to):
            yield
        return

    def started(code: CodeType, offset: int) -> Any:
        if threading.get_ident() == thread and to.started(code, sys._getframe(1)):
            return done
        return None

    def called(code: CodeType, offset: int, function: Any, argument: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        if id(code) not in to.codes:
            return done if id(code) in to._ignored else None
        if not isinstance(function, _NOT_C):
            to.called(function, sys._getframe(1), offset)
        return None

    monitoring.use_tool_id(tool, "memplan")
    monitoring.register_callback(tool, events.PY_START, started)
    monitoring.register_callback(tool, events.CALL, called)
    monitoring.set_events(tool, events.PY_START | events.CALL)
    monitoring.restart_events()
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, events.PY_START, None)
        monitoring.register_callback(tool, events.CALL, None)
        monitoring.free_tool_id(tool)


_NOT_C = (type(lambda: None), type)


@contextmanager
def _profiled(to: Executed) -> Iterator[None]:
    ignored, codes, started = to._ignored, to.codes, to.started

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in ignored:
                started(frame.f_code, frame)
        elif event == "c_call" and id(frame.f_code) in codes:
            to.called(argument, frame, frame.f_lasti)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with _torch.around_dispatch(lambda: sys.setprofile(None), lambda: sys.setprofile(profile)):
            yield
    finally:
        sys.setprofile(None)
        if callable(before):
            sys.setprofile(before)
        elif before is not None:  # cProfile's: Python hands out the profiler itself
            before.enable()


def code_counts(own: dict[str, Any]) -> bool:
    """Return whether functions with these globals are a user's or a library's, and not torch's or Python's own."""
    return bool(_counts(own.get("__name__", "")))


def in_standard_library(module: str) -> bool:
    """Return whether a module is one of the standard library."""
    return _in_library(module.partition(".")[0])


def _counts(module: str) -> bool | None:
    """Return whether code of a module counts; None: where its caller does."""
    root = module.partition(".")[0]
    if module in _WRAPPERS:
        return True
    if module.startswith("namedtuple_"):
        return False
    if module.startswith(_LAYERS):
        return None
    if root in _CLOSED or module in _MACHINERY or root in _MACHINERY:
        return False
    return None if _in_library(root) else True


@functools.cache
def _in_library(root: str) -> bool:
    """Return whether a package is one of the standard library, not a user's of the same name."""
    if root not in sys.stdlib_module_names or root == "__main__":
        return False
    origin = getattr(getattr(sys.modules.get(root), "__spec__", None), "origin", None)
    return origin is None or origin in ("built-in", "frozen") or origin.startswith(sysconfig.get_path("stdlib"))


# -- what code names


@dataclass(frozen=True)
class Uses:
    """Names in the code of one function."""

    loaded: tuple[str, ...]
    """Globals that it loads, but for what it only adds to, such as a list that is a log."""
    names: frozenset[str]
    """Attributes, and strings that can be names of some."""
    of_globals: frozenset[str]
    """Attributes that it takes directly of a global, and of what it takes there."""
    imports: tuple[str, ...]
    """Modules that it imports, and those that it names where it looks modules up."""
    unnamed: bool
    """Whether it reads attributes that it does not name, by other means than calling a function of `GETTERS`."""
    computed_modules: bool
    """Whether it looks modules up whose names are not constants."""


_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_FILLING = frozenset({"add", "append", "appendleft", "extend"})
"""Methods by which code adds to a container without reading it."""
_LOOKED_UP = frozenset({"modules", "__import__"})
_UNNAMED = frozenset({"__getattribute__", "__getattr__", "getattr_static", "getmembers"})
"""Functions that read attributes by computed names, and of which no call is observed."""
_GETTER_CLASSES = frozenset({"attrgetter", "methodcaller"})
_WORD = re.compile(r"[^\W\d]\w*")
_uses: dict[int, tuple[CodeType, Uses]] = {}


def uses_of(code: CodeType) -> Uses:
    """Return the names in the code of one function, without the functions in it."""
    known = _uses.get(id(code))
    if known is None or known[0] is not code:
        known = _uses[id(code)] = code, _read(code)
    return known[1]


def _read(code: CodeType) -> Uses:
    loaded, chained, imports = dict[str, None](), set[str](), dict[str, None]()
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("PUSH_NULL", "NOP")]
    follows = unnamed = False
    for one, after in zip(instructions, [*instructions[1:], None], strict=True):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if after is None or after.opname not in _ATTRIBUTE or after.argval not in _FILLING:
                loaded[one.argval] = None
            follows = True
        elif one.opname in _ATTRIBUTE:
            if follows:
                chained.add(one.argval)
        else:
            follows = False
        if one.opname == "IMPORT_NAME":
            imports[one.argval] = None
        if one.argval in _READERS and one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            unnamed |= one.opname == "LOAD_NAME" or not (one.arg or 0) & 1  # as an argument, as of map()
        if one.argval in _GETTER_CLASSES and one.opname.startswith("LOAD_"):
            unnamed |= after is None or after.opname != "LOAD_CONST"
    texts = list(_texts(code.co_consts))
    if not _LOOKED_UP.isdisjoint(code.co_names):
        imports.update(dict.fromkeys(texts))
    words = {part for text in texts for part in text.split(".") if part.isidentifier()}
    words.update(word for text in texts if "{" in text for word in _WORD.findall(text))  # "{.scale}".format(...)
    if any(one.opname == "MATCH_CLASS" for one in instructions):
        words.add("__match_args__")
    names = frozenset({*code.co_names, *words})
    unnamed |= code.co_name not in _ATTRIBUTE_HOOKS and not _UNNAMED.isdisjoint(names)
    return Uses(
        tuple(loaded), names, frozenset(chained), tuple(imports), unnamed, _looks_up_by_computed_name(instructions)
    )


def _looks_up_by_computed_name(instructions: list[dis.Instruction]) -> bool:
    """Return whether ``sys.modules`` or ``__import__`` is used with something else than a constant."""
    for at, one in enumerate(instructions[:-1]):
        if one.argval == "__import__" or (one.argval == "modules" and instructions[at - 1].argval == "sys"):
            after = instructions[at + 1]
            if after.argval == "get" and after.opname in _ATTRIBUTE:
                after = instructions[at + 2]
            if after.opname not in ("LOAD_CONST", "CONTAINS_OP"):
                return True
    return False


def _texts(constants: Any) -> Iterator[str]:
    for one in constants:
        if isinstance(one, str):
            yield one
        elif isinstance(one, (tuple, frozenset)):
            yield from _texts(one)


def _arguments(frame: FrameType, offset: int) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the object and the name that ``getattr(object, name)`` is about to be called with: the object as a
    variable and attributes of it, None where it is not simply loaded; so the name."""
    instructions = _instructions(frame.f_code)
    at = next((number for number, one in enumerate(instructions) if one.offset >= offset), 0)
    if instructions[at].opname not in ("PRECALL", "CALL"):
        return None, None
    at -= instructions[at - 1].opname == "PRECALL"  # of Python 3.11
    before = (n for n in range(at) if instructions[n].opname == "LOAD_GLOBAL" and instructions[n].argval in _READERS)
    arguments = _split(instructions[max(before, default=at) + 1 : at])
    if not arguments:
        return None, None
    owner, *rest = map(_chain, arguments)
    if len(arguments) == 1:
        return owner, None
    first = arguments[1][0]
    name = first.argval if len(arguments[1]) == 1 and first.opname == "LOAD_CONST" else None
    if rest[0] is not None:
        name = _value_of(rest[0], frame)
    return owner, name if isinstance(name, str) else None


def _split(loads: list[dis.Instruction]) -> list[list[dis.Instruction]]:
    """Split the instructions that put arguments on the stack by argument; nothing where they are not that alone."""
    ends, depth = dict[int, int](), 0
    for number, one in enumerate(loads):
        depth += dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth < 1 or one.opcode in dis.hasjrel:
            return []
        ends[depth] = number + 1
    bounds = [0, *(ends[number] for number in range(1, depth + 1) if number in ends)]
    return [loads[start:end] for start, end in itertools.pairwise(bounds)] if len(bounds) > depth else []


_READERS = frozenset(one.__name__ for one in GETTERS)
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL")


def _chain(loads: list[dis.Instruction]) -> tuple[str, ...] | None:
    """Return the variable that is loaded first, and the attributes that are taken of it; None where more is done."""
    first, *rest = loads
    if not first.opname.startswith(_VARIABLES) or any(one.opname != "LOAD_ATTR" for one in rest):
        return None
    return tuple(one.argval for one in loads)


def _before_dict(code: CodeType) -> list[tuple[str, ...] | None]:
    """Return the objects whose ``__dict__`` code reads, as `_chain` does."""
    instructions, found = _instructions(code), list[tuple[str, ...] | None]()
    for at, one in enumerate(instructions):
        if one.opname == "LOAD_ATTR" and one.argval == "__dict__":
            start = at
            while start and instructions[start].opname == "LOAD_ATTR":
                start -= 1
            found.append(_chain(instructions[start:at]))
    return found or [None]


def _value_of(names: tuple[str, ...], frame: FrameType) -> Any:
    """Return the present value of a variable's attributes, without running code; None where it is not known."""
    value = frame.f_locals.get(names[0], frame.f_globals.get(names[0]))
    for name in names[1:]:
        own = getattr(value, "__dict__", None)
        if not isinstance(own, dict):
            return None
        value = own.get(name, (own.get("_modules") or {}).get(name))
    return value


_disassembled: dict[int, tuple[CodeType, list[dis.Instruction]]] = {}


def _instructions(code: CodeType) -> list[dis.Instruction]:
    known = _disassembled.get(id(code))
    if known is None or known[0] is not code:
        found = list[dis.Instruction]()
        for one in dis.get_instructions(code):
            if one.opname == "LOAD_FAST_LOAD_FAST":  # two variables by one instruction
                found += [one._replace(opname="LOAD_FAST", opcode=_LOAD, argval=name) for name in one.argval]
            else:
                found.append(one)
        known = _disassembled[id(code)] = code, found
    return known[1]


_LOAD = dis.opmap["LOAD_FAST"]
