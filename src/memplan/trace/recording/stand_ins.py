"""Answers scalar reads from fake tensors, whose values are unknown, and patches what breaks on fake tensors."""

from __future__ import annotations

import dis
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from memplan import _torch
from memplan.errors import DataDependentError
from memplan.trace.recording.assumed import Assumed
from memplan.trace.recording.ledger import Entry
from memplan.trace.recording.observer import Observer, Residence
from memplan.trace.recording.place import Line, format_frame, instruction, is_users, user_frame
from memplan.trace.recording.session import COMPILED
from memplan.trace.recording.values.bounds import SIZED_BY_NUMBERS
from memplan.trace.recording.values.c_readers import math_seen
from memplan.trace.recording.values.health import answer_of_healthy
from memplan.trace.recording.values.intervals import Number, Range
from memplan.trace.recording.values.largest import Largest, is_whole
from memplan.trace.recording.values.line_search import ITERATES, goes_on, is_optimizing
from memplan.trace.recording.values.numbers import is_standin, plain, standin
from memplan.trace.recording.values.readings import Site, Taken, Use
from memplan.trace.recording.values.sizes import SizesByValue
from memplan.trace.recording.values.slices import slices_by_value
from memplan.trace.recording.values.splits import splits_by_value
from memplan.trace.records import HOST

_BRANCH = re.compile(r"^\s*(if|elif|while|assert)\b|\bif\b.*\belse\b|\b(and|or|not)\b")
_DECIDES = "a value that was taken as 1 DECIDES A BRANCH or a size: the step may go another way when it really runs"
_OTHER_WAY = "a value decided a branch and was taken the other way: the way taken first ends in an exception"
_BECOMES = "a value that is read BECOMES A SIZE: it is taken as {taken:,g}, {why}"


