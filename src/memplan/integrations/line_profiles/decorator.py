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
from memplan.trace.recording.followed.line_watch import code_of, decorate, is_watched

if TYPE_CHECKING:
    from memplan.explanation.line_profile import LineProfile

_SECONDS = 10.0
_Key = tuple[str, int, str]
"""Name of a function, its first line, and its file's name."""
_OVER = "it ran on after {:.0f} s, the rest was not measured (memplan.profile(seconds=...))"


@overload
def profile(function: Callable[..., Any], /) -> Any: ...


@overload
def profile(*, device: str | None = None, seconds: float = _SECONDS) -> Callable[[Callable[..., Any]], Any]: ...


def profile(function: Any = None, /, *, device: str | None = None, seconds: float = _SECONDS) -> Any:
    """Follow a function line by line: what each line holds, adds, frees, and takes at its peak.

    Inside of a recording (`memplan.explain`, `memplan run`, ``memplan measure``) its lines are in the result. Where it
    runs by itself, it is measured by the allocator's own events, and the table is printed when the program ends, or by
    ``function.print()``; ``function.lines`` is the same as a value.

    Args:
        function: what is decorated: a function, a method, a generator or a coroutine.
        device: a card (``"h100"``) or ``"cpu"``: where it runs by itself, its first call is predicted for it, on
            stand-ins of its arguments and of the tensors and modules among the globals that it names.
        seconds: how long it is measured at most, all its calls together.

    Returns:
        A function that does the same, with ``print()`` and ``lines``.

    Raises:
        InputError: it is no function of Python's.

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
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(function.__func__, device=device, seconds=seconds))
    code = code_of(function, "memplan.profile")
    if not seconds > 0:
        raise InputError(f"memplan.profile(seconds={seconds})", expected="a number above 0", do="Leave it out for 10")
    decorate(code)
    return Profiled(function, code, device, seconds)


class Profiled:
    """A function that is followed line by line. Called, it does what the function does."""

    def __init__(self, function: Any, code: CodeType, device: str | None, seconds: float) -> None:
        functools.update_wrapper(self, function)
        self.__qualname__: str = function.__qualname__
        self._function = function
        self._code = code
        self._device = device
        self._left = seconds
        self._told = False

    @property
    def lines(self) -> LineProfile | None:
        """Memory of its lines as far as it ran by itself; None where it did not."""
        code = self._code
        name, file = code.co_qualname.replace(".<locals>", ""), os.path.basename(code.co_filename)
        return _found.get((name, code.co_firstlineno, file))

    def print(self) -> None:
        """Print the table of its lines."""
        if self.lines is None:
            print(f"memplan: {self.__qualname__} has not run by itself yet")
        else:
            _print([self.lines])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if inspect.iscoroutinefunction(self._function):
            return self._awaited(args, kwargs)
        with self._measured(args, kwargs):
            result = self._function(*args, **kwargs)
        return self._driven(result) if inspect.isgenerator(result) else result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the method of an object."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__  # as functions are pickled: by their name

    async def _awaited(self, args: Any, kwargs: Any) -> Any:
        with self._measured(args, kwargs):
            return await self._function(*args, **kwargs)

    def _driven(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a generator that is measured while it runs, and not while it waits."""
        resume = functools.partial(generator.send, None)
        while True:
            with self._measured((), {}):
                try:
                    made = resume()
                except StopIteration as end:
                    return end.value
            try:
                resume = functools.partial(generator.send, (yield made))
            except GeneratorExit:
                generator.close()
                raise
            except BaseException as error:
                resume = functools.partial(generator.throw, error)

    @contextmanager
    def _measured(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Measure what runs in here, unless somebody else does."""
        if self._left <= 0 or is_watched() or _torch.is_observed():
            self._step_aside()
            yield
        elif self._device is not None:
            self._left = 0
            _note(_predicted(self._function, args, kwargs, self._device))
            yield
        elif not _torch.profiler_turn.take():
            self._step_aside()
            yield
        else:
            global _measuring
            _measuring = threading.get_ident()
            try:
                with deferred(span=True):
                    yield from self._in_session()
            finally:
                _measuring = 0
                _torch.profiler_turn.give()

    def _in_session(self) -> Iterator[None]:
        from memplan.integrations.line_profiles.line_session import Session, with_note

        session = Session(self._left)
        session.begin()
        try:
            yield
        finally:
            over = not session.is_on
            found = session.end().profiles()
            self._left -= session.took
            _note(with_note(found, _OVER.format(session.took)) if over else found)

    def _step_aside(self) -> None:
        """Say once that another thread is measured, if that is why this call is not."""
        if self._left > 0 and not self._told and _measuring not in (0, threading.get_ident()):
            self._told = True
            print(
                f"memplan: calls of {self.__qualname__} are not measured while another thread is: one at a time",
                file=sys.stderr,
            )


_measuring = 0
"""The thread that is measured; 0: none."""
_found: dict[_Key, LineProfile] = {}
_unprinted: dict[_Key, None] = {}


def _key(one: LineProfile) -> _Key:
    return one.function, one.rows[0].line, os.path.basename(one.file)


def _note(profiles: Sequence[LineProfile]) -> None:
    """Add what was measured to what is known."""
    from memplan.explanation.line_profile import merged

    if not _found:
        atexit.register(_print_all)
    for one in profiles:
        key = _key(one)
        _found[key] = merged([_found[key], one])[0] if key in _found else one
        _unprinted[key] = None


def forget() -> None:
    """Print nothing at the end of what was measured so far."""
    _unprinted.clear()


def _print_all() -> None:
    if _unprinted:
        _print([_found[key] for key in _unprinted])


def _print(profiles: Sequence[LineProfile]) -> None:
    from memplan.reports.line_tables import print_lines

    for one in profiles:
        _unprinted.pop(_key(one), None)
    print_lines(profiles)


def _predicted(function: Any, args: Any, kwargs: Any, device: str) -> Sequence[LineProfile]:
    """Return what a call takes on a device; where that cannot be recorded, say so and let the program run on."""
    from memplan.explanation.explain import explain_trace
    from memplan.integrations.line_profiles.namespace import Surroundings

    plain = inspect.unwrap(function)
    around = Surroundings(plain.__globals__, [plain.__code__], plain.__closure__ or (), (args, kwargs))
    try:
        trace = around.predicted(lambda given: function(*given[0], **given[1]), device)
    except MemplanError as error:
        print(f"memplan: {plain.__qualname__} is not predicted for {device}: {error}", file=sys.stderr)
        return ()
    return explain_trace(trace).lines
