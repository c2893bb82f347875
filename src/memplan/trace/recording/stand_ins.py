"""Answers for what a fake tensor cannot know: scalars read from it, and ways of torch that break on fake tensors."""

from __future__ import annotations

import dis
import functools
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from memplan import _torch
from memplan.errors import DataDependentError
from memplan.trace.recording.ledger import Entry
from memplan.trace.recording.observer import Observer
from memplan.trace.recording.place import Line, format_frame, is_users, user_frame
from memplan.trace.recording.session import COMPILED
from memplan.trace.recording.values.line_search import ITERATES, goes_on, is_optimizing
from memplan.trace.recording.values.splits import splits_by_value
from memplan.trace.records import HOST, Assumption

_BRANCH = re.compile(r"^\s*(if|elif|while|assert)\b|\bif\b.*\belse\b|\b(and|or|not)\b")
_DECIDES = "a value that was taken as 1 DECIDES A BRANCH or a size: the step may go another way when it really runs"
_ENDLESS = 100_000
"""Reads of a value at one line after which the step is taken for a loop without end."""


class Reader(Protocol):
    """Told what a value that is not known decides."""

    def decides(self, answer: bool) -> bool:
        """Note that it decides a branch, and return the answer to give."""
        ...

    def is_size(self) -> None:
        """Note that it becomes a size, or the length of a loop."""
        ...


class _StandinFloat(float):
    """A number that was never computed; says so when it decides a branch."""

    __slots__ = ("reader",)
    reader: Reader


class _StandinInt(int):
    """Like `_StandinFloat`, for integers."""

    reader: Reader


