"""Observe which Python code a capture executes: only values that this code names can affect the traced graph.

Python 3.12 and newer use `sys.monitoring`, which can be switched off per code object; Python 3.11 uses
`sys.setprofile` in this thread, paused inside of torch's dispatch.

Relevant is the code of the user and of libraries, and code of torch's layers and distributions and of the standard
library if relevant code calls it. torch's machinery (modes, fake tensors, dispatch) and memplan's own code are not.
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

_IRRELEVANT_PACKAGES = frozenset({
    "torch", "memplan", "numpy", "sympy", "mpmath", "networkx", "filelock", "typing_extensions", "jinja2", "fsspec",
    "optree", "triton", "functorch", "setuptools", "pkg_resources", "_distutils_hack",
})  # fmt: skip
"""Packages whose code does not count: torch and its dependencies."""
_TORCH_LAYERS = ("torch.nn.", "torch.distributions.")
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
_READ_ALL_ATTRIBUTES = frozenset({
    "copy.copy", "copy.deepcopy", "copyreg.__reduce_ex__", "dataclasses._asdict_inner", "dataclasses._astuple_inner",
    "dataclasses.replace", "dataclasses._replace", "inspect.getmembers", "pprint.pformat",
})  # fmt: skip
"""Functions of the standard library that read all attributes of their arguments."""
_ATTRIBUTE_HOOKS = frozenset({"__getattr__", "__getattribute__"})
GETTERS: tuple[Any, ...] = (getattr, hasattr, vars, dir)
"""Functions that read attributes by names that need not be in the code."""
_EXTERNAL_READERS: frozenset[Any] = frozenset({
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
_EXAMINED_CALLS = frozenset(name for _, name in (*_THREADS, *_FILES, _IMPORT, _CHECKPOINT))
"""Qualified names of functions whose calls are examined although their code does not count."""


class Executed:
    """Python code that this thread executed within `observing`."""

    def __init__(self) -> None:
        self.codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        """Relevant code and its globals, by id of the code."""
        self.names: set[str] = set()
        """Attributes that `getattr` was called with."""
        self.reads_all = False
        """Whether code reads unknown attributes of unknown objects, so that any attribute may matter."""
        self.fully_read_classes: set[type] = set()
        """Classes of objects of which all attributes are read."""
        self.modules: set[str] = set()
        """Modules that `importlib.import_module` was called for."""
        self.external_effect: tuple[str, str | None] | None = None
        """First effect that cannot be compared in later calls, such as "calls time.time", and its line."""
        self.backward_reads_state = False
        """Whether code in the backward pass read more than tensors and immutable values of its arguments."""
        self.paused = False
        """Whether memplan's own code is running."""
        callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]  # run at any time
        self._ignored: dict[int, CodeType] = {id(code): code for code in callbacks if code is not None}
        """Code that is never relevant, by its id."""
        self._not_yet_relevant: dict[int, tuple[CodeType, bool | None]] = {}
        """id() of code that nothing relevant has called so far -> (the code, the result of `_is_relevant` for it)."""
        self._code_reading_dict: set[int] = set()
        """Ids of code that reads ``__dict__``."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the code that this thread executes within this context, except signal handlers."""
        with (
            outside_of(self.pause),
            _observing_by_monitoring(self) if sys.version_info >= (3, 12) else _observing_by_profile(self),
        ):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not observe code within this context."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def on_call(self, code: CodeType, frame: FrameType) -> bool:
        """Record the call of a Python function, if its code is relevant.

        Returns:
            Whether its code is never relevant, so that later calls need not be reported.
        """
        if self.paused:
            return False
        if code.co_qualname in _EXAMINED_CALLS:
            self._examine_call(code, frame)
        if id(code) not in self.codes and not self._register_if_relevant(code, frame):
            return id(code) in self._ignored
        if id(code) in self._code_reading_dict:
            self._record_full_reads(_owners_of_dict_reads(code), frame)
        if not self.backward_reads_state and _torch.backward_pass() >= 0:
            self.backward_reads_state = _reads_state(code, frame)
        return False

    def _register_if_relevant(self, code: CodeType, frame: FrameType) -> bool:
        """Add code to the relevant code if this call of it makes it relevant. Return whether it does.

        Code of the user and of libraries is relevant unless it only runs because its module is imported. Code of
        torch's layers and the standard library is relevant if relevant code calls it.
        """
        module = str(frame.f_globals.get("__name__") or "")
        if id(code) in self._ignored:
            return False
        if id(code) in self._not_yet_relevant:
            _, is_relevant = self._not_yet_relevant[id(code)]
        else:
            is_module_body = code.co_name == "<module>" and code.co_filename != "<string>"  # not of eval() or exec()
            is_relevant = False if is_module_body else _is_relevant(module)
            if is_relevant is False:
                if code.co_qualname not in _EXAMINED_CALLS:
                    self._ignored[id(code)] = code
                return False
            self._not_yet_relevant[id(code)] = code, is_relevant
        # is_relevant is None for code that is relevant if its caller is.
        if not (self._is_called(frame) if is_relevant else self._is_called_directly(frame)):
            return False
        self.codes[id(code)] = code, frame.f_globals
        self.reads_all |= f"{module}.{code.co_name}" in _READ_ALL_ATTRIBUTES
        if is_relevant and uses_of(code).computed_modules:
            self._record_external_effect("looks a module up by a computed name", frame)
        if is_relevant and "__dict__" in code.co_names and code.co_name not in _ATTRIBUTE_HOOKS:
            self._code_reading_dict.add(id(code))
        return True

    def _examine_call(self, code: CodeType, frame: FrameType) -> None:
        """Record the effect of a call that starts a thread, reads a file, imports a module or is a checkpoint.

        Threads and files are external effects. A checkpoint reads state in the backward pass, where its recomputation
        is not observed.
        """
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        function = package, code.co_qualname
        self.backward_reads_state |= function == _CHECKPOINT
        if not self._is_called_directly(frame):
            return
        if function in _THREADS:
            self._record_external_effect("calls a thread's " + code.co_name, frame.f_back or frame)
        elif function in _FILES:
            self._record_external_effect("calls " + ".".join(function).removesuffix(".__new__"), frame.f_back or frame)
        elif function == _IMPORT:
            name, relative_to = frame.f_locals["name"], frame.f_locals["package"]
            with suppress(ImportError):  # import_module raises it, too
                self.modules.add(importlib.util.resolve_name(str(name), relative_to or ""))

    def _record_full_reads(self, owners: list[tuple[str, ...] | None], frame: FrameType) -> None:
        """Record that code reads all attributes of some objects. ``owners`` are (variable, attribute, ...) in the
        frame, None for a computed object."""
        for owner in owners:
            value = None if owner is None else _value_of(owner, frame)
            if value is None:
                self.reads_all = True
            elif isinstance(value, ModuleType):
                if is_user_code(vars(value)):
                    self._record_external_effect(f"reads the module {value.__name__} by computed names", frame)
            else:
                self.fully_read_classes.add(value if isinstance(value, type) else type(value))

    def _is_called_directly(self, frame: FrameType) -> bool:
        """Return whether the caller is relevant code, or the capture itself."""
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

    def on_builtin_call(self, function: Any, frame: FrameType, offset: int) -> None:
        """Record a call of a C function by relevant code: the attribute that ``getattr`` reads, or an external effect.
        ``frame`` is the caller's, and ``offset`` that of the call instruction in its bytecode."""
        if self.paused:
            return
        if any(function is getter for getter in GETTERS):
            owner, name = _getattr_arguments(frame, offset)
            if name is not None:
                self.names.add(name)
            elif frame.f_code.co_name not in _ATTRIBUTE_HOOKS:
                self._record_full_reads([owner], frame)
        elif self.external_effect is None and _reads_external_state(function):
            module = getattr(function, "__module__", None) or "datetime"
            self._record_external_effect(f"calls {module}.{function.__name__}", frame)

    def _record_external_effect(self, effect: str, frame: FrameType) -> None:
        """Record the first external effect, with the line that a frame is at."""
        if self.external_effect is None:
            self.external_effect = effect, format_frame((frame.f_code.co_filename, frame.f_lineno))


