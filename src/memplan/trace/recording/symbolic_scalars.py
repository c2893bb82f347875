"""Answers scalar reads from fake tensors, whose values are unknown, and patches what breaks on fake tensors."""

from __future__ import annotations

import linecache
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy
import torch

from memplan import _torch
from memplan.errors import DataDependentError
from memplan.trace.recording.assumed import Assumed
from memplan.trace.recording.ledger import Entry
from memplan.trace.recording.loads import loads_recorded
from memplan.trace.recording.observer import Observer, Residence
from memplan.trace.recording.place import Line, format_frame, is_users, user_frame
from memplan.trace.recording.session import SCRIPTED
from memplan.trace.recording.values.bounds import SIZED_BY_NUMBERS, Shares
from memplan.trace.recording.values.health import answer_of_healthy
from memplan.trace.recording.values.line_search import ITERATES, goes_on, is_optimizing
from memplan.trace.recording.values.ranges import Number, Range, union
from memplan.trace.recording.values.scalars import bound_of, is_symbolic, symbolic
from memplan.trace.records import HOST

_BRANCH = re.compile(r"^\s*(if|elif|while|assert)\b|\bif\b.*\belse\b|\b(and|or|not)\b")
_DECIDES = "a value that was taken as 1 DECIDES A BRANCH or a size: the step may go another way when it really runs"
_OTHER_WAY = "a value decided a branch and was taken the other way: the way taken first ends in an exception"
_SPLIT = "a tensor IS SPLIT BY VALUES: of its {parts} parts, the first or the last are taken as large as can be"
_LARGEST = 1 << 24
"""A range with larger numbers counts as unknown: a loop of as many iterations would take too long."""
_ONE, _THREE = 1, 3
"""Value of an integer read of unknown range, and its value in another recording, which shows whether the peak depends
on it."""


class Choice(NamedTuple):
    """A branch or scalar read at a line of the user's code, with how a recording may override it."""

    line: Line
    kind: Literal["branch", "other value", "in turn"]
    """"branch": take the other direction; "other value": read the smallest value instead of the largest; "in turn":
    read each value of the range, one after the other."""


Overrides = frozenset[Choice]


@dataclass(frozen=True, slots=True)
class ScalarRead:
    """The scalar reads of a line."""

    value: Number
    """The largest possible value, which the read returns; `_ONE` if no range is known."""
    other: Number
    """The smallest possible value; `_THREE` if no range is known."""
    bounded: bool
    alike: bool
    """Whether all reads have the same range."""
    times: int
    """Number of reads in all steps."""


class Decisions(NamedTuple):
    """Lines of a recording at which unknown values decide branches or are read."""

    branches: Mapping[Line, int]
    """Line -> number of decisions."""
    reads: Mapping[Line, ScalarRead]


