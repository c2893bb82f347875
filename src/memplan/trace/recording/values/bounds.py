"""Sizes of results that depend on values: the largest possible size if the values are unknown."""

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
"""A line at which values select elements, and the number of its earlier selections."""


class Shares:
    """The user's assumptions of how much ops at a line select, as shares of the largest possible size."""

    def __init__(self, assumed: Mapping[str, float]) -> None:
        """``assumed``: ``FILE:LINE`` -> share, from 0 to 1. FILE is a path or the end of a path."""
        self._shares = [(*place.rsplit(":", 1), share) for place, share in assumed.items()]
        """(file, line number, share)."""
        self._used: set[str] = set()
        """``FILE:LINE`` of the shares that applied to an op."""

    def of(self, line: Line | None) -> float:
        """Return the share assumed for a line; 1 by default."""
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
        """Return a note for each line that has a share, but at which no op has selected by value."""
        places = [f"{file}:{line}" for file, line, _ in self._shares]
        return tuple(
            f"a share was assumed for {place}, where nothing selects by value"
            for place in places
            if place not in self._used
        )


class Bounds:
    """Results of ops that select by value: of the largest possible size, or of the share assumed for a line."""

    def __init__(
        self,
        shares: Shares,
        note_assumption: Callable[[str, int, int, bool], None],
        range_of: RangeOf,
        counts: Mapping[Execution, int],
    ) -> None:
        """Begin before the first line.

        Args:
            shares: the user's, by line.
            note_assumption: called with the name of an op, the assumed and the largest number of elements, and whether
                the number is from ``counts``.
            range_of: returns the smallest and largest element of a tensor, or None.
            counts: (line, number of earlier executions) -> number of elements that values select there, if known.
        """
        self._shares = shares
        self._note_assumption = note_assumption
        self._range_of = range_of
        self._counts = counts
        self._executions: dict[Line | None, int] = {}
        """Number of executions so far, by line."""
        self.last_execution = 0
        """Number of earlier selections at the line of the last selection."""

    def result(self, func: Any, args: Arguments, kwargs: Keywords, line: Line | None) -> Any:
        """Return the result of an op that selects by value; NotImplemented if its size has no bound.

        The size follows from the values if they are known; else it is the user's share for this line of the largest
        size, the largest size by default. A smaller known count for this execution of the line takes precedence.
        """
        selection = _SELECTIONS.get(str(func))
        if selection is None:
            return NotImplemented
        named = _torch.named_arguments(func, args, kwargs)
        largest = selection.largest_size(named, self._range_of)
        if largest is None:
            return NotImplemented
        share = self._shares.of(line)
        known = None if selection.known_size is None else selection.known_size(named)
        self.last_execution = self._executions.get(line, 0)
        self._executions[line] = self.last_execution + 1
        count = None if line is None or share != 1.0 else self._counts.get((line, self.last_execution))
        size = math.ceil(share * largest) if known is None else known
        if count is not None:
            size = min(count, size)
        if known is None:
            self._note_assumption(str(func).split(".")[1], size, largest, count is not None)
        return selection.result(named, size)


def checked_shares(assumed: Mapping[str, float] | None) -> Mapping[str, float]:
    """Return a user's mapping ``FILE:LINE`` -> share, checked. Raises UsageError: a key that is not ``FILE:LINE``, or a
    share that is not from 0 to 1."""
    for place, share in (assumed or {}).items():
        file, colon, line = str(place).rpartition(":")
        is_share = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        if not (file and colon and line.isdigit() and is_share):
            raise UsageError(
                f"assume {place}={share}",
                expected="FILE:LINE and the share that is selected there, from 0 to 1, as in train.py:31=0.3",
                do="Take the line from the message that names it",
            )
    return assumed or {}


@dataclass(frozen=True, slots=True)
class _Selection:
    """Size and result of an op that selects by value."""

    largest_size: Callable[[Keywords, RangeOf], int | None]
    """Returns the largest size; None if the range of an operand's values is unknown."""
    result: Callable[[Keywords, int], Any]
    """Returns a result of this size."""
    known_size: Callable[[Keywords], int | None] | None = None
    """Returns the size if it follows from known values, else None."""


def _most_elements(named: Keywords, range_of: RangeOf) -> int:
    """Return the largest number of elements that `nonzero` or `unique` selects: all; of different booleans, two."""
    x = named["self"]
    is_unique = "return_inverse" in named
    return min(x.numel(), 2) if x.dtype is torch.bool and is_unique else x.numel()


def _nonzero_result(named: Keywords, count: int) -> torch.Tensor:
    """Return indices of shape (elements, dimensions), as the transpose of a contiguous tensor.

    Source: TensorAdvancedIndexing.cpp, nonzero_out_cpu.
    """
    x = named["self"]
    return x.new_empty((x.dim(), count), dtype=_INDEX).t()


def _count_of_known_mask(named: Keywords) -> int | None:
    """Return the number of elements that a mask with known values selects; None if its values are unknown."""
    mask = named["mask"].constant if isinstance(named["mask"], _torch.FakeTensor) else named["mask"]
    if mask is None:
        return None
    with _torch.no_modes():
        return int(mask.expand(torch.broadcast_shapes(named["self"].shape, mask.shape)).sum())


def _unique_result(named: Keywords, count: int) -> tuple[torch.Tensor, ...]:
    """Return the results of `unique` (Unique.cpp): the elements, where each came from, and how often each is there."""
    x = named["self"]
    elements = x.new_empty(count), x.new_empty(x.shape if named["return_inverse"] else 0, dtype=_INDEX)
    if "return_counts" not in named:  # `_unique`
        return elements
    return *elements, x.new_empty(count if named["return_counts"] else 0, dtype=_INDEX)


