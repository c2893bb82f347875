"""Dispatch modes over ops that really run, and the memory events and calls that torch's profiler records.

Everything here was seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._profiler import RecordScope, _EventType, _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from memplan._interrupts import safe_point
from memplan._torch.contexts import is_profiled, profiler_turn
from memplan._torch.patches import patched
from memplan.errors import UsageError

Run = Callable[[Any], Any]
Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any], Run], Any]

MARK = "memplan#"
END_MARK = "end"
"""Marker that ends a profile: later events do not count."""
_MODE = "PythonDispatchMode"
"""Name of the profiler's range around the code of a dispatch mode, in torch 2.13."""


def is_composite(func: Any) -> bool:
    """Return whether an op is composite: implemented by other ops. In inference mode a composite op reaches a dispatch
    mode whole, else decomposed."""
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
        safe_point()
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self._observe(func, args, kwargs, lambda op: op(*args, **kwargs))


class GuestMode(EagerMode):
    """An `EagerMode` that leaves the step as it is: higher-order ops bypass the callback, compiled code stays
    compiled."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True  # Dynamo does not compile the mode's own code either

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def is_innermost(self) -> bool:
        """Return whether no mode was entered after this one, so that it can be exited."""
        return _get_current_dispatch_mode() is self


def recording_autograd() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ops that the callback of a dispatch mode calls are recorded by autograd: such a
    callback runs below autograd."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no dispatch mode is active."""
    return _disable_current_modes()  # pyright: ignore[reportReturnType]  # an untyped generator context


