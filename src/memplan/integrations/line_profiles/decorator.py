"""`memplan.profile`: memory line by line of a decorated function, predicted or measured."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any, overload

from memplan import _torch
from memplan._interrupts import deferred
from memplan.errors import InputError, MemplanError
from memplan.trace.recording.followed.line_watch import code_of, decorate, is_watched, start_watch

if TYPE_CHECKING:
    from memplan.explanation.line_profile import LineProfile

_SECONDS = 10.0
_Key = tuple[str, int, str]
"""Name of a function, its first line, and the name of its file."""
_OVERTIME = "it ran on after {:.0f} s, the rest was not measured (memplan.profile(seconds=...))"


@overload
def profile(function: Callable[..., Any], /) -> Any: ...


@overload
def profile(*, device: str | None = None, seconds: float = _SECONDS) -> Callable[[Callable[..., Any]], Any]: ...


def profile(function: Any = None, /, *, device: str | None = None, seconds: float = _SECONDS) -> Any:
    """Profile the memory of a function line by line: live, allocated and freed bytes, and the peak of each line.

    Within a recording (`memplan.explain`, `memplan run`, ``memplan measure``) the result contains the lines. Otherwise
    calls are measured by the allocator's events, and the table is printed when the program ends, or by
    ``function.print()``; ``function.lines`` has the same data.

    Args:
        function: the function, method, generator or coroutine to decorate.
        device: a card (``"h100"``) or ``"cpu"``. Outside of a recording, the first call is predicted for this device
            instead of measured, on fake tensors in place of its arguments and of the globals it uses.
        seconds: the longest time to measure, over all calls: CPU time of the calling thread, so that a busy machine
            measures as much.

    Returns:
        The function, with ``print()`` and ``lines``.

    Raises:
        InputError: ``function`` is not a Python function, or ``seconds`` is not above 0.

    Example:
        >>> @memplan.profile
        ... def train_step(model, batch):
        ...     loss = model(batch).mean()
        ...     loss.backward()
    """
    if function is None:
        return functools.partial(_decorated, device=device, seconds=seconds)
    return _decorated(function, device=device, seconds=seconds)


def _decorated(function: Any, *, device: str | None, seconds: float) -> Any:
    """Return a function, or a static or class method, as `Profiled`; arguments and errors are those of `profile`."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(function.__func__, device=device, seconds=seconds))
    code = code_of(function, "memplan.profile")
    if not seconds > 0:
        raise InputError(f"memplan.profile(seconds={seconds})", expected="a number above 0", do="Leave it out for 10")
    decorate(code)
    return Profiled(function, code, device, seconds)