def _most_rows(named: Keywords, range_of: RangeOf) -> int:
    """Return the largest number of rows that `unique` along a dimension returns; without a dimension, of elements."""
    x, dim = named["self"], named.get("dim")
    return x.numel() if dim is None else x.shape[dim]


def _unique_dim_result(named: Keywords, count: int) -> tuple[torch.Tensor, ...]:
    """Return the results of `unique` along a dimension: the rows, where each came from, and how often each is there."""
    x, dim = named["self"], named.get("dim")
    if dim is None:
        return _unique_result(named, count)
    shape = list(x.shape)
    shape[dim] = count
    inverse = x.new_empty(x.shape[dim], dtype=_INDEX)
    return x.new_empty(shape), inverse, x.new_empty(count, dtype=_INDEX)


def _lengths(named: Keywords) -> list[int] | None:
    """Return the length of each sequence of `pack_padded_sequence`, None if unknown."""
    lengths = named["lengths"].constant if isinstance(named["lengths"], _torch.FakeTensor) else named["lengths"]
    return None if lengths is None else lengths.tolist()


def _known_steps(named: Keywords) -> int | None:
    """Return the number of time steps of all sequences of `pack_padded_sequence`, None if unknown."""
    lengths = _lengths(named)
    return None if lengths is None else sum(lengths)


def _packed_sequence(named: Keywords, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `pack_padded_sequence` (PackedSequence.cpp, _pack_padded_sequence): the time steps of all
    sequences, and the number of sequences at each.

    The latter is a real tensor, since C++ reads its values.
    """
    x, batch = named["input"], named["lengths"].shape[0]
    lengths = _lengths(named) or _lengths_of_steps(count, batch, x.shape[1 if named["batch_first"] else 0])
    with _torch.no_modes():
        sizes = torch.tensor([sum(length > step for length in lengths) for step in range(max(lengths))])
    return x.new_empty((sum(lengths), *x.shape[2:])), sizes


def _lengths_of_steps(steps: int, batch: int, longest: int) -> list[int]:
    """Return sequence lengths that sum to about ``steps``: the first is ``longest``, the others are equal."""
    average = math.ceil((steps - longest) / max(batch - 1, 1))
    return [longest] + [min(longest, max(1, average))] * (batch - 1)


def _most_bins(named: Keywords, range_of: RangeOf) -> int | None:
    """Return the largest number of bins (SummaryOps.cpp, bincount): one for each number up to the largest."""
    values = range_of(named["self"])
    return None if values is None else max(int(named["minlength"]), int(values[1]) + 1)


def _bincount_result(named: Keywords, count: int) -> torch.Tensor:
    """Return ``count`` bins: numbers of elements as int64, or sums of weights as float32 or float64."""
    weights = named["weights"]
    dtype = _INDEX
    if weights is not None:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return named["self"].new_empty(count, dtype=dtype)


def _most_repeats(named: Keywords, range_of: RangeOf) -> int | None:
    """Return the largest number of repeated indices (Repeat.cpp): each index as often as the largest of ``repeats``."""
    values = range_of(named["repeats"])
    return None if values is None else int(values[1]) * named["repeats"].numel()


def _longest_target(named: Keywords, range_of: RangeOf) -> int:
    """Return the longest possible target. It is at most a padded row, or all targets if they are concatenated."""
    lengths, most = named["target_lengths"], named["targets"].shape[-1]
    values = range_of(lengths) if isinstance(lengths, torch.Tensor) else None
    return most if values is None else min(most, int(values[1]))


def _ctc_result(named: Keywords, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses of shape (batch,), and alphas of shape (batch, steps, 2 * target length + 1).

    Source: LossCTC.cpp, ctc_loss_cpu_template. ``count`` is the target length.
    """
    x = named["log_probs"]
    return x.new_empty(x.shape[1]), x.new_empty((x.shape[1], x.shape[0], 2 * count + 1))


SIZED_BY_NUMBERS = frozenset({"bincount", "repeat_interleave", "_ctc_loss"})
"""Ops whose result size is a number among the values of an operand, instead of a number of selected elements."""
_UNIQUE = ("unique_dim.default", "unique_consecutive.default", "unique_dim_consecutive.default")
_SELECTIONS: Mapping[str, _Selection] = {
    "aten.nonzero.default": _Selection(_most_elements, _nonzero_result),
    "aten.masked_select.default": _Selection(
        lambda named, range_of: math.prod(torch.broadcast_shapes(named["self"].shape, named["mask"].shape)),
        lambda named, count: named["self"].new_empty(count),
        _count_of_known_mask,
    ),
    "aten._pack_padded_sequence.default": _Selection(
        lambda named, range_of: math.prod(named["input"].shape[:2]),  # padding included
        _packed_sequence,
        _known_steps,
    ),
    **{f"aten._ctc_loss.{form}": _Selection(_longest_target, _ctc_result) for form in ("default", "Tensor")},
    **{f"aten.{name}.default": _Selection(_most_elements, _unique_result) for name in ("_unique", "_unique2")},
    "aten.bincount.default": _Selection(_most_bins, _bincount_result),
    "aten.repeat_interleave.Tensor": _Selection(_most_repeats, lambda named, count: named["repeats"].new_empty(count)),
    **{f"aten.{name}": _Selection(_most_rows, _unique_dim_result) for name in _UNIQUE},
    "torchvision.nms.default": _Selection(  # indices of the boxes that are left
        lambda named, range_of: named["dets"].shape[0],
        lambda named, count: named["dets"].new_empty(count, dtype=_INDEX),
    ),
}
