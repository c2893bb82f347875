"""Slices that begin or end at a value that a recording does not know: as low and as high as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.values.intervals import Range
from memplan.trace.recording.values.largest import is_whole
from memplan.trace.recording.values.numbers import Origin, becomes_plain, becomes_size, is_standin, range_of
from memplan.trace.recording.values.readings import Use

RangeOf = Callable[[torch.Tensor], Range | None]
OriginOf = Callable[[torch.Tensor], Origin | None]
Tell = Callable[[Range], None]
"""Told the range of a tensor at which a slice begins or ends."""


@contextmanager
def slices_by_value(tell: Tell, range_of_tensor: RangeOf, origin_of: OriginOf) -> Iterator[None]:
    """Replace unknown ends of slices in `x[start:stop]`, read or written, before C++ reads them.

    Args:
        tell: told the range of a tensor that decides how long a slice is.
        range_of_tensor: smallest and largest element of a tensor; None where that is not known.
        origin_of: the value that a tensor of one element was computed from by adding a number.
    """
    fake = _torch.FakeTensor
    slices = Slices(tell, range_of_tensor, origin_of)

    def get(tensor: Any, key: Any) -> Any:
        return torch.Tensor.__getitem__(tensor, slices.key(key, known=tensor.constant is not None))

    def put(tensor: Any, key: Any, value: Any) -> None:
        torch.Tensor.__setitem__(tensor, slices.key(key), value)

    with _torch.patched(fake, __getitem__=get, __setitem__=put):
        yield


class Slices:
    """Chooses the ends of slices; see `slices_by_value` for the arguments."""

    def __init__(self, tell: Tell, range_of_tensor: RangeOf, origin_of: OriginOf) -> None:
        self._tell = tell
        self._range_of_tensor = range_of_tensor
        self._origin_of = origin_of

    def key(self, key: Any, *, known: bool = False) -> Any:
        """Return an index that selects the most that this one can; of single elements the first it can be.

        ``known``: whether what is selected from is known, so that the element is known, too, but not that it may be
        another.
        """
        if isinstance(key, tuple):
            return tuple(self.key(one, known=known) for one in key)
        if isinstance(key, slice):
            return self._slice(key) if any(map(self._is_unknown, (key.start, key.stop, key.step))) else key
        if known and self._is_unknown(key) and not is_standin(key) and key.dim() == 0 and is_whole(key):
            self.key(key.item(), known=True)
        if not is_standin(key) or key.low is None:
            return key
        key.seen = True
        if known:
            becomes_plain(key, Use.CHOOSES)
        return key.low

    def _slice(self, key: slice) -> slice:
        first, last, step = self._range(key.start), self._range(key.stop), self._step(key.step)
        if first is not None and self._length(key) is not None and (first[0] >= 0 or first[1] < 0):
            for end in filter(is_standin, (key.start, key.stop)):
                end.seen = True
            start, stop = first[0], first[0] + (self._length(key) or 0)
            return slice(start, stop if (stop < 0) == (start < 0) else None, step)
        for end, values in ((key.start, first), (key.stop, last)):
            if values is not None and self._is_unknown(end):
                becomes_size(end) if is_standin(end) else self._tell(values)
        start, stop = key.start, key.stop
        if first is not None and self._is_unknown(start):
            start = first[0] if first[0] >= 0 or first[1] < 0 else 0
        if last is not None and self._is_unknown(stop):  # x[:-0] is empty, x[:-1] is not
            stop = last[1] if last[0] >= 0 or last[1] < 0 else None
        return slice(start, stop, step)

    def _step(self, step: Any) -> Any:
        """Return the smallest step that this one can be, which selects most; it is at least 1."""
        values = self._range(step)
        if not self._is_unknown(step) or values is None:
            return step
        least = max(values[0], 1)
        becomes_size(step, least) if is_standin(step) else self._tell((least, least))
        return least

    def _length(self, key: slice) -> int | None:
        """Return how many elements lie between two ends that differ by a known number: `x[i : i + 8]`."""
        first, last = self._origin(key.start), self._origin(key.stop)
        return last[1] - first[1] if first is not None and last is not None and first[0] == last[0] else None

    def _origin(self, value: Any) -> Origin | None:
        if isinstance(value, _torch.FakeTensor):
            return self._origin_of(value)
        return value.origin if is_standin(value) else None

    def _range(self, value: Any) -> Range | None:
        if isinstance(value, _torch.FakeTensor):
            return self._range_of_tensor(value)
        return range_of(value)

    def _is_unknown(self, value: Any) -> bool:
        return is_standin(value) or (isinstance(value, _torch.FakeTensor) and value.constant is None)