def _reads_state(code: CodeType, frame: FrameType) -> bool:
    """Return whether a function called in the backward pass can read state that may change between the passes. Such
    state is in closure variables, globals, and mutable objects among its arguments or on its context (``ctx``)."""
    reads_closure = any(name != "__class__" for name in code.co_freevars)  # super() reads __class__
    if reads_closure:
        return True
    global_variables = frame.f_globals
    is_code_of_torch = str(global_variables.get("__name__")).startswith("torch.")
    loaded_values = (global_variables[name] for name in uses_of(code).loaded_globals if name in global_variables)
    if not is_code_of_torch and not all(map(_is_constant, loaded_values)):
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
    """Return whether a value, or all that an autograd context holds, is a tensor, an immutable value or a constant."""
    if isinstance(value, torch.autograd.function.FunctionCtx):
        return all(map(_is_immutable, vars(value).values()))
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return isinstance(value, _IMMUTABLE) or _is_constant(value)


_IMMUTABLE = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
              torch.memory_format)  # fmt: skip


def _reads_external_state(function: Any) -> bool:
    """Return whether a C function reads what later calls cannot compare: the clock, files, the terminal."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return function.__name__ in ("now", "today", "utcnow")
    if getattr(function, "__module__", None) == "numpy":
        return function.__name__ == "fromfile"
    try:
        return function in _EXTERNAL_READERS
    except TypeError:  # a bound method of an unhashable object
        return False


@contextmanager
def _observing_by_monitoring(executed: Executed) -> Iterator[None]:
    """Report calls in this thread to ``executed`` by `sys.monitoring`, which stops reporting code that is irrelevant.

    Falls back to `sys.setprofile` if all tool ids are in use.
    """
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009  # of Python 3.12
    events, disable, thread = monitoring.events, monitoring.DISABLE, threading.get_ident()
    # Of Python's tool ids 0 to 5, 0 to 2 belong to debuggers, coverage and profilers, and 5 to optimizers.
    tool = next((tool_id for tool_id in (4, 3, 5) if monitoring.get_tool(tool_id) is None), None)
    if tool is None:
        with _observing_by_profile(executed):
            yield
        return

    def on_start(code: CodeType, offset: int) -> Any:
        """Callback at the start of a Python function."""
        if threading.get_ident() == thread and executed.on_call(code, sys._getframe(1)):
            return disable
        return None

    def on_c_call(code: CodeType, offset: int, function: Any, argument: Any) -> Any:
        """Callback before a call by ``code``, of which only calls of C functions count."""
        if threading.get_ident() != thread:
            return None
        if id(code) not in executed.codes:
            return disable if id(code) in executed._ignored else None
        if not isinstance(function, _NOT_C):
            executed.on_builtin_call(function, sys._getframe(1), offset)
        return None

    monitoring.use_tool_id(tool, "memplan")
    monitoring.register_callback(tool, events.PY_START, on_start)
    monitoring.register_callback(tool, events.CALL, on_c_call)
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
"""Classes of callables whose Python code `sys.monitoring` reports by itself: functions and classes."""


@contextmanager
def _observing_by_profile(executed: Executed) -> Iterator[None]:
    """Report calls in this thread to ``executed`` by `sys.setprofile`, except inside of torch's dispatch."""
    ignored, codes, on_call = executed._ignored, executed.codes, executed.on_call

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        """Callback of `sys.setprofile`. ``argument``: the C function of a ``c_call``."""
        if event == "call":
            if id(frame.f_code) not in ignored:
                on_call(frame.f_code, frame)
        elif event == "c_call" and id(frame.f_code) in codes:
            executed.on_builtin_call(argument, frame, frame.f_lasti)

    profiler_before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with _torch.around_dispatch(lambda: sys.setprofile(None), lambda: sys.setprofile(profile)):
            yield
    finally:
        sys.setprofile(None)
        if callable(profiler_before):
            sys.setprofile(profiler_before)
        elif profiler_before is not None:  # cProfile's: Python hands out the profiler itself
            profiler_before.enable()