def may_hold_symbolic(error: BaseException | None) -> bool:
    """Return whether the call that raised ``error`` may have received a symbolic scalar: whether the user's innermost
    frame, or a frame called from it, has a local variable that is or directly contains a symbolic scalar."""
    frames = [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [number for number, frame in enumerate(frames) if is_users(frame.f_code.co_filename)]
    innermost = frames[users[-1] :] if users else []
    return any(_has_symbolic(value) for frame in innermost for value in frame.f_locals.values())


def _has_symbolic(value: Any) -> bool:
    return any(map(is_symbolic, value)) if isinstance(value, (list, tuple)) else is_symbolic(value)


class ScalarPolicy:
    """Answers every scalar read of a recording, and records where values decide branches and sizes.

    A read returns the largest possible value if the range is known, else 1; conditions follow from that.
    """

    def __init__(self, shares: Shares, overrides: Overrides = frozenset()) -> None:
        """Begin without assumptions.

        Args:
            shares: the user's assumptions of how much is selected, by line.
            overrides: branches that go in their other direction, and reads that return another value.
        """
        self._shares, self._overrides = shares, overrides
        self.assumed = Assumed()
        """Assumptions so far."""
        self._is_last_known = False
        """Whether the last value read is returned as a plain number: it is known, or its assumption needs no check."""
        self._last_range: Range | None = None
        """Range of the last value read; None if unknown."""
        self._losses = 0
        """Number of unknown losses that optimizers have read."""
        self._redraws: int | None = None
        """Number of reads that still decide to draw again; None outside of `_redrawing`."""
        self._has_read = False
        """Whether the step got a symbolic scalar."""
        self.last_decision: Line | None = None
        """Last line at which a value decided a branch."""
        self.last_bound: Line | None = None
        """Last line at which values selected elements."""
        self.last_selected = 0
        """Number of elements assumed to be selected there."""
        self._branches: dict[Line, int] = {}
        """Number of decisions by line."""
        self._reads: dict[Line, ScalarRead] = {}
        """Scalar reads by line."""

    @property
    def decisions(self) -> Decisions:
        """Return where unknown values decided something."""
        return Decisions(self._branches, self._reads)

    def read_scalar(self, tensor: torch.Tensor, run: _torch.Run, observer: Observer) -> Any:
        """Return the result of ``aten._local_scalar_dense``: the value if known, else an assumed value.

        A GradScaler's ``found_inf`` is 0.
        """
        self._is_last_known, self._last_range = True, None
        if not isinstance(tensor, _torch.FakeTensor) or tensor.constant is not None:
            return run(_torch.READ_SCALAR)
        if self._redraws is not None:  # the number of rejections follows from the distribution; no branch to report
            self._redraws -= 1
            return self._redraws >= 0
        entry = observer.ledger.find(tensor)
        if _is_seed(observer, entry):
            return 0
        healthy = answer_of_healthy(entry, observer.notes, observer.ledger.entries)
        if entry is not None and entry.id in observer.ownership.found_inf:
            self.assumed.add("scalar", "found_inf was read and taken as 0: no gradient overflowed")
            value = 0
        elif healthy is not None:
            self.assumed.add("scalar", f"a check for nan or inf was read and taken as {healthy}")
            value = healthy
        else:
            self._last_range = bound = self._range(tensor, observer)
            has_share = bound is not None and self._shares.of(user_frame()) != 1.0  # the user's assumption
            self._is_last_known = bound is not None and bound[0] == bound[1] and not has_share
            value = self._value(bound, whole=_is_whole(tensor))
            text = f"a value ({str(tensor.dtype).removeprefix('torch.')}) was read and taken as {value}"
            if has_share:
                self.assumed.add("bound", text + ", as was assumed")
            elif not self._is_last_known:
                self.assumed.add("scalar", text)
        if tensor.dtype == torch.bool:
            return bool(value)
        if tensor.dtype.is_complex:
            return complex(value)
        return float(value) if tensor.dtype.is_floating_point else int(value)

    def _range(self, tensor: torch.Tensor, observer: Observer) -> Range | None:
        """Return the range of a tensor's values; None if unknown or too wide, for booleans if both are possible."""
        values = observer.ranges.of(tensor)
        if values is None or max(map(abs, values)) > _LARGEST:
            return None
        return None if tensor.dtype is torch.bool and values[0] != values[1] else values

    def _value(self, bound: Range | None, *, whole: bool) -> Number:
        """Return the assumed value for a scalar read at the user's line, and record the read.

        The value is the largest of the range, unless the line has a share or an override.

        Args:
            bound: the range of the value; None if unknown.
            whole: whether the value is an integer.
        """
        line, share = user_frame(), self._shares.of(user_frame())
        if bound is not None and share != 1.0:
            value = bound[0] + share * (bound[1] - bound[0])
            return math.ceil(value) if whole else value
        other, value = bound or (_THREE, _ONE)  # smallest and largest value; without a range 3 and 1
        decides_nothing = other == value or (bound is None and not whole)  # no size follows from an unknown float
        if line is None or decides_nothing:
            return value
        before = self._reads.get(line, ScalarRead(value, other, bounded=bound is not None, alike=True, times=0))
        self._reads[line] = ScalarRead(
            value=max(before.value, value),
            other=min(before.other, other),
            bounded=before.bounded and bound is not None,
            alike=before.alike and (before.value, before.other) == (value, other),
            times=before.times + 1,
        )
        if Choice(line, "in turn") in self._overrides and isinstance(value, int) and bound is not None:
            # from both ends in turn, so that two offsets are as far apart as they can be
            turn, smallest = before.times % (value - int(other) + 1), int(other)
            return value - turn // 2 if turn % 2 else smallest + turn // 2
        return other if Choice(line, "other value") in self._overrides else value

    @contextmanager
    def installed(self, observer: Observer, mode: _torch.FakeMode) -> Iterator[None]:
        """Patch the methods of fake tensors that return values to Python, and functions that fail on fake tensors."""
        fake = _torch.FakeTensor

        def unless_suspended(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
            """Return a method of fake tensors that calls ``read``, or the original while the mode is suspended."""
            original = getattr(fake, name)
            return lambda tensor, *args, **kwargs: (original if mode.suspended else read)(tensor, *args, **kwargs)

        def random_state(state: torch.Tensor) -> None:
            """Tell the observer of a tensor that `torch.get_rng_state` returned."""
            if not mode.suspended:
                observer.random_state(state)

        with ExitStack() as stack:
            stack.enter_context(
                _torch.patched(
                    fake,
                    item=unless_suspended("item", self._item),
                    tolist=unless_suspended("tolist", self._tolist),
                    numpy=unless_suspended("numpy", lambda tensor, **_: self._numpy(tensor, observer)),
                    __bool__=unless_suspended("__bool__", self._bool),
                    __float__=unless_suspended("__float__", self._float),
                    __int__=unless_suspended("__int__", lambda tensor: self._int(tensor)),
                    __index__=unless_suspended("__index__", self._index),
                    __format__=lambda tensor, form: format(tensor.item() if tensor.dim() == 0 else str(tensor), form),
                    __deepcopy__=lambda tensor, memo: _deepcopy(tensor, memo),
                    split=self._splitting(fake.split),
                    tensor_split=_splitting_at(fake.tensor_split),
                    **{name: unless_suspended(name, call) for name, call in _shared_memory(observer).items()},
                )
            )
            split = _torch.only_in_this_thread(_splitting_at(torch.tensor_split), torch.tensor_split)
            stack.enter_context(_torch.patched(torch, tensor_split=split))
            stack.enter_context(_torch.exchanges_checked(self._checked_parts))
            stack.enter_context(_torch.modules_converted_as_real())
            stack.enter_context(_torch.fakes_as_subclasses())
            stack.enter_context(_torch.files_mapped_without_data())
            stack.enter_context(
                loads_recorded(
                    lambda: _torch.is_dispatched() and not mode.suspended,
                    partial(self.assumed.add, "host"), torch.device("cuda", _torch.current_rank().local_rank),
                )
            )  # fmt: skip
            stack.enter_context(_torch.lazy_layers_with_fake_parameters(mode, mode.within))
            stack.enter_context(_torch.redraws_estimated(self._redrawing))
            stack.enter_context(_torch.lengths_as_tensors())
            stack.enter_context(_torch.sequences_padded_in_python())
            stack.enter_context(_torch.linear_calls_reported(observer.engine.set_in_linear))
            stack.enter_context(_torch.decompositions_without_vectors(observer.set_without_vectors))
            stack.enter_context(_torch.random_states_reported(random_state))
            stack.enter_context(_torch.scripted_as_python(partial(self.assumed.add, "compiled", SCRIPTED)))
            yield

    def making_tensors(self, observer: Observer) -> AbstractContextManager[None]:
        """Patch `torch.tensor` and `torch.as_tensor` (or the card's versions of them) for symbolic scalars."""
        functions = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
        here = {
            name: _torch.only_in_this_thread(self._for_symbolic(call, observer), call)
            for name, call in functions.items()
        }
        return _torch.patched(torch, **here)

    def _checked_parts(self, sizes: Sequence[Any], rows: int) -> Sequence[int]:
        """Return the sizes of an exchange's parts as plain numbers. ``rows``: of the exchanged tensor, -1 if unknown.
        Raises DataDependentError if sizes that were read from tensors do not add up to ``rows``. Without a share, each
        is assumed to be the largest possible."""
        if not any(map(is_symbolic, sizes)):
            return sizes
        numbers = [int.__add__(size, 0) for size in sizes]  # ints that report no branches
        if rows in (-1, sum(numbers)):
            return numbers
        do = "Record even routing: leave the sizes out, or take the number of tokens over the number of ranks"
        largest = [bound[1] if bound is not None else 0 for bound in map(bound_of, sizes)]
        if all(largest):
            line = next(reversed(self._reads), None)
            place = "FILE:LINE" if line is None else f"{os.path.basename(line[0])}:{line[1]}"
            do = (
                "Record even routing: leave the sizes out, or assume it where they are read: --assume "
                f"{place}={rows / sum(largest):.6g} (more than that where this rank receives: its experts are more "
                "popular)"
            )
        raise DataDependentError(
            "all_to_all_single sends as much as a tensor's values say, and recording has no values",
            expected="parts whose sizes follow from shapes, as those of experts with a capacity",
            do=do,
            where=format_frame(user_frame()),
        )

    @contextmanager
    def _redrawing(self, times: int) -> Iterator[None]:
        """Within this context, reads by which `trunc_normal_` decides whether to draw again return True ``times``
        times, then False."""
        self._redraws = times
        try:
            yield
        finally:
            self._redraws = None

    def _item(self, tensor: torch.Tensor) -> Any:
        """Replace `Tensor.item`: return a symbolic scalar for an unknown number, a plain bool for an unknown bool."""
        value = torch.Tensor.item(tensor)
        if self._is_last_known or isinstance(value, complex):
            return value
        if isinstance(value, bool):  # bool cannot be subclassed; a read counts as a branch
            return self.decides(value)
        self._has_read = True
        return symbolic(value, self, self._last_range)

    def _tolist(self, tensor: Any) -> Any:
        """Replace `Tensor.tolist`: return the known values, or nested lists of symbolic scalars."""
        if tensor.constant is not None:
            return tensor.constant.tolist()
        return self._item(tensor) if tensor.dim() == 0 else [self._tolist(row) for row in tensor.unbind()]

    def _numpy(self, tensor: Any, observer: Observer) -> Any:
        """Replace `Tensor.numpy`: return an array of the known values, or filled with a single assumed value."""
        if tensor.constant is not None:
            with _torch.no_modes():
                return _holding(tensor.constant.numpy(), tensor)
        _check_numpy(observer.card, tensor)
        name, whole = str(tensor.dtype).removeprefix("torch."), _is_whole(tensor)
        bound = self._range(tensor, observer) if whole else None
        value = self._value(bound, whole=whole)
        self.assumed.add("scalar", f"an array ({name}, {tensor.numel()} values) was read and taken as all {value}")
        if bound is None and (whole or branches(user_frame())):
            self.becomes_plain()
        return _holding(numpy.full(tuple(tensor.shape), value, dtype=name), tensor)

    def _bool(self, tensor: torch.Tensor) -> bool:
        """Replace ``bool(tensor)``: return the known truth value, or the assumed, which decides a branch."""
        value = torch.Tensor.__bool__(tensor)
        return value if self._is_last_known else self.decides(value)

    def _float(self, tensor: torch.Tensor) -> float:
        """Replace `float(tensor)`: return the assumed value, ever smaller in an optimizer's line search."""
        value = torch.Tensor.__float__(tensor)
        if not self._is_last_known and is_optimizing():
            self._losses += 1
            return value / self._losses  # a decreasing loss: the line search goes on
        if not self._is_last_known and branches(user_frame()):
            self.becomes_plain()
        return value

    def _int(self, tensor: torch.Tensor, convert: Callable[[torch.Tensor], int] = torch.Tensor.__int__) -> int:
        """Replace ``int(tensor)``: return the known or assumed value as a plain int.

        Branches on a plain int cannot be followed, which is reported if the range of the value is unknown.
        """
        value = convert(tensor)
        if not self._is_last_known and self._last_range is None:
            self.becomes_plain()
        return value

    def _index(self, tensor: torch.Tensor) -> int:
        """Replace ``__index__``, by which a tensor becomes a size; raise DataDependentError if its range is unknown."""
        value = self._int(tensor, torch.Tensor.__index__)
        if not self._is_last_known and self._last_range is None:
            raise _used_as_size()
        return value

    def _splitting(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Tensor.split` for sizes that may be symbolic: assumed sizes are adjusted to add up (`fitted`)."""

        def split_by(tensor: Any, sizes: Any, dim: int = 0) -> Any:
            """Replace `Tensor.split`."""
            if isinstance(sizes, (list, tuple)) and any(map(is_symbolic, sizes)):
                self.assumed.add("bound", _SPLIT.format(parts=len(sizes)))
                sizes = fitted(sizes, tensor.shape[dim])
            return split(tensor, sizes, dim)

        return split_by

    def _for_symbolic(self, make: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
        """Return a version of ``make`` (`torch.tensor`) for symbolic scalars: the result's values are unknown, within
        the union of their ranges."""

        def make_with_unknown_values(*args: Any, **kwargs: Any) -> Any:
            """Call ``make``, and forget the values of a result from symbolic scalars."""
            result = make(*args, **kwargs)
            if self._has_read and isinstance(result, _torch.FakeTensor) and result.constant is not None:
                numbers = list(_leaves(args[0] if args else kwargs.get("data")))
                if any(map(is_symbolic, numbers)):
                    result.constant = None
                    observer.ranges.put(result, union([bound_of(number) for number in numbers]))
            return result

        return make_with_unknown_values

    def equal(self) -> bool:
        """Return the result of ``torch.equal``."""
        self.assumed.add("scalar", "two tensors were compared and taken as equal")
        return self.decides(True)

    def bounded(self, op: str, size: int, most: int, known: bool) -> None:
        """Record that an op's result has ``size`` elements by assumption, where values select up to ``most``."""
        self.last_bound, self.last_selected = user_frame(), size
        self.assumed.selected(op, size, most, known=known, counted=op in SIZED_BY_NUMBERS)

    def decides(self, answer: bool) -> bool:
        """Record that a value decides a branch, and return the truth value of the condition to assume."""
        iterates = goes_on()
        if iterates is not None:
            self.assumed.add("scalar", ITERATES)
            return iterates
        self.last_decision = line = user_frame()
        if line is not None:
            self._branches[line] = self._branches.get(line, 0) + 1
            if Choice(line, "branch") in self._overrides:
                self.assumed.add("scalar", _OTHER_WAY)
                return not answer
        self.assumed.add("branch", _DECIDES)
        return answer

    def becomes_plain(self) -> None:
        """Record that a value of unknown range became a plain number, whose branches cannot be followed."""
        self.last_decision = user_frame()
        self.assumed.add("branch", _DECIDES)

    def result_assumed(self, text: str) -> None:
        """Record an assumption about a result that depends on values."""
        self.assumed.add("sparse", text)

    def library_op(self, op: str) -> None:
        """Record an operator of a library or of the user, whose workspace is unknown."""
        name = op.rpartition(".")[0].replace(".", "::")
        self.assumed.add("library", f"{name}: what its kernel takes besides its results is not known and NOT COUNTED")

    def mixed_devices(self, op: str) -> None:
        """Record an op that reads tensors both on the card and on the host."""
        name = op.removeprefix("aten.").split(".")[0]
        text = f"{name} READS A TENSOR OF THE HOST beside one on the card: on CUDA it raises an error"
        self.assumed.add("host", text)


def fitted(sizes: list[int] | tuple[int, ...], whole: int) -> list[int]:
    """Return sizes like ``sizes`` that add up to ``whole``, for `Tensor.split` by symbolic scalars.

    If the sum is too large, the first parts keep their sizes and each later part gets at least an element; if the sum
    is too small, the last parts grow, as far as their ranges allow.
    """
    result, left = list[int](), whole
    for position, size in enumerate(sizes):
        later_parts = len(sizes) - 1 - position
        result.append(max(0, min(int(size), left - later_parts)))
        left -= result[-1]
    for part in reversed(range(len(sizes))):
        bound = sizes[part].bound if is_symbolic(sizes[part]) else None  # pyright: ignore[reportAttributeAccessIssue]
        growth = left if bound is None else max(0, min(left, int(bound[1]) - result[part]))
        result[part] += growth
        left -= growth
    result[-1] += left  # the ranges do not allow the whole
    return result


def _splitting_at(split: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `tensor_split` (``split``) that converts a tensor of split positions to a list: torch's C++ would read
    the memory of the fake tensor."""

    def split_at(*args: Any, **kwargs: Any) -> Any:
        """Call ``split`` with split positions, other than the tensor itself, as lists."""
        name = "tensor_indices_or_sections"
        if isinstance(kwargs.get(name), _torch.FakeTensor):
            kwargs["indices"] = kwargs.pop(name).tolist()
        positions = [value.tolist() if isinstance(value, _torch.FakeTensor) else value for value in args[1:]]
        return split(*args[:1], *positions, **kwargs)

    return split_at


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists and tuples."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, (list, tuple)):
            yield from _leaves(item)
        else:
            yield item


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool


_SEED_OPS = 8
"""A seed is read within this number of ops after it was drawn."""


def _is_seed(observer: Observer, entry: Entry | None) -> bool:
    """Return whether a scalar was just drawn by `random_()` from all integers, as a seed: its value decides nothing."""
    if entry is None or entry.dtype not in ("int64", "int32"):
        return False
    for note in reversed(observer.notes[-_SEED_OPS:]):
        if entry.id in note.writes:
            return note.name == "aten.random_.default"
    return False


def _holding(array: Any, tensor: torch.Tensor) -> Any:
    """Return the array with a reference that keeps the tensor alive, as a real array, which shares its memory, does."""
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
    """Return the error for a tensor of unknown value that the step uses as a size or an index."""
    return DataDependentError(
        "a tensor is used as an index or a size, and recording has no values",
        expected="shapes that follow from the shapes of the inputs",
        do="Run memplan.measure(build) instead: it really runs the step",
        where=format_frame(user_frame()),
    )


def branches(frame: tuple[str, int] | None) -> bool:
    """Return whether the source line of a frame has a branch, which a plain float read there may decide."""
    line = linecache.getline(*frame) if frame is not None else ""
    return _BRANCH.search(line) is not None


def _shared_memory(observer: Observer) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return replacements for `Tensor.share_memory_`, recorded as a temporary of the tensor's size, and `is_shared`."""
    shared = set[int]()

    def is_shared(tensor: torch.Tensor) -> bool:
        entry = observer.ledger.find(tensor)
        return tensor.is_cuda or (entry is not None and entry.id in shared)

    def share(tensor: torch.Tensor) -> torch.Tensor:
        """Replace `Tensor.share_memory_`, which copies the tensor's storage into shared memory."""
        entry = observer.ledger.find(tensor)
        if entry is not None and not is_shared(tensor):
            shared.add(entry.id)
            torch.empty(entry.bytes, dtype=torch.uint8)  # recorded as allocated and freed here
        return tensor

    return {"share_memory_": share, "is_shared": is_shared}


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Copy a fake tensor as `Tensor.__deepcopy__` does, but without copying its fake mode."""
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
