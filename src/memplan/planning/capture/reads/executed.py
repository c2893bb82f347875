"""Observe which Python code a capture executes: only values that this code names can affect the traced graph.

Python 3.12 and newer use `sys.monitoring`, which can be switched off per code object; Python 3.11 uses
`sys.setprofile` in this thread, paused inside of torch's dispatch.

Code of the user and of libraries counts, code of torch's layers and distributions and of the standard library if such
code calls it. torch's machinery (modes, fake tensors, dispatch) and memplan's own code do not count.
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
"""Packages whose code does not count: torch and its dependencies."""
_LAYERS = ("torch.nn.", "torch.distributions.")
_WRAPPERS = frozenset({"memplan.planning.capture.loss_module", "memplan.rewriting.backend"})
"""Modules of memplan that wrap the user's step."""
_CALLER = "memplan.planning.capture.flat_call"
"""Module of memplan that calls the model."""
_MACHINERY = frozenset({
    "_weakrefset", "abc", "ast", "contextlib", "dis", "enum", "functools", "gc", "importlib", "inspect", "linecache",
    "logging", "re", "reprlib", "sre_compile", "sre_parse", "tempfile", "threading", "tokenize", "traceback", "types",
    "typing", "unittest", "warnings", "weakref",
})  # fmt: skip
"""Modules of the standard library whose internal state affects no result."""
_WHOLE = frozenset({
    "copy.copy", "copy.deepcopy", "copyreg.__reduce_ex__", "dataclasses._asdict_inner", "dataclasses._astuple_inner",
    "dataclasses.replace", "dataclasses._replace", "inspect.getmembers", "pprint.pformat",
})  # fmt: skip
"""Functions of the standard library that read all attributes of their arguments."""
_ATTRIBUTE_HOOKS = frozenset({"__getattr__", "__getattribute__"})
GETTERS: tuple[Any, ...] = (getattr, hasattr, vars, dir)
"""Functions that read attributes by names that need not be in the code."""
_OUTSIDE: frozenset[Any] = frozenset({
    time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
    time.process_time, time.localtime, time.gmtime, time.ctime, time.strftime, io.open, os.stat, os.access, os.getcwd,
    os.listdir, os.scandir, os.urandom, os.read, builtins.input, builtins.globals, sys._getframe,
})  # fmt: skip
"""Functions that read the clock, files or the terminal, or globals by unknown names."""
_THREADS = frozenset({("threading", "Thread.start"), ("concurrent", "ThreadPoolExecutor.submit")})
"""Functions that start work in another thread, which is not observed: (package, qualified name)."""
_FILES = frozenset(("numpy", name) for name in ("load", "loadtxt", "genfromtxt", "fromregex", "memmap.__new__",
                                                "open_memmap"))  # fmt: skip
"""Functions of numpy that read files."""
_IMPORT = "importlib", "import_module"
_CHECKPOINT = "torch", "checkpoint"
"""Function that recomputes in the backward pass, but not while a step is captured."""
_REPORTED = frozenset(name for _, name in (*_THREADS, *_FILES, _IMPORT, _CHECKPOINT))
"""Qualified names of functions whose calls are examined although their code does not count."""


