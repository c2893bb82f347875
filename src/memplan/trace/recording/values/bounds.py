"""Ops whose results are as large as values say, taken at their largest where a recording does not know the values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.errors import UsageError
from memplan.trace.recording.place import Line
from memplan.trace.recording.values.ranges import Range

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
RangeOf = Callable[[torch.Tensor], Range | None]
_INDEX = torch.int64
Execution = tuple[Line, int]
"""A line at which values select, and how often it had selected something before."""


class Shares:
    """Shares of the most that there can be, which the user assumes for lines.

    Args:
        assumed: ``FILE:LINE`` to the share, from 0 to 1. The file is named as it is or by the end of its path.
    """

    def __init__(self, assumed: Mapping[str, float]) -> None:
        self._shares = [(*place.rsplit(":", 1), share) for place, share in assumed.items()]
        self._used: set[str] = set()

    def of(self, line: Line | None) -> float:
        """Return the share assumed for a line; 1 if none is."""
        if line is None:
            return 1.0
        path, number = os.path.abspath(line[0]), str(line[1])
        for file, assumed_at, share in self._shares:
            if assumed_at == number and (path == os.path.abspath(file) or path.endswith(os.sep + file)):
                self._used.add(f"{file}:{assumed_at}")
                return share
        return 1.0

    @property
    def unused(self) -> tuple[str, ...]:
        """Return a note for each line with a share at which nothing selects."""
        places = [f"{file}:{line}" for file, line, _ in self._shares]
        return tuple(
            f"a share was assumed for {place}, where nothing selects by value"
            for place in places
            if place not in self._used
        )


class Bounds:
    """Results of ops that select by value: as many elements as there can be, or the share that is assumed for a line.

    Args:
        shares: assumed by the user.
        tell: told the name of an op, how many elements are taken and can be, and whether ``counts`` say so.
        range_of: range of a tensor's elements, None where that is not known.
        counts: executions of lines at which it is known how many elements are selected.
    """

    def __init__(
        self,
        shares: Shares,
        tell: Callable[[str, int, int, bool], None],
        range_of: RangeOf,
        counts: Mapping[Execution, int],
    ) -> None:
        self._shares = shares
        self._tell = tell
        self._range_of = range_of
        self._counts = counts
        self._executions: dict[Line | None, int] = {}
        self.last_execution = 0
        """How often the line that selected last had selected something before."""

    def result(self, func: Any, args: Arguments, kwargs: Keywords, frame: Line | None) -> Any:
        """Return what stands for the result of an op; NotImplemented where there is no largest."""
        form = _FORMS.get(str(func))
        if form is None:
            return NotImplemented
        given = _torch.named_arguments(func, args, kwargs)
        most = form.most(given, self._range_of)
        if most is None:
            return NotImplemented
        share = self._shares.of(frame)
        known = None if form.known is None else form.known(given)
        self.last_execution = self._executions.get(frame, 0)
        self._executions[frame] = self.last_execution + 1
        count = None if frame is None or share != 1.0 else self._counts.get((frame, self.last_execution))
        taken = math.ceil(share * most) if known is None else known
        taken = taken if count is None else min(count, taken)
        if known is None:
            self._tell(str(func).split(".")[1], taken, most, count is not None)
        return form.made(given, taken)


def checked_shares(assumed: Mapping[str, float] | None) -> Mapping[str, float]:
    """Return the shares that a user assumes, by ``FILE:LINE``.

    Raises:
        UsageError: a place that is not ``FILE:LINE``, or a share that is not from 0 to 1.
    """
    for place, share in (assumed or {}).items():
        file, colon, line = str(place).rpartition(":")
        number = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        if not (file and colon and line.isdigit() and number):
            raise UsageError(
                f"assume {place}={share}",
                expected="FILE:LINE and the share that is selected there, from 0 to 1, as in train.py:31=0.3",
                do="Take the line from the message that names it",
            )
    return assumed or {}


@dataclass(frozen=True, slots=True)
class _Form:
    """How large a result can be, and how it is made."""

    most: Callable[[Keywords, RangeOf], int | None]
    """Returns how large it can be; None where its operands' values have no largest."""
    made: Callable[[Keywords, int], Any]
    known: Callable[[Keywords], int | None] | None = None
    """Returns how large it is, where the values that decide are known."""


def _elements(given: Keywords, range_of: RangeOf) -> int:
    x = given["self"]
    return min(x.numel(), 2) if x.dtype is torch.bool and "return_inverse" in given else x.numel()


def _places(given: Keywords, taken: int) -> torch.Tensor:
    """TensorAdvancedIndexing.cpp, nonzero_out_cpu: a row for each dimension, seen as a column."""
    x = given["self"]
    return x.new_empty((x.dim(), taken), dtype=_INDEX).t()


def _selected(given: Keywords, range_of: RangeOf) -> int:
    return math.prod(torch.broadcast_shapes(given["self"].shape, given["mask"].shape))


def _known_to_be_selected(given: Keywords) -> int | None:
    mask = given["mask"].constant if isinstance(given["mask"], _torch.FakeTensor) else given["mask"]
    if mask is None:
        return None
    with _torch.no_modes():
        return int(mask.expand(torch.broadcast_shapes(given["self"].shape, mask.shape)).sum())