class Profiled:
    """A function that is profiled line by line whenever it is called."""

    def __init__(self, function: Any, code: CodeType, device: str | None, seconds: float) -> None:
        """``code``: of the function, whose lines are profiled; ``device``, ``seconds``: as for `profile`."""
        functools.update_wrapper(self, function)
        self.__qualname__: str = function.__qualname__
        self._function = function
        self._code = code
        self._device = device
        self._seconds_left = seconds
        """CPU seconds that calls may still be measured for."""
        self._has_warned = False
        """Whether it has warned that another thread is measured."""

    @property
    def lines(self) -> LineProfile | None:
        """Memory of its lines in the calls outside of recordings so far; None: there was no such call."""
        code = self._code
        name, file = code.co_qualname.replace(".<locals>", ""), os.path.basename(code.co_filename)
        return _profiles.get((name, code.co_firstlineno, file))

    def print(self) -> None:
        """Print the table of its lines, or that there is none yet."""
        if self.lines is None:
            print(f"memplan: {self.__qualname__} has not run by itself yet")
        else:
            _print_profiles([self.lines])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and profile the call."""
        if inspect.iscoroutinefunction(self._function):
            return self._run_coroutine(args, kwargs)
        with self._measured(args, kwargs):
            result = self._function(*args, **kwargs)
        return self._run_generator(result) if inspect.isgenerator(result) else result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind the function to an instance, as functions do."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by name, as functions are

    async def _run_coroutine(self, args: Any, kwargs: Any) -> Any:
        with self._measured(args, kwargs):
            return await self._function(*args, **kwargs)

    def _run_generator(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a generator, measuring only the time between being resumed and the next yield."""
        resume = functools.partial(generator.send, None)
        while True:
            with self._measured((), {}):
                try:
                    item = resume()
                except StopIteration as end:
                    return end.value
            try:
                resume = functools.partial(generator.send, (yield item))
            except GeneratorExit:
                generator.close()
                raise
            except BaseException as error:
                resume = functools.partial(generator.throw, error)

    @contextmanager
    def _measured(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Measure or predict the call within this context, unless it is part of a recording or another measurement."""
        if self._seconds_left <= 0 or is_watched() or _torch.is_observed():
            self._warn_if_busy()
            start_watch()
            yield
        elif self._device is not None:  # only the first call is predicted
            self._seconds_left = 0
            _add_profiles(_predict(self._function, args, kwargs, self._device))
            yield
        elif not _torch.profiler_turn.take():  # torch's profiler, of which a process has one, is in use
            self._warn_if_busy()
            yield
        else:
            global _measured_thread
            _measured_thread = threading.get_ident()
            try:
                with deferred(span=True):
                    yield from self._run_session()
            finally:
                _measured_thread = 0
                _torch.profiler_turn.give()

    def _run_session(self) -> Iterator[None]:
        """Measure what runs until the generator is resumed, and take its seconds off those that are left."""
        from memplan.integrations.line_profiles.line_session import Session, with_note

        session = Session(self._seconds_left)
        session.begin()
        start_watch()
        try:
            yield
        finally:
            over = not session.is_on
            profiles = session.end().profiles()
            self._seconds_left -= session.took
            _add_profiles(with_note(profiles, _OVERTIME.format(session.took)) if over else profiles)

    def _warn_if_busy(self) -> None:
        """Warn once if this call is not measured because another thread is."""
        if self._seconds_left > 0 and not self._has_warned and _measured_thread not in (0, threading.get_ident()):
            self._has_warned = True
            print(
                f"memplan: calls of {self.__qualname__} are not measured while another thread is: one at a time",
                file=sys.stderr,
            )


_measured_thread = 0
"""Identifier of the thread that is measured; 0: none."""
_profiles: dict[_Key, LineProfile] = {}
_unprinted: dict[_Key, None] = {}


def _key(lines: LineProfile) -> _Key:
    """Return the function's name, its first line and the name of its file."""
    return lines.function, lines.rows[0].line, os.path.basename(lines.file)


def _add_profiles(profiles: Sequence[LineProfile]) -> None:
    """Merge new profiles into those of earlier calls; all are printed when the program ends."""
    from memplan.explanation.line_profile import merge_profiles

    if not _profiles:
        atexit.register(_print_all)
    for lines in profiles:
        key = _key(lines)
        _profiles[key] = merge_profiles([_profiles[key], lines])[0] if key in _profiles else lines
        _unprinted[key] = None


def forget() -> None:
    """Do not print the profiles so far when the program ends."""
    _unprinted.clear()


def _print_all() -> None:
    """Print the profiles that were not printed since they last changed: when the program ends."""
    if _unprinted:
        _print_profiles([_profiles[key] for key in _unprinted])


def _print_profiles(profiles: Sequence[LineProfile]) -> None:
    """Print the tables of functions, which are not printed again when the program ends."""
    from memplan.reports.line_tables import report
    from memplan.reports.terminal import show

    for lines in profiles:
        _unprinted.pop(_key(lines), None)
    show(report(profiles))


def _predict(function: Any, args: Any, kwargs: Any, device: str) -> Sequence[LineProfile]:
    """Predict a call on a device; if it cannot be recorded, print the reason and return ()."""
    from memplan.explanation.explain import explain_trace
    from memplan.integrations.line_profiles.namespace import FakeNamespace

    def run(arguments: Any) -> Any:
        """Call the function with fake copies of its arguments, as a step of the recording."""
        start_watch()
        fake_args, fake_kwargs = arguments
        return function(*fake_args, **fake_kwargs)

    inner = inspect.unwrap(function)
    namespace = FakeNamespace(inner.__globals__, [inner.__code__], inner.__closure__ or (), (args, kwargs))
    try:
        trace = namespace.record(run, device)
    except MemplanError as error:
        print(f"memplan: {inner.__qualname__} is not predicted for {device}: {error}", file=sys.stderr)
        return ()
    return explain_trace(trace).lines