class Executed:
    """Python code that this thread executed within `following`."""

    def __init__(self) -> None:
        self.codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        """Code that counts and its globals, by id of the code."""
        self.names: set[str] = set()
        """Attributes that `getattr` was called with."""
        self.whole = False
        """Whether code reads unknown attributes of unknown objects, so that all attributes count."""
        self.whole_kinds: set[type] = set()
        """Classes of objects of which all attributes count."""
        self.modules: set[str] = set()
        """Modules that `importlib.import_module` was called for."""
        self.outside: tuple[str, str | None] | None = None
        """First effect that cannot be compared in later calls, such as "calls time.time", and its line."""
        self.reads_late = False
        """Whether code in the backward pass read more than tensors and immutable values of its arguments."""
        self.paused = False
        """Whether memplan's own code is running."""
        callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]  # run at any time
        self._ignored: dict[int, CodeType] = {id(code): code for code in callbacks if code is not None}
        self._undecided: dict[int, tuple[CodeType, bool | None]] = {}
        """Code that has not counted so far, and the result of `_counts` for it."""
        self._open_ended: set[int] = set()
        """Code that reads ``__dict__``."""
        self._thread = threading.get_ident()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Observe the code that this thread executes within this context, except signal handlers."""
        with outside_of(self.pause), _monitored(self) if sys.version_info >= (3, 12) else _profiled(self):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not observe code within this context."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def started(self, code: CodeType, frame: FrameType) -> bool:
        """Record that a function starts, if its code counts.

        Returns:
            Whether its code never counts, so that later calls need not be reported.
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
        """Return whether code starts to count with this call, and record it."""
        number, module = id(code), str(frame.f_globals.get("__name__") or "")
        if number in self._ignored:
            return False
        if number in self._undecided:
            counts = self._undecided[number][1]
        else:
            imported = code.co_name == "<module>" and code.co_filename != "<string>"  # eval() and exec() count
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
            self._record_outside("looks a module up by a computed name", frame)
        if counts and "__dict__" in code.co_names and code.co_name not in _ATTRIBUTE_HOOKS:
            self._open_ended.add(number)
        return True

    def _reported(self, code: CodeType, frame: FrameType) -> None:
        function = str(frame.f_globals.get("__name__")).partition(".")[0], code.co_qualname
        self.reads_late |= function == _CHECKPOINT
        if not self._is_called_directly(frame):
            return
        if function in _THREADS:
            self._record_outside("calls a thread's " + code.co_name, frame.f_back or frame)
        elif function in _FILES:
            self._record_outside("calls " + ".".join(function).removesuffix(".__new__"), frame.f_back or frame)
        elif function == _IMPORT:
            name, package = frame.f_locals["name"], frame.f_locals["package"]
            with suppress(ImportError):  # import_module raises it, too
                self.modules.add(importlib.util.resolve_name(str(name), package or ""))

    def _reads_all_of(self, owners: list[tuple[str, ...] | None], frame: FrameType) -> None:
        """Record that all attributes of some objects are read. ``owners``: as `_before_dict` returns them."""
        for owner in owners:
            value = None if owner is None else _value_of(owner, frame)
            if value is None:
                self.whole = True
            elif isinstance(value, ModuleType):
                if code_counts(vars(value)):
                    self._record_outside(f"reads the module {value.__name__} by computed names", frame)
            else:
                self.whole_kinds.add(value if isinstance(value, type) else type(value))

    def _is_called_directly(self, frame: FrameType) -> bool:
        """Return whether the caller is code that counts, or the capture itself."""
        caller = frame.f_back
        return caller is not None and (id(caller.f_code) in self.codes or caller.f_globals.get("__name__") == _CALLER)

    def _is_called(self, frame: FrameType) -> bool:
        """Return whether code runs for the step, and not because its module is imported."""
        caller = frame.f_back
        while caller is not None and id(caller.f_code) not in self.codes:
            if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__") != "__main__":
                return False
            if caller.f_globals.get("__name__") == "importlib._bootstrap":
                return False
            caller = caller.f_back
        return True

    def called(self, function: Any, frame: FrameType, offset: int) -> None:
        """Record a call of a C function by code that counts."""
        if self.paused:
            return
        if any(function is getter for getter in GETTERS):
            owner, name = _arguments(frame, offset)
            if name is not None:
                self.names.add(name)
            elif frame.f_code.co_name not in _ATTRIBUTE_HOOKS:
                self._reads_all_of([owner], frame)
        elif self.outside is None and _is_outside(function):
            module = getattr(function, "__module__", None) or "datetime"
            self._record_outside(f"calls {module}.{function.__name__}", frame)

    def _record_outside(self, effect: str, frame: FrameType) -> None:
        self.outside = self.outside or (effect, format_frame((frame.f_code.co_filename, frame.f_lineno)))


def _reads_state(code: CodeType, frame: FrameType) -> bool:
    """Return whether a function called in the backward pass can read state that may change between the passes: closure
    variables, globals, and mutable objects among its arguments or on its context (``ctx``)."""
    if not {"__class__"}.issuperset(code.co_freevars):
        return True
    own = frame.f_globals
    if not str(own.get("__name__")).startswith("torch.") and not all(
        _is_constant(own[name]) for name in uses_of(code).loaded if name in own
    ):
        return True
    return not all(map(_is_immutable, frame.f_locals.values()))