def marker(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a named range in the profiler's record of this thread."""
    return _RecordFunctionFast(MARK + name)


def is_dispatched() -> bool:
    """Return whether a dispatch mode is active in this thread."""
    return _get_current_dispatch_mode() is not None


def is_observed() -> bool:
    """Return whether a profiler or a dispatch mode is active in this thread, or Dynamo is tracing."""
    return is_profiled() or is_dispatched() or torch.compiler.is_compiling()


def memory_profile() -> Any:
    """Return torch's profiler as a context manager; `Profile.of` reads its record. Entering it raises UsageError while
    another profiler is active.

    This is `torch.autograd.profiler.profile`: `torch.profiler.profile` warns in 2.11 that events end with a cycle, and
    with ``acc_events=True`` builds an object of each event at once, which takes seconds for a large step.
    """
    return _ExclusiveProfile(use_kineto=True, profile_memory=True)


class _ExclusiveProfile(torch.autograd.profiler.profile):
    """A profile that owns `profiler_turn` while it is active, so that no other thread of memplan starts a second."""

    def __enter__(self) -> Any:
        """Start the profiler, or raise UsageError if one is active."""
        if not profiler_turn.take():
            raise UsageError(
                "torch has one profiler at a time, and one is at work",
                expected="no torch.profiler, memplan.profile or memplan.watch that profiles meanwhile",
                do="End that first",
            )
        try:
            _silence_first_start()
            return super().__enter__()
        except BaseException:
            profiler_turn.give()
            raise

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            profiler_turn.give()


class _Capturable(EagerMode):
    """Enables cuDNN for single ops while it is disabled for composite ops (see `capturable_kernels`). ``enabled``: the
    user's setting of cuDNN."""

    supports_higher_order_operators = True

    def __init__(self, enabled: bool) -> None:
        super().__init__(self._with_cudnn)
        self._enabled = enabled

    def _with_cudnn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """Run a single op with the user's setting of cuDNN; composite ops were decomposed without cuDNN."""
        cudnn = torch.backends.cudnn
        cudnn.enabled = self._enabled
        try:
            return run(func)
        finally:
            cudnn.enabled = False


@contextlib.contextmanager
def capturable_kernels() -> Iterator[None]:
    """Run norms and recurrent layers by torch's own kernels instead of cuDNN's, in both passes, as in a step captured
    for a card. Convolutions and all other ops keep their kernels."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        with _Capturable(before):
            yield
    finally:
        cudnn.enabled = before


class YieldingProfile:
    """A `memory_profile` that stops as soon as the user's code starts a profiler: torch allows one at a time."""

    def __init__(self) -> None:
        self._profile: Any = None
        """The running `memory_profile`; None if there is none."""
        self._stack = contextlib.ExitStack()
        """Holds the patch that notices another profiler's start."""
        self.whole = False
        """Whether it ran without interruption from `start` to `stop`."""

    def start(self) -> None:
        """Start profiling, unless a profiler is active already."""
        if not profiler_turn.take():  # entering the profile takes it once more, and would raise
            return
        profile = memory_profile()
        try:
            profile.__enter__()
        finally:
            profiler_turn.give()
        self._profile, self.whole = profile, True
        kind: Any = torch.autograd.profiler.profile
        prepare = kind._prepare_trace

        def prepare_other(other: Any) -> None:
            """Stop this profile before another profiler starts."""
            self.stop()
            self.whole = False
            prepare(other)

        self._stack.enter_context(patched(kind, _prepare_trace=prepare_other))

    def stop(self) -> Profile | None:
        """Stop profiling. Returns the profile, or None if another profiler was active and the profile is incomplete."""
        self._stack.close()
        profile, self._profile = self._profile, None
        if profile is None:
            return None
        profile.__exit__(None, None, None)
        return Profile.of(profile) if self.whole else None


@functools.cache
def _silence_first_start() -> None:
    """Start and stop the profiler once with its log silenced, unless the user has set a log level.

    torch 2.13's profiler writes two lines to stderr at each start and stop, and reads its log level from the
    environment only when it starts for the first time in the process.
    """
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        with torch.autograd.profiler.profile(use_kineto=True):
            pass
    finally:
        os.environ.pop(_LOG_LEVEL, None)


_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


class MemoryEvent(NamedTuple):
    """An allocation or free in the profiler's record."""

    address: int
    bytes: int
    """Negative for a free."""
    time: int
    """In ns."""
    mark: str
    """Name of the innermost `marker` around the event, or ""."""
    call: int
    """Index in `Profile.calls` of the innermost call around the event, or -1."""


class Call(NamedTuple):
    """A call of an op, of the autograd engine or of a derivative formula in the profiler's record. Times in ns."""

    name: str
    start: int
    end: int
    parent: int
    """Index in `Profile.calls` of the call around this call, or -1."""
    mark: str
    """Name of the innermost `marker` around the call, or ""."""
    at_mark: bool
    """Whether the call lies directly within that marker, in no other call."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Memory events of one type of device, calls, and the ranges of `marker`, as a `memory_profile` recorded them."""

    events: list[MemoryEvent]
    """In order of time."""
    calls: list[Call]
    """In the order in which they began."""
    ranges: dict[str, tuple[int, int]]
    """Marker -> (start, end) in ns of the first range with that name."""

    @classmethod
    def of(cls, profile: Any, device: str = "cpu") -> Profile:
        """Read a stopped profiler's tree of events: memory events of a type of device before `END_MARK`, and all calls,
        each with the innermost marker and call around it."""
        events, calls, ranges = list[MemoryEvent](), list[Call](), dict[str, tuple[int, int]]()
        roots = sorted(profile.kineto_results.experimental_event_tree(), key=lambda event: event.start_time_ns)
        # (event, innermost marker around it, index of the innermost call around it, whether directly in the marker)
        stack = [(event, "", -1, False) for event in reversed(roots)]
        while stack:
            event, mark, call, at_mark = stack.pop()
            start, tag = event.start_time_ns, event.tag  # each attribute is computed when it is read
            if tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == device:
                    events.append(MemoryEvent(fields.ptr, fields.alloc_size, start, mark, call))
                continue
            if tag == _EventType.TorchOp:
                name = event.name
                if name.startswith(MARK):
                    mark, at_mark = name[len(MARK) :], True
                    ranges.setdefault(mark, (start, event.end_time_ns))
                elif name != _MODE and not _is_python_range(name, event):
                    calls.append(Call(name, start, event.end_time_ns, call, mark, at_mark))
                    call, at_mark = len(calls) - 1, False
            children = event.children
            if children:
                stack.extend([(child, mark, call, at_mark) for child in reversed(children)])
        end = ranges.get(END_MARK, (float("inf"), 0))[0]
        before_end = [event for event in events if event.time < end]
        return cls(sorted(before_end, key=lambda event: event.time), calls, ranges)


def _is_python_range(name: str, event: Any) -> bool:
    """Return whether an event of this name is a range that Python code opened, as optimizers do. Such ranges are no
    calls: under a dispatch mode they do not nest properly."""
    return name.startswith("profiler::") or event.extra_fields.scope == RecordScope.USER_SCOPE


class DrawsReplaced(TorchDispatchMode):
    """Replaces the masks of dropout and `bernoulli_` by ``keep(elements, probability of a 1)``, and casts to float32 by
    casts to ``floats``."""

    def __init__(self, keep: Callable[[int, float], torch.Tensor], floats: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._keep, self._floats = keep, floats

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.bernoulli_.float:
            target, probability = args[0], float(args[1]) if len(args) > 1 else 0.5
            return target.copy_(self._keep(target.numel(), probability).reshape(target.shape))
        if func is aten.native_dropout.default and args[2] is not False:
            x, probability = args[0], 1 - args[1]
            mask = self._keep(x.numel(), probability).reshape(x.shape)
            return x * mask * (1 / probability if probability else 0.0), mask
        if func is aten._to_copy.default and kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": self._floats}
        return func(*args, **(kwargs or {}))


class ResultsReplaced(TorchDispatchMode):
    """Overwrites results of ops, in order. Each pair is what an op computes, but for rounding, and what to write."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.left = list(pairs)
        """Pairs that no op has computed yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and overwrite its results that equal the next expected tensors."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not self.left or not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            expected, replacement = self.left[0]
            rounding = 1e-5 * float(expected.abs().max()) if expected.numel() else 0.0
            if tensor.shape == expected.shape and torch.allclose(tensor, expected, rtol=0, atol=rounding):
                tensor.detach().copy_(replacement)
                del self.left[0]
        return result
