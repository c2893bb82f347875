"""Tracks where a step is: its phase, the running module, and the line of the user's code."""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy
import torch
import torch.optim.optimizer as optimizer_hooks
from torch import nn
from torch.nn.modules import module as module_hooks

from memplan import _torch, errors
from memplan._frames import callers
from memplan.trace.records import Phase

Line = tuple[str, int]
"""File and number of a line of the user's code."""
_OURS = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NUMPY = os.path.dirname(os.path.abspath(numpy.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = tuple(_PYTHON + name + os.sep for name in ("site-packages", "dist-packages"))
_OUTERMOST = {
    "record_for": os.path.join(_OURS, "trace", "record.py"),
    "measure": os.path.join(_OURS, "trace", "measure.py"),
    "capture": os.path.join(_OURS, "planning", "capture", "capture.py"),
}
_KNOWN: dict[str, bool] = {}


def is_users(filename: str) -> bool:
    """Return whether a file belongs to the user or another package, not to torch, numpy, memplan or Python itself."""
    known = _KNOWN.get(filename)
    if known is None:
        path = os.path.abspath(filename)
        pythons = path.startswith(_PYTHON) and not path.startswith(_PACKAGES)
        # generated code (dataclasses, torch's own wrappers) has no source file; a cell of IPython has lines
        generated = filename.startswith("<") and not filename.startswith("<ipython-input")
        known = not (pythons or path.startswith((_OURS, _TORCH, _NUMPY)) or generated)
        _KNOWN[filename] = known
    return known


def user_frame() -> tuple[str, int] | None:
    """Return file and line of the innermost frame of the user's code (`is_users`), or None.

    Callers of `record_for`, `measure` and `capture` (a test, the command line) run no op of the step, and do not count.
    """
    for frame in callers():
        code = frame.f_code
        if is_users(code.co_filename):
            return code.co_filename, frame.f_lineno
        if code.co_name in _OUTERMOST and code.co_filename == _OUTERMOST[code.co_name]:
            return None
    return None


def instruction(frame: FrameType) -> int:
    """Return the offset of the instruction that a frame runs.

    When a specialized instruction calls a Python function inline (`x[i]` by a `__getitem__` in Python), `f_lasti` is
    the offset of the last inline cache after the instruction.
    """
    offset, code = frame.f_lasti, frame.f_code.co_code
    while dis.opname[code[offset]] == "CACHE":
        offset -= 2  # bytes of an instruction
    return offset


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's local variables without extending their lifetimes.

    Up to Python 3.12 a function's frame references the dict that ``f_locals`` returns, and so keeps tensors alive that
    the function deletes later.
    """
    values = frame.f_locals
    variables = dict(values)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()
    return variables


def format_frame(frame: tuple[str, int] | None) -> str | None:
    """Return ``file:line`` for (file, line), relative to the working directory or to a folder of ``sys.path``; None for
    None."""
    if frame is None:
        return None
    file, line = frame
    return f"{_short(file)}:{line}"


def _short(path: str) -> str:
    """Return a path relative to site-packages, the working directory or a folder of ``sys.path``; else the name."""
    roots = _roots(os.getcwd(), tuple(sys.path))
    return next((path[len(root) :] for root in roots if path.startswith(root)), os.path.basename(path))


@functools.lru_cache(maxsize=8)  # called for every op of a capture
def _roots(working_directory: str, search_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders to which paths are shown relative, each with a separator, in order of precedence."""
    folders = [os.path.abspath(folder) for folder in search_path]
    packages = [folder for folder in folders if folder.endswith(("site-packages", "dist-packages"))]
    # site-packages first: the virtual environment may be inside the working directory
    return tuple(folder + os.sep for folder in (*packages, working_directory, *folders))


class Place:
    """Tracks the running module, optimizer or backward pass by global hooks, which `following` installs."""

    def __init__(self) -> None:
        self.building = True
        """Whether ``build`` is still running."""
        self.step = -1
        """Number of the running step; -1 while building."""
        self.modules: dict[int, weakref.ref[nn.Module]] = {}
        """id() of each module that was registered or called -> the module."""
        self.made_at: dict[int, tuple[str, int] | None] = {}
        """id() of a module -> user line that was running when it registered its first parameter or buffer."""
        self.called: list[int] = []
        """id() of each module that was called from outside of all modules, in order."""
        self.optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        """id() of each optimizer that made a step -> the optimizer."""
        self.failed_in = 0
        """id() of the module in which an exception began, if one passed through; for messages only."""
        self._stack: list[int] = []
        """id() of the running modules, the innermost last."""
        self._thread = threading.get_ident()
        """Id of the step's thread; what runs in others is ignored."""
        self._optimizers_running = 0
        """How many optimizers are in their `step`, nested."""
        self._suspended = False
        """See `suspending`."""
        self.on_module = _nothing
        """Called when a module is called."""
        self.on_result: Callable[[int, Any], None] = lambda module, result: None
        """Called with id() and result of a module that was called from outside of all modules."""
        self.on_optimizer_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        """Called before an optimizer's `step`."""
        self.on_backward: Callable[[_torch.GraphFlag], Callable[[], None]] = lambda graph_flag: _nothing
        """Called when a backward pass begins, with the flag that keeps its graph; returns a callback for its end."""
        self.before_update = _nothing
        self.after_update = _nothing
        """Called before and after an optimizer's `step`."""

    @property
    def module(self) -> int:
        """id() of the innermost running module, 0 outside."""
        return self._stack[-1] if self._stack else 0

    def phase(self) -> Phase:
        """Return the running phase. Ops of a hand-written update count as forward here; the observer corrects that."""
        if self.building:
            return "build"
        if _torch.in_backward():
            return "backward"
        if self._optimizers_running and not self._stack:  # a closure given to step() calls the model
            return "optimizer"
        return "forward"

    def live_modules(self) -> Iterator[nn.Module]:
        """Yield the modules that are still alive, in the order in which they were first seen."""
        for reference in list(self.modules.values()):
            module = reference()
            if module is not None:
                yield module

    def live_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the optimizers that have run a step and are still alive."""
        for reference in list(self.optimizers.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def optimizer_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of the live optimizers."""
        for optimizer in self.live_optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]

    def add_modules(self, root: nn.Module) -> None:
        """Register a module and its submodules."""
        for module in root.modules():
            self._add_module(module)

    def _add_module(self, module: nn.Module) -> bool:
        """Register a module as the last. Return whether it is new, also if an earlier module had its id()."""
        known = self.modules.get(id(module))
        if known is not None and known() is module:
            return False
        self.modules.pop(id(module), None)  # else it would stand in the dict where the earlier module did
        self.modules[id(module)] = weakref.ref(module)
        return True

    @contextmanager
    def suspending(self) -> Iterator[None]:
        """Within this context, ignore copied modules and backward passes; the caller suspends torch's global hooks."""
        on_backward = self.on_backward
        # returns what is called at the end of a backward pass, as `on_backward` has to
        self._suspended, self.on_backward = True, lambda graph_flag: _nothing
        try:
            yield
        finally:
            self._suspended, self.on_backward = False, on_backward

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within this context, the global hooks are installed."""
        with ExitStack() as stack:
            for handle in (
                module_hooks.register_module_parameter_registration_hook(self._on_registration),
                module_hooks.register_module_buffer_registration_hook(self._on_registration),
                module_hooks.register_module_module_registration_hook(self._on_registration),
                module_hooks.register_module_forward_pre_hook(self._on_call),
                module_hooks.register_module_forward_hook(self._on_return, always_call=True),
                optimizer_hooks.register_optimizer_step_pre_hook(self._start_update),
                optimizer_hooks.register_optimizer_step_post_hook(self._end_update),
            ):
                stack.callback(handle.remove)
            # by a lambda, as `on_backward` is set later
            stack.enter_context(_torch.backward_watched(lambda graph_flag: self.on_backward(graph_flag)))
            stack.enter_context(
                _torch.patched(nn.Module, __setstate__=self._registering_copies(nn.Module.__setstate__))
            )
            yield

    def _on_registration(self, module: nn.Module, name: str, value: Any) -> None:
        """Register a module that gets a parameter, buffer or submodule, and the user's line that creates it."""
        if threading.get_ident() != self._thread:
            return
        if self._add_module(module):
            self.made_at.pop(id(module), None)  # of a module that is gone, whose id() this new module has
        if isinstance(value, nn.Module):
            self.add_modules(value)  # an averaged model registers a copy, whose own parts were never registered
        if id(module) not in self.made_at and self.building and isinstance(value, torch.Tensor):
            self.made_at[id(module)] = user_frame()

    def _registering_copies(self, restore: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any], None]:
        """Return a `Module.__setstate__`, which `copy.deepcopy` and unpickling call, that also registers the module."""

        def restore_and_note(module: nn.Module, state: Any) -> None:
            restore(module, state)
            if threading.get_ident() == self._thread and not self._suspended:
                self.add_modules(module)

        return restore_and_note

    def _on_call(self, module: nn.Module, args: Any) -> None:
        """Enter a module, as a forward pre-hook of all modules."""
        if threading.get_ident() != self._thread:
            return
        module = _torch.hooked_module(module)
        known = self.modules.get(id(module))
        if known is None or known() is not module:  # a new module can have the id() of one that is gone
            self.add_modules(module)
        if not self._stack:
            self.called.append(id(module))
        self._stack.append(id(module))
        self.on_module()

    def _on_return(self, module: nn.Module, args: Any, result: Any) -> None:
        """Leave a module, as a forward hook of all modules, which also runs after an exception (without a result)."""
        if threading.get_ident() != self._thread:
            return
        module = _torch.hooked_module(module)
        if result is None and sys.exc_info()[1] is not None and self.failed_in == 0:
            self.failed_in = self.module
        # inner modules that raised may not have run this hook: pop them, too
        if id(module) in self._stack:
            while self._stack.pop() != id(module):
                pass
            if not self._stack:
                self.on_result(id(module), result)

    def _start_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Enter an optimizer's `step`, as a pre-hook of all optimizers."""
        if threading.get_ident() != self._thread:
            return
        self.optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        self.on_optimizer_step(optimizer)
        self.before_update()
        self._optimizers_running += 1

    def _end_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Leave an optimizer's `step`, as a post-hook of all optimizers."""
        if threading.get_ident() != self._thread:
            return
        self._optimizers_running -= 1
        self.after_update()


def _nothing() -> None:
    return None


def frame_of_error(error: BaseException) -> tuple[str, int] | None:
    """Return file and line of the innermost frame of a traceback that is the user's (`is_users`)."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            line = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return line


def exception_of_user(error: errors.MemplanError) -> BaseException | None:
    """Return the cause of an error if the user's own code raised it, rather than torch or memplan; else None."""
    cause = error.__cause__
    if cause is None or isinstance(cause, errors.MemplanError):
        return None
    frames = list(traceback.walk_tb(cause.__traceback__))
    return cause if frames and is_users(frames[-1][0].f_code.co_filename) else None


def raised_by_statement(error: BaseException | None) -> bool:
    """Return whether an exception was raised by a ``raise`` or ``assert`` statement (a check) rather than by an op."""
    frames = list(traceback.walk_tb(error.__traceback__ if error else None))
    if not frames or any(frame.f_code.co_name == "__torch_dispatch__" for frame, _ in frames):
        return False
    frame, number = frames[-1]
    return re.search(r"\b(raise|assert)\b", linecache.getline(frame.f_code.co_filename, number)) is not None