def is_user_code(global_variables: dict[str, Any]) -> bool:
    """Return whether functions with these globals are a user's or a library's, not torch's or Python's."""
    return bool(_is_relevant(global_variables.get("__name__", "")))


def in_standard_library(module: str) -> bool:
    """Return whether a module is in the standard library."""
    return _is_standard_library_root(module.partition(".")[0])


def _is_relevant(module: str) -> bool | None:
    """Return whether code of the module of this name is relevant; None: it is if its caller is."""
    root = module.partition(".")[0]
    if module in _WRAPPERS:
        return True
    if module.startswith("namedtuple_"):
        return False
    if module.startswith(_TORCH_LAYERS):
        return None
    if root in _IRRELEVANT_PACKAGES or module in _MACHINERY or root in _MACHINERY:
        return False
    return None if _is_standard_library_root(root) else True


@functools.cache
def _is_standard_library_root(root: str) -> bool:
    """Return whether a package is in the standard library, not a user's of the same name."""
    if root not in sys.stdlib_module_names or root == "__main__":
        return False
    origin = getattr(getattr(sys.modules.get(root), "__spec__", None), "origin", None)
    return origin is None or origin in ("built-in", "frozen") or origin.startswith(sysconfig.get_path("stdlib"))


# -- what code names


@dataclass(frozen=True)
class Uses:
    """Names in the code of one function."""

    loaded_globals: tuple[str, ...]
    """Globals that it loads, without containers that it only adds to, such as a log."""
    names: frozenset[str]
    """Attributes, and strings that may be names of attributes."""
    attributes_of_globals: frozenset[str]
    """Attributes that it reads of globals, and of these attributes."""
    imports: tuple[str, ...]
    """Modules that it imports, and strings if it looks up modules by name."""
    reads_unnamed: bool
    """Whether it reads attributes that it does not name, other than by calling a function of `GETTERS`."""
    computed_modules: bool
    """Whether it looks up modules by names that are not constants."""


