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
_OF_A_MODULE = frozenset(("inputs", "kwargs", "targets", "loss", "optimizer", "autocast", "train", "dtype"))
_HELP = (
    "memplan(peak=None, reserved=None, inputs=(), device=None, ...): the step that the test returns (a module, a "
    "callable that makes one, a build, a step or a Trace) may take so many bytes; the other arguments are those of "
    "memplan.assert_peak. Nothing is allocated or trained."
)


def pytest_configure(config: pytest.Config) -> None:
    """Describe the mark."""
    config.addinivalue_line("markers", _HELP)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a mark that cannot be followed: one that does nothing would look like a limit that holds."""
    for mark in item.iter_markers(MARK):
        reason = _why_not(item, mark)
        if reason is not None:
            pytest.fail(f"@pytest.mark.{MARK}: {reason}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with the mark, and hold the step that it returns to each of its limits."""
    marks = list(pyfuncitem.iter_markers(MARK))
    if not marks:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    for mark in marks:
        _hold(pyfuncitem, lambda: pyfuncitem.obj(**arguments), mark.kwargs)
    return True


def _why_not(item: pytest.Item, mark: pytest.Mark) -> str | None:
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


def _hold(item: pytest.Function, test: Callable[[], Any], given: Mapping[str, Any]) -> None:
    from memplan.errors import InputError, PeakError, StepError, UsageError

    try:
        _assert(item.name, test, given)
        return
    except (PeakError, UsageError, StepError) as error:
        found = error
    if isinstance(found, StepError) and found.__cause__ is not None:
        # an error of the test itself, or an assertion in it: shown as if it had been called without memplan
        raise found.__cause__
    text = str(found)
    if isinstance(found, InputError) and "inputs" not in given:
        text += ' In the mark: inputs="8x3x224x224", or a list of them.'
    pytest.fail(text, pytrace=False)


def _assert(title: str, test: Callable[[], Any], given: Mapping[str, Any]) -> None:
    """Record the test as a build, in which nothing is allocated, and check its peak."""
    from memplan.studies.guarding.assert_peak import assert_peak

    limits = {"at_most": given.get("peak"), "reserved": given.get("reserved")}
    options = {name: value for name, value in given.items() if name in _OPTIONS and name != "inputs"}
    inputs = given.get("inputs", ())
    inputs = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    makes_modules = any(name in _OF_A_MODULE for name in given)
    build = _named(lambda: _made(test, makes_modules), title)
    try:
        assert_peak(build, *inputs, **limits, **options)
    except _Recorded as found:
        assert_peak(found.trace, **limits, **{name: value for name, value in given.items() if name == "settings"})
    except _Maker:
        assert_peak(_named(lambda: test()(), title), *inputs, **limits, **options)


class _Recorded(BaseException):
    """Leaves a recording with the Trace that the test returned."""

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self.trace = trace


class _Maker(BaseException):
    """Leaves a recording in which what the test returned turned out to make a module or a step, and to be none."""


def _made(test: Callable[[], Any], makes_modules: bool) -> Any:
    """Return what a test returns as what a ``build`` returns: a module, or a step."""
    from torch import Tensor, nn

    from memplan import _torch
    from memplan.trace.step import copy_module
    from memplan.trace.trace import Trace

    made = test()
    if isinstance(made, Trace):
        raise _Recorded(made)
    if isinstance(made, nn.Module):
        # of a fixture, say: a recording leaves real tensors as they are
        is_real = any(not isinstance(one, _torch.FakeTensor) for one in (*made.parameters(), *made.buffers()))
        return copy_module(made) if is_real else made
    if not callable(made):
        return made
    if makes_modules:  # a step takes no such arguments
        return made()

    def step() -> None:
        result = made()
        if isinstance(result, nn.Module) or (callable(result) and not isinstance(result, Tensor)):
            raise _Maker

    return step


def _named(function: Callable[[], Any], name: str) -> Callable[[], Any]:
    function.__qualname__ = function.__name__ = name
    return function
