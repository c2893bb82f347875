"""A plugin of pytest: ``@pytest.mark.memplan(peak="2 GiB")`` on a test that returns a step or a model.

pytest loads it wherever memplan is installed (entry point ``pytest11``), so nothing of memplan or torch is imported
before a test with the mark runs. ``-p no:memplan`` leaves it out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

MARK = "memplan"
_LIMITS = ("peak", "reserved")
_OPTIONS = (
    "inputs", "kwargs", "targets", "loss", "optimizer", "device", "autocast", "train", "dtype", "settings", "assume",
    "cudnn",
)  # fmt: skip
_MODULE_OPTIONS = frozenset(("inputs", "kwargs", "targets", "loss", "optimizer", "autocast", "train", "dtype"))
_HELP = (
    "memplan(peak=None, reserved=None, inputs=(), device=None, ...): the step that the test returns (a module, a "
    "callable that makes one, a build, a step or a Trace) may take so many bytes; the other arguments are those of "
    "memplan.assert_peak. Nothing is allocated or trained."
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _HELP)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose mark cannot be checked: otherwise it would look like a limit that holds."""
    for mark in item.iter_markers(MARK):
        reason = _problem(item, mark)
        if reason is not None:
            pytest.fail(f"@pytest.mark.{MARK}: {reason}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Check the step that a test with the mark returns against the limits of each mark."""
    marks = list(pyfuncitem.iter_markers(MARK))
    if not marks:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    fixtures = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    for mark in marks:
        _check(pyfuncitem, lambda: pyfuncitem.obj(**fixtures), mark.kwargs)
    return True


def _problem(item: pytest.Item, mark: pytest.Mark) -> str | None:
    """Return why a mark ``@pytest.mark.memplan(...)`` cannot be checked on this test; None if it can."""
    known = (*_LIMITS, *_OPTIONS)
    unknown = sorted(set(mark.kwargs) - set(known))
    if mark.args:
        return f'found {mark.args[0]!r} without a name, expected keywords. Write peak="2 GiB"'
    if unknown:
        return f"it has no argument {unknown[0]!r}. Expected out of {', '.join(known)}"
    if not any(mark.kwargs.get(name) is not None for name in _LIMITS):
        return 'no limit was given. Write peak="2 GiB", or reserved="2 GiB" for what the allocator holds'
    function = getattr(item, "obj", None)
    if not isinstance(item, pytest.Function):
        return "found a test that is no function. Expected a function that returns a step or a model"
    if item.cls is not None and hasattr(item.cls, "assertEqual"):
        return "found a method of a unittest.TestCase, whose result is lost. Expected a function of a module or class"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "found a test that is a coroutine or a generator. Expected a function that returns a step or a model"
    return None


def _check(item: pytest.Function, test: Callable[[], Any], arguments: Mapping[str, Any]) -> None:
    """Check the step that a test returns, and fail the test with a short message if it exceeds a limit. ``arguments``
    are the mark's keyword arguments."""
    from memplan.errors import InputError, PeakError, StepError, UsageError

    message = ""
    cause: BaseException | None = None
    try:
        _assert_limits(item.name, test, arguments)
    except (PeakError, UsageError, StepError) as error:
        message = str(error)
        if isinstance(error, InputError) and "inputs" not in arguments:
            message += ' In the mark: inputs="8x3x224x224", or a list of them.'
        if isinstance(error, StepError):
            cause = error.__cause__
    # raised here, without memplan's own error as context
    if cause is not None:  # an error or assertion of the test itself
        raise cause
    if message:
        pytest.fail(message, pytrace=False)


def _assert_limits(title: str, test: Callable[[], Any], arguments: Mapping[str, Any]) -> None:
    """Record the test without allocating anything, and check its step's peak by the mark's ``arguments``.

    What the test returns is known only once it ran, within the recording. If that cannot go on with the result, it is
    left by `_ReturnedTrace` or `_ReturnsModule`, and the result is checked in its own way.
    """
    from memplan.studies.guarding.assert_peak import assert_peak

    limits = {"at_most": arguments.get("peak"), "reserved": arguments.get("reserved")}
    options = {name: value for name, value in arguments.items() if name in _OPTIONS and name != "inputs"}
    inputs = arguments.get("inputs", ())
    inputs = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    expects_module = any(name in _MODULE_OPTIONS for name in arguments)
    build = _named(lambda: _build(test, expects_module), title)
    try:
        assert_peak(build, *inputs, **limits, **options)
    except _ReturnedTrace as returned:
        settings = {name: value for name, value in arguments.items() if name == "settings"}
        assert_peak(returned.trace, **limits, **settings)
    except _ReturnsModule:

        def create() -> Any:
            """Run the test, and call what it returned, which creates the module or the step."""
            return test()()

        assert_peak(_named(create, title), *inputs, **limits, **options)


class _ReturnedTrace(BaseException):
    """Leaves the recording with the Trace that the test returned, which needs none. `_build` raises it."""

    def __init__(self, trace: Any) -> None:
        """``trace``: what the test returned."""
        super().__init__()
        self.trace = trace


class _ReturnsModule(BaseException):
    """Leaves the recording: the test returned a callable that is no step, but creates a module or a step. The step that
    `_build` returns raises it in its first call."""


def _build(test: Callable[[], Any], expects_module: bool) -> Any:
    """Run the test and return its result as a module or a step, which a ``build`` has to return. ``expects_module``:
    the mark has arguments that apply to a module only, so that a callable must create one. Raises _ReturnedTrace if it
    returned a Trace."""
    from torch import Tensor, nn

    from memplan import _torch
    from memplan.trace.step import copy_module
    from memplan.trace.trace import Trace

    returned = test()
    if isinstance(returned, Trace):
        raise _ReturnedTrace(returned)
    if isinstance(returned, nn.Module):
        # a module of a fixture was created before the recording and has real tensors
        tensors = (*returned.parameters(), *returned.buffers())
        is_real = any(not isinstance(tensor, _torch.FakeTensor) for tensor in tensors)
        return copy_module(returned) if is_real else returned
    if not callable(returned):
        return returned
    if expects_module:
        return returned()

    def step() -> None:
        result = returned()
        if isinstance(result, nn.Module) or (callable(result) and not isinstance(result, Tensor)):
            raise _ReturnsModule

    return step


def _named(function: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Set the name by which messages refer to a function, and return the function."""
    function.__qualname__ = function.__name__ = name
    return function