_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_ADDING_METHODS = frozenset({"add", "append", "appendleft", "extend"})
"""Methods by which code adds to a container without reading it."""
_MODULE_LOOKUPS = frozenset({"modules", "__import__"})
_READERS_OF_COMPUTED_NAMES = frozenset({"__getattribute__", "__getattr__", "getattr_static", "getmembers"})
"""Functions that read attributes by computed names and whose calls are not observed."""
_GETTER_CLASSES = frozenset({"attrgetter", "methodcaller"})
_WORD = re.compile(r"[^\W\d]\w*")
_uses: dict[int, tuple[CodeType, Uses]] = {}


def uses_of(code: CodeType) -> Uses:
    """Return the names in the code of a function, without nested functions. The result is cached."""
    cached = _uses.get(id(code))
    if cached is None or cached[0] is not code:
        cached = _uses[id(code)] = code, _analyze(code)
    return cached[1]


def _analyze(code: CodeType) -> Uses:
    """Return the names that a function's bytecode uses."""
    loaded, imports = dict[str, None](), dict[str, None]()  # sets in order
    attributes_of_globals = set[str]()
    instructions = [op for op in dis.get_instructions(code) if op.opname not in ("PUSH_NULL", "NOP")]
    follows_global = reads_unnamed = False
    for op, next_op in zip(instructions, [*instructions[1:], None], strict=True):
        loads_global = op.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        if loads_global:
            if next_op is None or next_op.opname not in _ATTRIBUTE_LOADS or next_op.argval not in _ADDING_METHODS:
                loaded[op.argval] = None
            follows_global = True
        elif op.opname in _ATTRIBUTE_LOADS:
            if follows_global:
                attributes_of_globals.add(op.argval)
        else:
            follows_global = False
        if op.opname == "IMPORT_NAME":
            imports[op.argval] = None
        if loads_global and op.argval in _READERS:
            is_called = op.opname == "LOAD_GLOBAL" and bool((op.arg or 0) & 1)  # the bit pushes a NULL, for a call
            reads_unnamed |= not is_called  # passed on, as in map(getattr, ...)
        if op.argval in _GETTER_CLASSES and op.opname.startswith("LOAD_"):
            reads_unnamed |= next_op is None or next_op.opname != "LOAD_CONST"
    strings = list(_string_constants(code.co_consts))
    if not _MODULE_LOOKUPS.isdisjoint(code.co_names):
        imports.update(dict.fromkeys(strings))
    words = {part for text in strings for part in text.split(".") if part.isidentifier()}
    words.update(word for text in strings if "{" in text for word in _WORD.findall(text))  # "{.scale}".format(...)
    if any(op.opname == "MATCH_CLASS" for op in instructions):
        words.add("__match_args__")
    names = frozenset({*code.co_names, *words})
    reads_unnamed |= code.co_name not in _ATTRIBUTE_HOOKS and not _READERS_OF_COMPUTED_NAMES.isdisjoint(names)
    computed_modules = _looks_up_by_computed_name(instructions)
    return Uses(tuple(loaded), names, frozenset(attributes_of_globals), tuple(imports), reads_unnamed, computed_modules)


def _looks_up_by_computed_name(instructions: list[dis.Instruction]) -> bool:
    """Return whether ``sys.modules`` or ``__import__`` is used with anything but a constant."""
    for index, op in enumerate(instructions[:-1]):
        if op.argval == "__import__" or (op.argval == "modules" and instructions[index - 1].argval == "sys"):
            next_op = instructions[index + 1]
            if next_op.argval == "get" and next_op.opname in _ATTRIBUTE_LOADS:  # sys.modules.get(name)
                next_op = instructions[index + 2]
            if next_op.opname not in ("LOAD_CONST", "CONTAINS_OP"):
                return True
    return False


