"""Known values of position ids (`torch.arange`), and the embedding tables that they index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from memplan.trace.recording.ledger import Ledger

_COUNTING = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
_SHIFTED = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1}
_TABLE = "aten.embedding.default"


class NoSuchRow(IndexError):
    """A position id beyond the last row of an embedding's table."""

    def __init__(self, position: int, rows: int) -> None:
        """``position``: the index; ``rows``: of the table."""
        super().__init__(f"index {position} is out of range of a table of {rows} rows")
        self.rows = rows


class Positions:
    """Follows the values of position ids (`torch.arange`), and raises for a position beyond an embedding's table.

    Other integers are unknown, and are not checked.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._first_and_step: dict[int, tuple[int, int]] = {}
        """Storage id -> (value of its first element, difference of consecutive elements)."""

    def before(self, name: str, args: tuple[object, ...]) -> None:
        """Check the position ids of an embedding before it runs. Raises NoSuchRow if an index is out of range, for
        which the real step would raise on the CPU."""
        if name != _TABLE or not isinstance(args[0], torch.Tensor) or not isinstance(args[1], torch.Tensor):
            return
        last = self._largest(args[1])
        if last is not None and last >= args[0].shape[0]:
            raise NoSuchRow(last, int(args[0].shape[0]))

    def after(
        self,
        name: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        written: Sequence[object] = (),
    ) -> None:
        """Note a result with consecutive values, and forget the values of the tensors that the op wrote."""
        for value in written:
            if isinstance(value, torch.Tensor):
                self._first_and_step.pop(self._ledger.entry(value, op=None).id, None)
        if not isinstance(result, torch.Tensor) or result.is_floating_point():
            return
        if name in _SHIFTED and not kwargs:
            self._follow_shift(args, _SHIFTED[name], result)
        if name not in _COUNTING:
            return
        numbers = [arg for arg in args if isinstance(arg, int)]
        if len(numbers) == len(args):  # arange(end), arange(start, end) or arange(start, end, step)
            first = numbers[0] if len(numbers) > 1 else 0
            step = numbers[2] if len(numbers) > 2 else 1
            self._first_and_step[self._ledger.entry(result, op=None).id] = first, step

    def _follow_shift(self, args: tuple[object, ...], sign: int, result: torch.Tensor) -> None:
        """Note the values of position ids plus (``sign`` 1) or minus (-1) a number: the length of a KV cache."""
        positions, number = args[:2]
        if not isinstance(positions, torch.Tensor) or positions.dim() != 1 or not isinstance(number, int):
            return
        known = self._known(positions)
        if known is not None:
            first, step = known
            begin = first + step * int(positions.storage_offset()) + sign * number
            self._first_and_step[self._ledger.entry(result, op=None).id] = begin, step * int(positions.stride(0))

    def _known(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (first element, difference of consecutive elements) of a tensor's storage; None if unknown."""
        entry = self._ledger.find(tensor)
        return None if entry is None else self._first_and_step.get(entry.id)

    def _largest(self, indices: torch.Tensor) -> int | None:
        """Return the largest value of a view of a storage of position ids; None if its values are unknown."""
        known = self._known(indices)
        if known is None or not indices.numel():
            return None
        first, step = known
        sizes_and_strides = zip(indices.shape, indices.stride(), strict=True)
        begin = int(indices.storage_offset())
        end = begin + sum((int(size) - 1) * int(stride) for size, stride in sizes_and_strides)
        return max(first + step * begin, first + step * end)