def reached(error: BaseException | None) -> bool:
    """Return whether a call that raised may have received a symbolic scalar.

    It looks at local variables, also in lists and tuples, of the user's innermost frame and of the frames below it.
    """
    frames = [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [number for number, frame in enumerate(frames) if is_users(frame.f_code.co_filename)]
    innermost = frames[users[-1] :] if users else []
    return any(_has_standin(value) for frame in innermost for value in frame.f_locals.values())


def _has_standin(value: Any) -> bool:
    return any(map(is_standin, value)) if isinstance(value, (list, tuple)) else is_standin(value)


class Standins:
    """Answers every scalar read of a recording, and records where values decided branches and sizes.

    Args:
        observer, mode: of the recording.
        overrides: lines at which a branch goes the other way, and scalar reads with other values than their largest.
    """

    def __init__(self, observer: Observer, mode: _torch.FakeMode, overrides: Collection[Line | Taken] = ()) -> None:
        self._observer = observer
        self._mode = mode
        self.assumed = Assumed()
        self._last_known = False
        """Whether the last value read is known, or assumed once and for all: nothing tracks what it decides."""
        self._last: Range | None = None
        """Range of the last value read; None if unknown."""
        self._sites = frozenset[Site]()
        """Where it was read."""
        self._read_by_method = False
        """Whether a method of `installed` reads, which tracks the value itself."""
        self.largest = Largest(observer.ranges.of, overrides)
        self.in_turn, self.uses, self.given = self.largest.in_turn, self.largest.uses, self.largest.given
        self.used = self.assumed.used
        self.calls = _torch.FunctionCalls(SizesByValue(observer.ranges.put).called)
        self._losses = 0
        self._redraws: int | None = None
        self._shared = set[int]()
        """Storages in shared memory, by their entries' numbers."""
        self._installed: ExitStack | None = None
        """For patches that are needed once a number is read; None if they are in place, or nothing is installed."""
        self._overrides = overrides
        self.last_decision: Line | None = None
        """Last line at which a value decided a branch."""
        self.last_bound: Line | None = None
        """Last line at which values selected elements."""
        self.last_taken = 0
        """Number of elements assumed to be selected there."""
        self.branches: dict[Line, None] = {}
        """Lines at which a value decided a branch that can go the other way, in order."""
        self.turned = set[Line]()
        """Lines at which a branch went the other way."""

    def read(self, tensor: torch.Tensor, run: _torch.Run) -> Any:
        """Return the result of ``aten._local_scalar_dense``: the value if known, else its upper bound, or 1.

        A GradScaler's ``found_inf`` is 0.
        """
        self._last_known = True
        if not isinstance(tensor, _torch.FakeTensor) or tensor.constant is not None:
            return run(_torch.READ_SCALAR)
        if self._redraws is not None:  # the number of rejections follows from the distribution; no branch to report
            self._redraws -= 1
            return self._redraws >= 0
        entry = self._observer.ledger.find(tensor)
        if _is_seed(self._observer, entry):
            return 0
        overflow = entry is not None and entry.id in self._observer.ownership.found_inf
        self._last = values = self.largest.of(tensor)
        self._last_known = values is not None and values[0] == values[1] and self.largest.share(user_frame()) == 1.0
        healthy = None if overflow else answer_of_healthy(entry, self._observer.notes, self._observer.ledger.entries)
        value = 0 if overflow else healthy if healthy is not None else 1 if values is None else values[1]
        if self._last_known:
            return value
        self._sites = self.largest.read(values)
        if values is not None:
            value = self.largest.taken(self._sites, values, value)
            self._last_known = self.largest.is_taken(self._sites)
        if healthy is not None:
            self._last_known = True  # what every such check expects; no branch to report
            self.assumed.add("scalar", f"a check for nan or inf was read and taken as {healthy}")
        elif overflow:
            self._last_known = True  # what every GradScaler expects; no branch to report
            self.assumed.add("scalar", "found_inf was read and taken as 0: no gradient overflowed")
        else:
            self.assumed.add("scalar", f"a value ({str(tensor.dtype)[6:]}) was read and taken as {value}")
            if not (self._last_known or self._read_by_method or _is_subscript()) and is_whole(tensor):
                value = self._as_plain(value)
        if tensor.dtype == torch.bool:
            return bool(value)
        if tensor.dtype.is_complex:
            return complex(value)
        return float(value) if tensor.dtype.is_floating_point else value

    @contextmanager
    def _in_method(self) -> Iterator[None]:
        before, self._read_by_method = self._read_by_method, True
        try:
            yield
        finally:
            self._read_by_method = before

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Patch the methods of fake tensors that return values to Python, and what breaks on fake tensors."""
        fake = _torch.FakeTensor
        with ExitStack() as stack:
            stack.enter_context(
                _torch.patched(
                    fake,
                    item=self._unless_suspended("item", self._item),
                    tolist=self._unless_suspended("tolist", self._tolist),
                    numpy=self._unless_suspended("numpy", lambda tensor, **_: self._numpy(tensor)),
                    __bool__=self._unless_suspended("__bool__", self._bool),
                    __float__=self._unless_suspended("__float__", self._float),
                    __int__=self._unless_suspended("__int__", lambda tensor: self._int(tensor)),
                    __index__=self._unless_suspended("__index__", self._index),
                    __format__=lambda tensor, form: format(tensor.item() if tensor.dim() == 0 else str(tensor), form),
                    __deepcopy__=lambda tensor, memo: _deepcopy(tensor, memo),
                    share_memory_=self._unless_suspended("share_memory_", self._share),
                    is_shared=self._unless_suspended("is_shared", self._is_shared),
                )
            )
            stack.enter_context(_torch.modules_converted_as_real())
            stack.enter_context(_torch.fakes_dressed())
            stack.enter_context(_torch.lazy_as_fake(self._mode, self._mode.within))
            stack.enter_context(_torch.rejections_counted(self._redrawing))
            sliced = lambda values: self.becomes_size(values[0], values[1], user_frame())  # noqa: E731
            stack.enter_context(slices_by_value(sliced, self.largest.of, self._observer.ranges.origin))
            report = partial(self.assumed.add, "bound")
            stack.enter_context(splits_by_value(report, self._observer.ranges.of, self.largest.other_way))
            stack.enter_context(_torch.lengths_as_tensors())
            stack.enter_context(_torch.sequences_padded_in_python())
            stack.enter_context(_torch.linear_seen(self._observer.engine.set_in_linear))
            stack.enter_context(_torch.spectra_seen(self._observer.set_without_vectors))
            stack.enter_context(_torch.random_states_seen(self._random_state))
            stack.enter_context(_torch.eager_instead_of_compiled(partial(self.assumed.add, "compiled", COMPILED)))
            stack.enter_context(self.calls.unasked())
            self._installed = stack
            try:
                yield
            finally:
                self._installed = None
                self.largest.end()
                self.calls.end()

    def _unless_suspended(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls ``read``, or the original method while the recording is suspended."""
        original = getattr(_torch.FakeTensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (original if self._mode.suspended else read)(tensor, *args, **kwargs)

        return method

    def _random_state(self, state: torch.Tensor) -> None:
        if not self._mode.suspended:
            self._observer.random_state(state)

    @contextmanager
    def _redrawing(self, times: int) -> Iterator[None]:
        self._redraws = times
        try:
            yield
        finally:
            self._redraws = None

    def _item(self, tensor: torch.Tensor) -> Any:
        with self._in_method():
            value = torch.Tensor.item(tensor)
        if self._last_known or isinstance(value, complex):
            return value
        if isinstance(value, bool):  # bool cannot be subclassed, and is read to decide a branch
            return self.decides(value)
        self.calls.begin()
        if self._installed is not None:
            self._installed.enter_context(math_seen())
            self._installed = None
        low = None if self._last is None else self._last[0]
        number = standin(value, self, low, user_frame(), self._observer.ranges.origin(tensor), self._sites)
        return self.largest.given(number)

    def _tolist(self, tensor: Any) -> Any:
        if tensor.constant is not None:
            return tensor.constant.tolist()
        return self._item(tensor) if tensor.dim() == 0 else [self._tolist(row) for row in tensor.unbind()]

    def _numpy(self, tensor: Any) -> Any:
        if tensor.constant is not None:
            with _torch.no_modes():
                return _holding(tensor.constant.numpy(), tensor)
        _check_numpy(self._observer.card, tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        if branches(user_frame()):
            self.is_size()
        values = self.largest.of(tensor) if is_whole(tensor) else None
        sites = self.largest.read(values)
        self.uses(sites, Use.PLAIN)
        filled = 1 if values is None else self.largest.taken(sites, values, values[1])
        self.assumed.add("scalar", f"an array ({name}, {tensor.numel()} values) was read and taken as all {filled}")
        if is_whole(tensor):  # what numpy computes of it cannot be tracked: it may be a size
            self.becomes_size(None if values is None else values[0], filled, user_frame())
        return _holding(numpy.full(tuple(tensor.shape), filled, dtype=name), tensor)

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        """`torch.Tensor.share_memory_`: allocates shared memory, copies to it, and frees the former memory."""
        entry = self._observer.ledger.find(tensor)
        if entry is not None and not self._is_shared(tensor):
            self._shared.add(entry.id)
            torch.empty(entry.bytes, dtype=torch.uint8)
        return tensor

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        entry = self._observer.ledger.find(tensor)
        return tensor.is_cuda or (entry is not None and entry.id in self._shared)

    def _bool(self, tensor: torch.Tensor) -> bool:
        with self._in_method():
            value = torch.Tensor.__bool__(tensor)
        return value if self._last_known else self.decides(value)

    def _float(self, tensor: torch.Tensor) -> float:
        with self._in_method():
            value = torch.Tensor.__float__(tensor)
        if not self._last_known and is_optimizing():
            self._losses += 1
            return value / self._losses  # a decreasing loss: the line search goes on
        if not self._last_known:
            self.uses(self._sites, Use.PLAIN)
            if branches(user_frame()):
                self.is_size()
        return value

    def _int(self, tensor: torch.Tensor, convert: Callable[[torch.Tensor], int] = torch.Tensor.__int__) -> int:
        with self._in_method():
            value = convert(tensor)
        if not self._last_known:
            value = int(self._as_plain(value))
        return value

    def _index(self, tensor: torch.Tensor) -> int:
        value = self._int(tensor, torch.Tensor.__index__)
        if not self._last_known and self._last is None:
            raise _used_as_size()
        return value

    def equal(self) -> bool:
        """Return the result of ``torch.equal``."""
        self.assumed.add("scalar", "two tensors were compared and taken as equal")
        return self.decides(True)

    def bounded(self, op: str, size: int, most: int, known: bool) -> None:
        """Record that an op selects by value: by assumption ``size`` elements of at most ``most``.

        ``known``: the size was inferred from other shapes.
        """
        self.last_bound, self.last_taken = user_frame(), size
        self.assumed.selected(op, size, most, known=known, counted=op in SIZED_BY_NUMBERS)

    def decides(self, answer: bool) -> bool:
        """Record that a value decides a branch, and return the direction to go."""
        iterates = goes_on()
        if iterates is not None:
            self.assumed.add("scalar", ITERATES)
            return iterates
        self.last_decision = frame = user_frame()
        if frame is not None and frame in self._overrides:
            self.turned.add(frame)
            self.assumed.add("scalar", _OTHER_WAY)
            return not answer
        if frame is not None:
            self.branches[frame] = None
        self.assumed.add("branch", _DECIDES)
        return answer

    def becomes_size(self, low: Number | None, high: Number, line: Line | None) -> None:
        """Record that a value becomes a size or a loop bound: ``high``, its largest; ``low`` is None if unknown."""
        if low is None:
            self.is_size()
        else:
            self.last_bound = line
            why = self.largest.why(line, smallest=low == high)
            self.assumed.add("bound", _BECOMES.format(taken=plain(high), why=why), line)

    def _as_plain(self, value: Number) -> Number:
        """Record that the last value becomes a plain number, which may be a size, and return it."""
        self.uses(self._sites, Use.PLAIN)
        self.becomes_size(None if self._last is None else self._last[0], value, user_frame())
        return value

    def is_size(self) -> None:
        """Record the assumption that an unbounded scalar was used as a size or loop bound."""
        self.last_decision = user_frame()
        self.assumed.add("branch", _DECIDES)


_SEED_OPS = 8
"""A seed is read within so many ops after it was drawn."""


def _is_seed(observer: Observer, entry: Entry | None) -> bool:
    """Return whether a value was just drawn by `random_()` from all integers, as seeds are."""
    if entry is None or entry.dtype not in ("int64", "int32"):
        return False
    recent = reversed(observer.notes[-_SEED_OPS:])
    return next((note.name == "aten.random_.default" for note in recent if entry.id in note.writes), False)


def _holding(array: Any, tensor: torch.Tensor) -> Any:
    """Return the array with a reference to the tensor, whose memory a real array would share."""
    return numpy.asarray(SimpleNamespace(__array_interface__=array.__array_interface__, of=(array, tensor)))


def _check_numpy(card: Residence | None, tensor: Any) -> None:
    """Raise the error of `Tensor.numpy` for a tensor on the card or one that requires grad."""
    if tensor.device.type != HOST and card is not None and not card.everything:
        raise TypeError(
            f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )
    if tensor.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


def _used_as_size() -> DataDependentError:
    return DataDependentError(
        "a tensor is used as an index or a size, and recording has no values",
        expected="shapes that follow from the shapes of the inputs",
        do="Run memplan.measure(build) instead: it really runs the step",
        where=format_frame(user_frame()),
    )


def _is_subscript() -> bool:
    """Return whether the user's innermost line subscripts: an index selects a single element, whatever its value."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and "SUBSCR" in dis.opname[frame.f_code.co_code[instruction(frame)]]


def branches(frame: tuple[str, int] | None) -> bool:
    """Return whether a line of source branches: a plain float read there may decide the branch."""
    line = linecache.getline(*frame) if frame is not None else ""
    return _BRANCH.search(line) is not None


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Like torch.Tensor.__deepcopy__, which would also copy the mode of a fake tensor."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment")
    with torch.no_grad():
        copy = tensor.clone()
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    else:
        copy.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copy.grad = _deepcopy(tensor.grad, memo)
    memo[id(tensor)] = copy
    return copy
