"""Modes of the caller around a call: transforms, tracing, default devices, profilers, anomaly mode.

Everything here was seen in torch 2.11 and 2.13, unless a comment says otherwise.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memplan._torch.patches import without_function_modes


def transform_of_caller() -> str | None:
    """Return the name of the context around this call that changes the ops which torch runs: a transform of torch.func,
    torch.compile, or the default device "meta". None if there is no such context."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  # no stub
    if functorch.peek_interpreter_stack() is not None:
        return "torch.vmap, torch.func.grad or another transform of torch.func"
    if torch.compiler.is_compiling() or _is_compiled():
        return "a function that torch.compile compiles"
    if torch.get_default_device().type == "meta":
        return 'torch.device("meta")'
    return None


def _is_compiled() -> bool:
    """Return whether Dynamo intercepts the functions that this thread calls, to compile them."""
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    return frames is not None and callable(frames.get_eval_frame_callback())


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Run without the thread's function and dispatch modes: tensors are real, and no mode sees the ops."""
    with without_function_modes(), _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


@contextlib.contextmanager
def without_anomaly_checks() -> Iterator[None]:
    """Disable anomaly mode's check of gradients for NaN, also where the step enables it: fake gradients have no values,
    and a check takes memory. `torch.is_anomaly_enabled` still returns the user's setting."""
    enabled, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    set_enabled, here = torch.set_anomaly_enabled, threading.get_ident()

    def set_unchecked(mode: bool, check_nan: bool = True) -> None:
        """Replace `torch.set_anomaly_enabled`: in this thread the check for NaN stays disabled."""
        set_enabled(mode, check_nan and threading.get_ident() != here)

    try:
        torch.set_anomaly_enabled = set_unchecked
        set_enabled(enabled, False)
        yield
    finally:
        torch.set_anomaly_enabled = set_enabled
        set_enabled(enabled, checks)


def is_profiled() -> bool:
    """Return whether a profiler of torch is active in any thread: a second profiler would break its record, and two
    that do not end in nested order crash the process."""
    return torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled  # pyright: ignore[reportPrivateImportUsage]


class _Turn:
    """A lock on torch's profiler, of which a process has one: one thread of memplan at a time may start it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = self._times = 0
        """Id of the thread whose turn it is, and the number of its nested turns."""

    def take(self) -> bool:
        """Acquire the lock, if no profiler is active and no other thread holds it. Returns whether it was acquired."""
        with self._lock:
            if is_profiled() or (self._times and self._thread != threading.get_ident()):
                return False
            self._thread = threading.get_ident()
            self._times += 1
            return True

    def give(self) -> None:
        """Release the lock, once for each successful `take`."""
        with self._lock:
            self._times -= 1


profiler_turn = _Turn()