def _distinct(given: Keywords, taken: int) -> tuple[torch.Tensor, ...]:
    """Unique.cpp: the elements, where each came from, and how often each is there."""
    x = given["self"]
    found = x.new_empty(taken), x.new_empty(x.shape if given["return_inverse"] else 0, dtype=_INDEX)
    if "return_counts" not in given:  # `_unique`
        return found
    return *found, x.new_empty(taken if given["return_counts"] else 0, dtype=_INDEX)


def _rows(given: Keywords, range_of: RangeOf) -> int:
    x, dim = given["self"], given.get("dim")
    return x.numel() if dim is None else x.shape[dim]


def _distinct_rows(given: Keywords, taken: int) -> tuple[torch.Tensor, ...]:
    x, dim = given["self"], given.get("dim")
    if dim is None:
        return _distinct(given, taken)
    shape = list(x.shape)
    shape[dim] = taken
    inverse = x.new_empty(x.shape[dim], dtype=_INDEX)
    return x.new_empty(shape), inverse, x.new_empty(taken, dtype=_INDEX)


def _lengths(given: Keywords) -> list[int] | None:
    """Return how long each sequence of a batch is, where that is known."""
    lengths = given["lengths"].constant if isinstance(given["lengths"], _torch.FakeTensor) else given["lengths"]
    return None if lengths is None else lengths.tolist()


def _steps(given: Keywords, range_of: RangeOf) -> int:
    """Of all sequences, padding included."""
    return given["input"].shape[0] * given["input"].shape[1]


def _known_steps(given: Keywords) -> int | None:
    lengths = _lengths(given)
    return None if lengths is None else sum(lengths)


def _packed(given: Keywords, taken: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PackedSequence.cpp, _pack_padded_sequence: the steps of all sequences, and how many sequences have each.

    How many is read in C++, so that it is a real tensor.
    """
    x, batch = given["input"], given["lengths"].shape[0]
    lengths = _lengths(given) or _with_one_whole(taken, batch, x.shape[1 if given["batch_first"] else 0])
    with _torch.no_modes():
        sizes = torch.tensor([sum(length > step for length in lengths) for step in range(max(lengths))])
    return x.new_empty((sum(lengths), *x.shape[2:])), sizes


def _with_one_whole(steps: int, batch: int, longest: int) -> list[int]:
    """Return lengths of so many steps in all: padded again, they are as long as the longest, which is whole."""
    others = max(batch - 1, 1)
    return [longest, *[min(longest, max(1, math.ceil((steps - longest) / others)))] * (batch - 1)]


def _bins(given: Keywords, range_of: RangeOf) -> int | None:
    """SummaryOps.cpp, bincount: one for each number up to the largest."""
    values = range_of(given["self"])
    return None if values is None else max(int(given["minlength"]), int(values[1]) + 1)


def _counted(given: Keywords, taken: int) -> torch.Tensor:
    weights = given["weights"]
    dtype = _INDEX if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return given["self"].new_empty(taken, dtype=dtype)


def _repeats(given: Keywords, range_of: RangeOf) -> int | None:
    """Repeat.cpp: each index as often as its number says."""
    values = range_of(given["repeats"])
    return None if values is None else int(values[1]) * given["repeats"].numel()


def _longest(given: Keywords, range_of: RangeOf) -> int:
    """No target is longer than its row, or than all of them one behind the other."""
    lengths, most = given["target_lengths"], given["targets"].shape[-1]
    values = range_of(lengths) if isinstance(lengths, torch.Tensor) else None
    return most if values is None else min(most, int(values[1]))


def _aligned(given: Keywords, taken: int) -> tuple[torch.Tensor, torch.Tensor]:
    """LossCTC.cpp, ctc_loss_cpu_template: the losses, and of each step each place in the target, blanks between."""
    x = given["log_probs"]
    return x.new_empty(x.shape[1]), x.new_empty((x.shape[1], x.shape[0], 2 * taken + 1))


SIZED_BY_NUMBERS = frozenset({"bincount", "repeat_interleave", "_ctc_loss"})
"""Ops that select nothing, but whose results are as large as numbers among their values."""
_UNIQUE = ("unique_dim.default", "unique_consecutive.default", "unique_dim_consecutive.default")
_FORMS: Mapping[str, _Form] = {
    "aten.nonzero.default": _Form(_elements, _places),
    "aten.masked_select.default": _Form(
        _selected, lambda given, taken: given["self"].new_empty(taken), _known_to_be_selected
    ),
    "aten._pack_padded_sequence.default": _Form(_steps, _packed, _known_steps),
    **{f"aten._ctc_loss.{form}": _Form(_longest, _aligned) for form in ("default", "Tensor")},
    **{f"aten.{name}.default": _Form(_elements, _distinct) for name in ("_unique", "_unique2")},
    "aten.bincount.default": _Form(_bins, _counted),
    "aten.repeat_interleave.Tensor": _Form(_repeats, lambda given, taken: given["repeats"].new_empty(taken)),
    **{f"aten.{name}": _Form(_rows, _distinct_rows) for name in _UNIQUE},
    "torchvision.nms.default": _Form(  # indices of the boxes that are left
        lambda given, range_of: given["dets"].shape[0],
        lambda given, taken: given["dets"].new_empty(taken, dtype=_INDEX),
    ),
}
