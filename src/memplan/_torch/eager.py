"""Dispatch modes over ops that really run, and what torch's profiler saw of them.

Everything here was seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[Any], Any]
Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any], Run], Any]

MARK = "memplan#"


def is_composite(func: Any) -> bool:
    """Return whether an op is made of others. In inference mode it reaches a dispatch mode whole, else in its parts."""
    return isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


class EagerMode(TorchDispatchMode):
    """A callback around every aten op that really runs."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()
        self._observe = dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self._observe(func, args, kwargs, lambda op: op(*args, **kwargs))


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no dispatch mode sees what runs."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()  # pyright: ignore[reportReturnType]  # an untyped generator context


def marker(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a named range in the profiler's record of this thread."""
    return _RecordFunctionFast(MARK + name)


def memory_profile() -> Any:
    """Return torch's profiler, as a context: `Profile` reads what it saw.

    Of the two that torch has, `torch.profiler.profile` warns in 2.11 that events end with a cycle, and where it is told
    to keep them, it makes an object of each at once, which takes seconds for a large step.
    """
    _quieted()
    return torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)


@functools.cache
def _quieted() -> None:
    """Once in a process: torch 2.13's profiler writes two lines to stderr each time that it starts and stops, and reads
    how much it is to say from the environment when it starts for the first time. What the user says there stands.
    """
    if _LOG_LEVEL in os.environ or torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        with torch.autograd.profiler.profile(use_kineto=True):
            pass
    finally:
        os.environ.pop(_LOG_LEVEL, None)


_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


class Profile:
    """Record of what a `memory_profile` saw of the CPU allocator, and of the ranges that `marker` opened.

    ``events``: (address, bytes (negative: released), time in ns, innermost marker or ""), in order of time.
    ``ranges``: marker -> (start, end) in ns.
    """

    def __init__(self, profile: Any) -> None:
        self.events: list[tuple[int, int, int, str]] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        stack = [(event, "") for event in profile.kineto_results.experimental_event_tree()]
        while stack:
            event, mark = stack.pop()
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    self.events.append((fields.ptr, fields.alloc_size, event.start_time_ns, mark))
            elif event.tag == _EventType.TorchOp and event.name.startswith(MARK):
                mark = event.name[len(MARK) :]
                self.ranges[mark] = (event.start_time_ns, event.end_time_ns)
            stack.extend((child, mark) for child in event.children)
        self.events.sort(key=lambda event: event[2])