def _comparing(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def compare(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        chooses = name in _CHOOSING and _called_as_a_function(sys._getframe(1))
        return result if chooses or not isinstance(result, bool) else self.reader.decides(result)

    return compare


def _converting(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def convert(self: Any, *args: Any) -> Any:
        self.reader.is_size()
        return method(self, *args)

    return convert


_CHOOSING = frozenset({"__lt__", "__le__", "__gt__", "__ge__"})


def _called_as_a_function(frame: Any) -> bool:
    """Return whether a comparison was made by ``max(a, b)`` and its like, which choose a value and no branch."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def _computing(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    @functools.wraps(method)
    def compute(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        return _standin(result, self.reader) if type(result) in (int, float) else result

    return compute


for _class, _base in ((_StandinFloat, float), (_StandinInt, int)):
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__"):
        setattr(_class, _name, _comparing(_base, _name))
    # a running mean or a scaled loss is as unknown as what it came from
    for _name in [
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "rfloordiv",
        "mod",
        "rmod",
        "pow",
        "rpow",
        "neg",
        "abs",
    ]:
        setattr(_class, f"__{_name}__", _computing(_base, f"__{_name}__"))
    # as an integer it can become a size, or the length of a loop
    for _name in ("__int__", "__index__", "__round__", "__trunc__", "__floor__", "__ceil__"):
        if hasattr(_base, _name):
            setattr(_class, _name, _converting(_base, _name))
    setattr(_class, "__hash__", _base.__hash__)  # noqa: B010  # a class that defines __eq__ loses it


def _is_standin(value: Any) -> bool:
    return isinstance(value, (_StandinInt, _StandinFloat))


def _standin(value: float | int, reader: Reader) -> Any:
    result = _StandinInt(value) if isinstance(value, int) else _StandinFloat(value)
    result.reader = reader
    return result


def reached(error: BaseException | None) -> bool:
    """Return whether a call that raised was given a stand-in: by the variables of the user's line and of torch's frames
    below it, in lists and tuples, too."""
    frames = [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [number for number, frame in enumerate(frames) if is_users(frame.f_code.co_filename)]
    inner = frames[users[-1] :] if users else []
    return any(_has_standin(value) for frame in inner for value in frame.f_locals.values())


def _has_standin(value: Any) -> bool:
    return any(map(_is_standin, value)) if isinstance(value, (list, tuple)) else _is_standin(value)


class Standins:
    """Scalars for a recording, with a list of where they were read.

    Args:
        observer, mode: of the recording.
        other: lines at which a value that decides a branch is to decide for the other one.
    """

    def __init__(self, observer: Observer, mode: _torch.FakeMode, other: Collection[Line] = ()) -> None:
        self._observer = observer
        self._mode = mode
        self._found: dict[tuple[str, str, tuple[str, int] | None], int] = {}
        self._direct = True
        self._last_real = False
        self._losses = 0
        self._redraws: int | None = None
        self._other = other
        self.last_decision: Line | None = None
        """Line at which a value decided a branch last."""
        self.last_bound: Line | None = None
        """Line at which values selected something last."""
        self.branches: dict[Line, None] = {}
        """Lines at which a value decided a branch, in order, which can be taken the other way."""

    def read(self, tensor: torch.Tensor, run: _torch.Run) -> Any:
        """Return what ``aten._local_scalar_dense`` answers: the value where it is known, else 0 for found_inf and 1."""
        if not isinstance(tensor, _torch.FakeTensor) or tensor.constant is not None:
            self._last_real = True
            return run(_torch.READ_SCALAR)
        self._last_real = False
        if self._redraws is not None:
            self._last_real = True  # follows from the distribution; no branch to warn of
            self._redraws -= 1
            return self._redraws >= 0
        entry = self._observer.ledger.find(tensor)
        overflow = entry is not None and entry.id in self._observer.marks.found_inf
        value = 0 if overflow or self._tells_of_nan(entry) else 1
        if value == 0 and not overflow:
            self._last_real = True  # what every such check expects; no branch to warn of
            self._add("scalar", "a check for nan or inf was read and taken as False")
        elif overflow:
            self._last_real = True  # the stand-in that every GradScaler expects; no branch to warn of
            self._add("scalar", "found_inf was read and taken as 0: no gradient overflowed")
        else:
            self._add("scalar", f"a value ({str(tensor.dtype)[6:]}) was read and taken as {value}")
        if tensor.dtype == torch.bool:
            return bool(value)
        if tensor.dtype.is_complex:
            return complex(value)
        return float(value) if tensor.dtype.is_floating_point else value

    def _tells_of_nan(self, entry: Entry | None, depth: int = 4) -> bool:
        """Return whether a value says that something is nan or infinite: no healthy step has any."""
        if entry is None or entry.op is None or entry.dtype != "bool":
            return False
        note = self._observer.notes[entry.op]
        if note.name.startswith(("aten.isnan", "aten.isinf")):
            return True
        if depth == 0 or not note.name.startswith(("aten.any", "aten.logical_or", "aten.bitwise_or", "aten.max")):
            return False
        entries = self._observer.ledger.entries
        return any(self._tells_of_nan(entries[read], depth - 1) for _, read in note.reads)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace, on fake tensors only, the methods that hand a value to Python; and what breaks on fake tensors."""
        fake = _torch.FakeTensor
        with ExitStack() as stack:
            stack.enter_context(
                _torch.patched(
                    fake,
                    item=lambda tensor: self._item(tensor),
                    tolist=lambda tensor: self._tolist(tensor),
                    numpy=lambda tensor, **_: self._numpy(tensor),
                    __bool__=lambda tensor: self._bool(tensor),
                    __float__=lambda tensor: self._float(tensor),
                    __int__=lambda tensor: self._int(tensor),
                    __index__=lambda tensor: self._index(tensor),
                    __format__=lambda tensor, form: format(tensor.item() if tensor.dim() == 0 else str(tensor), form),
                    __deepcopy__=lambda tensor, memo: _deepcopy(tensor, memo),
                )
            )
            stack.enter_context(_torch.modules_converted_as_real())
            stack.enter_context(_torch.lazy_as_fake(self._mode, self._mode.within))
            stack.enter_context(_torch.rejections_counted(self._redrawing))
            stack.enter_context(splits_by_value(_is_standin, lambda text: self._add("bound", text)))
            stack.enter_context(_torch.lengths_as_tensors())
            stack.enter_context(_torch.sequences_padded_in_python())
            stack.enter_context(_torch.linear_seen(self._observer.engine.in_linear))
            stack.enter_context(_torch.random_states_seen(self._observer.random_state))
            stack.enter_context(_torch.eager_instead_of_compiled(self._compiled))
            yield

    def assumptions(self) -> tuple[Assumption, ...]:
        """Return what was assumed: branches first, then in the order of their first use."""
        rows = [
            Assumption(kind, text, format_frame(frame), count)  # pyright: ignore[reportArgumentType]  # kinds below
            for (kind, text, frame), count in self._found.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.kind not in ("branch", "bound")))

    def chosen(self, op: str, reason: str) -> None:
        """Note that an op takes one of several kernels on the card, for a reason."""
        self._add("kernel", f"{op}: {reason}")

    def granted(self, text: str) -> None:
        """Note what was taken for granted of a result that depends on values."""
        self._add("sparse", text)

    def apart(self, op: str) -> None:
        """Note that an op reads tensors on the card and of the host."""
        name = op.removeprefix("aten.").split(".")[0]
        self._add("host", f"{name} READS A TENSOR OF THE HOST beside one on the card: on CUDA it raises an error")

    @contextmanager
    def _redrawing(self, times: int) -> Iterator[None]:
        self._redraws = times
        try:
            yield
        finally:
            self._redraws = None

    def _item(self, tensor: torch.Tensor) -> Any:
        value = torch.Tensor.item(tensor)
        if self._last_real or isinstance(value, complex):
            return value
        if isinstance(value, bool):  # no class of ours can stand in for it, and what else is it read for
            return self.decides(value)
        return _standin(value, self)

    def _tolist(self, tensor: Any) -> Any:
        if tensor.constant is not None:
            return tensor.constant.tolist()
        return self._item(tensor) if tensor.dim() == 0 else [self._tolist(row) for row in tensor.unbind()]

    def _numpy(self, tensor: Any) -> Any:
        import numpy

        if tensor.constant is not None:
            return tensor.constant.numpy()
        if tensor.device.type != HOST:  # as torch says it; where nothing names CUDA, everything lies on the card
            self._refuse_numpy(tensor)
        if tensor.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        name = str(tensor.dtype).removeprefix("torch.")
        if branches(user_frame()):
            self.is_size()
        self._add("scalar", f"an array ({name}, {tensor.numel()} values) was read and taken as all 1")
        return numpy.ones(tuple(tensor.shape), dtype=name)

    def _refuse_numpy(self, tensor: Any) -> None:
        card = self._observer.card
        if card is not None and not card.everything:
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )

    def _bool(self, tensor: torch.Tensor) -> bool:
        value = torch.Tensor.__bool__(tensor)
        return value if self._last_real else self.decides(value)

    def _float(self, tensor: torch.Tensor) -> float:
        value = torch.Tensor.__float__(tensor)
        if not self._last_real and is_optimizing():
            self._losses += 1
            return value / self._losses  # each differs from the one before: it goes on
        if not self._last_real and branches(user_frame()):
            self.is_size()
        return value

    def _int(self, tensor: torch.Tensor) -> int:
        value = torch.Tensor.__int__(tensor)
        if not self._last_real:
            self.is_size()
        return value

    def _index(self, tensor: torch.Tensor) -> int:
        value = torch.Tensor.__index__(tensor)
        if not self._last_real:
            raise DataDependentError(
                "a tensor is used as an index or a size, and recording has no values",
                expected="shapes that follow from the shapes of the inputs",
                do="Run memplan.measure(build) instead: it really runs the step",
                where=format_frame(user_frame()),
            )
        return value

    def equal(self) -> bool:
        """Return what ``torch.equal`` answers."""
        self._add("scalar", "two tensors were compared and taken as equal")
        return self.decides(True)

    def bounded(self, op: str, taken: int, most: int) -> None:
        """Note that an op selects by value, and how much of it is taken to be selected."""
        self.last_bound = user_frame()
        why = "the most there can be" if taken == most else "as was assumed"
        self._add("bound", f"{op} SELECTS BY VALUE: {taken:,} of {most:,} are taken to be selected, {why}")

    def decides(self, answer: bool) -> bool:
        """Note that a value decides a branch, and return the answer to give."""
        iterates = goes_on()
        if iterates is not None:
            self._add("scalar", ITERATES)
            return iterates
        self.last_decision = frame = user_frame()
        if frame in self._other:
            self._add("scalar", "a value decided a branch and was taken the other way: as 1 it ends in an exception")
            return not answer
        if frame is not None:
            self.branches[frame] = None
        self._add("branch", _DECIDES)
        return answer

    def is_size(self) -> None:
        """Note that a value becomes a size, or the length of a loop."""
        self.last_decision = user_frame()
        self._add("branch", _DECIDES)

    def _compiled(self) -> None:
        self._add("compiled", COMPILED)

    def _add(self, kind: str, text: str) -> None:
        key = (kind, text, user_frame())
        self._found[key] = self._found.get(key, 0) + 1
        if self._found[key] > _ENDLESS:
            raise DataDependentError(
                f"a value was read {_ENDLESS} times at one line, most likely by a loop that its stand-in never ends",
                expected="a loop that ends after a number of rounds known from shapes",
                do="Run memplan.measure(build) instead: it really runs the step",
                where=format_frame(key[2]),
            )


def branches(frame: tuple[str, int] | None) -> bool:
    """Return whether a line of source branches; asked where a value leaves us as a plain float and can be followed no
    more."""
    line = linecache.getline(*frame) if frame is not None else ""
    return _BRANCH.search(line) is not None


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """As torch.Tensor.__deepcopy__ does for a real tensor; for a fake one it would copy its mode, too."""
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