def _is_constant(value: Any) -> bool:
    """Return whether a global is a function (its own code is examined), or a module or class of torch's."""
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
    except TypeError:  # a bound method of an unhashable object
        return False


@contextmanager
def _monitored(executed: Executed) -> Iterator[None]:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009  # of Python 3.12
    events, done, thread = monitoring.events, monitoring.DISABLE, threading.get_ident()
    tool = next((number for number in (4, 3, 5) if monitoring.get_tool(number) is None), None)
    if tool is None:
        with _profiled(executed):
            yield
        return

    def started(code: CodeType, offset: int) -> Any:
        if threading.get_ident() == thread and executed.started(code, sys._getframe(1)):
            return done
        return None

    def called(code: CodeType, offset: int, function: Any, argument: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        if id(code) not in executed.codes:
            return done if id(code) in executed._ignored else None
        if not isinstance(function, _NOT_C):
            executed.called(function, sys._getframe(1), offset)
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
def _profiled(executed: Executed) -> Iterator[None]:
    ignored, codes, started = executed._ignored, executed.codes, executed.started

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in ignored:
                started(frame.f_code, frame)
        elif event == "c_call" and id(frame.f_code) in codes:
            executed.called(argument, frame, frame.f_lasti)

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
    """Return whether functions with these globals are a user's or a library's, not torch's or Python's."""
    return bool(_counts(own.get("__name__", "")))


def in_standard_library(module: str) -> bool:
    """Return whether a module is in the standard library."""
    return _in_library(module.partition(".")[0])


def _counts(module: str) -> bool | None:
    """Return whether code of a module counts; None: it does if its caller does."""
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
    """Return whether a package is in the standard library, not a user's of the same name."""
    if root not in sys.stdlib_module_names or root == "__main__":
        return False
    origin = getattr(getattr(sys.modules.get(root), "__spec__", None), "origin", None)
    return origin is None or origin in ("built-in", "frozen") or origin.startswith(sysconfig.get_path("stdlib"))


# -- what code names


@dataclass(frozen=True)
class Uses:
    """Names in the code of one function."""

    loaded: tuple[str, ...]
    """Globals that it loads, without containers that it only adds to, such as a log."""
    names: frozenset[str]
    """Attributes, and strings that may be names of attributes."""
    of_globals: frozenset[str]
    """Attributes that it reads of globals, and of these attributes."""
    imports: tuple[str, ...]
    """Modules that it imports, and strings if it looks up modules by name."""
    unnamed: bool
    """Whether it reads attributes that it does not name, other than by calling a function of `GETTERS`."""
    computed_modules: bool
    """Whether it looks up modules by names that are not constants."""


_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_FILLING = frozenset({"add", "append", "appendleft", "extend"})
"""Methods by which code adds to a container without reading it."""
_LOOKED_UP = frozenset({"modules", "__import__"})
_UNNAMED = frozenset({"__getattribute__", "__getattr__", "getattr_static", "getmembers"})
"""Functions that read attributes by computed names and whose calls are not observed."""
_GETTER_CLASSES = frozenset({"attrgetter", "methodcaller"})
_WORD = re.compile(r"[^\W\d]\w*")
_uses: dict[int, tuple[CodeType, Uses]] = {}


def uses_of(code: CodeType) -> Uses:
    """Return the names in the code of a function, without nested functions."""
    known = _uses.get(id(code))
    if known is None or known[0] is not code:
        known = _uses[id(code)] = code, _read(code)
    return known[1]


def _read(code: CodeType) -> Uses:
    loaded, chained, imports = dict[str, None](), set[str](), dict[str, None]()
    instructions = [op for op in dis.get_instructions(code) if op.opname not in ("PUSH_NULL", "NOP")]
    follows = unnamed = False
    for op, following in zip(instructions, [*instructions[1:], None], strict=True):
        if op.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if following is None or following.opname not in _ATTRIBUTE or following.argval not in _FILLING:
                loaded[op.argval] = None
            follows = True
        elif op.opname in _ATTRIBUTE:
            if follows:
                chained.add(op.argval)
        else:
            follows = False
        if op.opname == "IMPORT_NAME":
            imports[op.argval] = None
        if op.argval in _READERS and op.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            unnamed |= op.opname == "LOAD_NAME" or not (op.arg or 0) & 1  # as an argument, as of map()
        if op.argval in _GETTER_CLASSES and op.opname.startswith("LOAD_"):
            unnamed |= following is None or following.opname != "LOAD_CONST"
    texts = list(_texts(code.co_consts))
    if not _LOOKED_UP.isdisjoint(code.co_names):
        imports.update(dict.fromkeys(texts))
    words = {part for text in texts for part in text.split(".") if part.isidentifier()}
    words.update(word for text in texts if "{" in text for word in _WORD.findall(text))  # "{.scale}".format(...)
    if any(op.opname == "MATCH_CLASS" for op in instructions):
        words.add("__match_args__")
    names = frozenset({*code.co_names, *words})
    unnamed |= code.co_name not in _ATTRIBUTE_HOOKS and not _UNNAMED.isdisjoint(names)
    return Uses(
        tuple(loaded), names, frozenset(chained), tuple(imports), unnamed, _looks_up_by_computed_name(instructions)
    )


def _looks_up_by_computed_name(instructions: list[dis.Instruction]) -> bool:
    """Return whether ``sys.modules`` or ``__import__`` is used with anything but a constant."""
    for at, op in enumerate(instructions[:-1]):
        if op.argval == "__import__" or (op.argval == "modules" and instructions[at - 1].argval == "sys"):
            following = instructions[at + 1]
            if following.argval == "get" and following.opname in _ATTRIBUTE:
                following = instructions[at + 2]
            if following.opname not in ("LOAD_CONST", "CONTAINS_OP"):
                return True
    return False


def _texts(constants: Any) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _arguments(frame: FrameType, offset: int) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the object and the name that ``getattr(object, name)`` is about to be called with. The object is given as
    (variable, attribute, ...). Either is None if it is computed."""
    instructions = _instructions(frame.f_code)
    at = next((number for number, op in enumerate(instructions) if op.offset >= offset), 0)
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
    """Group the instructions that push arguments by argument; empty if there are jumps among them."""
    ends, depth = dict[int, int](), 0
    for number, op in enumerate(loads):
        depth += dis.stack_effect(op.opcode, op.arg if op.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth < 1 or op.opcode in dis.hasjrel:
            return []
        ends[depth] = number + 1
    bounds = [0, *(ends[number] for number in range(1, depth + 1) if number in ends)]
    return [loads[start:end] for start, end in itertools.pairwise(bounds)] if len(bounds) > depth else []


_READERS = frozenset(getter.__name__ for getter in GETTERS)
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL")


def _chain(loads: list[dis.Instruction]) -> tuple[str, ...] | None:
    """Return (variable, attribute, ...) for instructions that load an attribute of a variable, else None."""
    first, *attributes = loads
    if not first.opname.startswith(_VARIABLES) or any(op.opname != "LOAD_ATTR" for op in attributes):
        return None
    return tuple(op.argval for op in loads)


def _before_dict(code: CodeType) -> list[tuple[str, ...] | None]:
    """Return the objects whose ``__dict__`` code reads, as `_chain` does."""
    instructions, owners = _instructions(code), list[tuple[str, ...] | None]()
    for at, op in enumerate(instructions):
        if op.opname == "LOAD_ATTR" and op.argval == "__dict__":
            start = at
            while start and instructions[start].opname == "LOAD_ATTR":
                start -= 1
            owners.append(_chain(instructions[start:at]))
    return owners or [None]


def _value_of(names: tuple[str, ...], frame: FrameType) -> Any:
    """Return the value of (variable, attribute, ...) without running code, None if unknown."""
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
        instructions = list[dis.Instruction]()
        for op in dis.get_instructions(code):
            if op.opname == "LOAD_FAST_LOAD_FAST":  # loads two variables
                instructions += [op._replace(opname="LOAD_FAST", opcode=_LOAD, argval=name) for name in op.argval]
            else:
                instructions.append(op)
        known = _disassembled[id(code)] = code, instructions
    return known[1]


_LOAD = dis.opmap["LOAD_FAST"]