def _string_constants(constants: Any) -> Iterator[str]:
    """Yield the strings among the constants of code, also those in tuples and frozensets."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _string_constants(constant)


def _getattr_arguments(frame: FrameType, offset: int) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the object and the name that ``getattr(object, name)`` is about to be called with. ``offset``: of the call
    instruction in the caller's bytecode.

    Returns:
        The object as (variable, attribute, ...), and the name. Each is None if it is computed.
    """
    instructions = _instructions(frame.f_code)
    call = next((index for index, op in enumerate(instructions) if op.offset >= offset), 0)
    if instructions[call].opname not in ("PRECALL", "CALL"):
        return None, None
    if instructions[call - 1].opname == "PRECALL":  # before CALL in Python 3.11
        call -= 1
    loads_of_getter = [
        index for index, op in enumerate(instructions[:call]) if op.opname == "LOAD_GLOBAL" and op.argval in _READERS
    ]
    arguments = _split_arguments(instructions[max(loads_of_getter, default=call) + 1 : call])
    if not arguments:
        return None, None
    owner = _attribute_path(arguments[0])
    if len(arguments) == 1:
        return owner, None
    first_load, path = arguments[1][0], _attribute_path(arguments[1])
    name = None
    if path is not None:
        name = _value_of(path, frame)
    elif len(arguments[1]) == 1 and first_load.opname == "LOAD_CONST":
        name = first_load.argval
    return owner, name if isinstance(name, str) else None


def _split_arguments(loads: list[dis.Instruction]) -> list[list[dis.Instruction]]:
    """Group the instructions that push arguments by argument; empty if there are jumps among them. Argument n ends at
    the last instruction after which the stack has n entries."""
    end_at_depth = dict[int, int]()
    depth = 0  # of the stack
    for index, op in enumerate(loads):
        depth += dis.stack_effect(op.opcode, op.arg if op.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth < 1 or op.opcode in dis.hasjrel:
            return []
        end_at_depth[depth] = index + 1
    bounds = [0, *(end_at_depth[n] for n in range(1, depth + 1) if n in end_at_depth)]
    return [loads[start:end] for start, end in itertools.pairwise(bounds)] if len(bounds) > depth else []


_READERS = frozenset(getter.__name__ for getter in GETTERS)
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL")


def _attribute_path(loads: list[dis.Instruction]) -> tuple[str, ...] | None:
    """Return (variable, attribute, ...) for instructions that load an attribute of a variable, else None."""
    first, *attributes = loads
    if not first.opname.startswith(_VARIABLES) or any(op.opname != "LOAD_ATTR" for op in attributes):
        return None
    return tuple(op.argval for op in loads)


def _owners_of_dict_reads(code: CodeType) -> list[tuple[str, ...] | None]:
    """Return the objects whose ``__dict__`` code reads, each as (variable, attribute, ...); None if it is computed."""
    instructions, owners = _instructions(code), list[tuple[str, ...] | None]()
    for index, op in enumerate(instructions):
        if op.opname == "LOAD_ATTR" and op.argval == "__dict__":
            start = index
            while start and instructions[start].opname == "LOAD_ATTR":
                start -= 1
            owners.append(_attribute_path(instructions[start:index]))
    return owners or [None]


def _value_of(names: tuple[str, ...], frame: FrameType) -> Any:
    """Return the value of (variable, attribute, ...) without running code, None if unknown."""
    variable, *attribute_names = names
    value = frame.f_locals.get(variable, frame.f_globals.get(variable))
    for name in attribute_names:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return None
        submodules = attributes.get("_modules") or {}
        value = attributes.get(name, submodules.get(name))
    return value


_disassembled: dict[int, tuple[CodeType, list[dis.Instruction]]] = {}


def _instructions(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of code, each loading one variable as in Python 3.11. The result is cached."""
    cached = _disassembled.get(id(code))
    if cached is None or cached[0] is not code:
        instructions = list[dis.Instruction]()
        for op in dis.get_instructions(code):
            if op.opname == "LOAD_FAST_LOAD_FAST":  # loads two variables
                load = dis.opmap["LOAD_FAST"]
                instructions += [op._replace(opname="LOAD_FAST", opcode=load, argval=name) for name in op.argval]
            else:
                instructions.append(op)
        cached = _disassembled[id(code)] = code, instructions
    return cached[1]
