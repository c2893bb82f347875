"""Position ids: values that a recording does know, as they count up; and the tables that they are looked up in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from memplan.trace.recording.ledger import Ledger

_COUNTING = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
_SHIFTED = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1}
_TABLE = "aten.embedding.default"


class NoSuchRow(IndexError):
    """A position that a table does not have."""

    def __init__(self, position: int, rows: int) -> None:
        super().__init__(f"index {position} is out of range of a table of {rows} rows")
        self.rows = rows


class Positions:
    """Knows the values of position ids (`torch.arange`), to refuse a position that an embedding's table does not have.

    Other integers are unknown, and are not checked.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._first_and_step: dict[int, tuple[int, int]] = {}

    def before(self, name: str, args: tuple[object, ...]) -> None:
        """Check an embedding that is about to run.

        Raises:
            NoSuchRow: it looks up a row that the table does not have, as the real step would raise on the CPU.
        """
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
        """Note a result that counts up, and forget those that the op wrote (``written``)."""
        for one in written:
            if isinstance(one, torch.Tensor):
                self._first_and_step.pop(self._ledger.entry(one, None).id, None)
        if not isinstance(result, torch.Tensor) or result.is_floating_point():
            return
        if name in _SHIFTED and not kwargs:
            self._shifted(args, _SHIFTED[name], result)
        if name not in _COUNTING:
            return
        numbers = [one for one in args if isinstance(one, int)]
        if len(numbers) == len(args):
            first, step = (0, 1) if len(args) == 1 else (numbers[0], numbers[2] if len(args) > 2 else 1)
            self._first_and_step[self._ledger.entry(result, None).id] = first, step

    def _shifted(self, args: tuple[object, ...], sign: int, result: torch.Tensor) -> None:
        """Note a result that counts up from elsewhere, since a number was added to one (that of tokens seen before)."""
        one, number = args[:2]
        if not isinstance(one, torch.Tensor) or one.dim() != 1 or not isinstance(number, int):
            return
        entry = self._ledger.find(one)
        known = None if entry is None else self._first_and_step.get(entry.id)
        if known is not None:
            first, step = known
            begin = first + step * int(one.storage_offset()) + sign * number
            self._first_and_step[self._ledger.entry(result, None).id] = begin, step * int(one.stride(0))

    def _largest(self, indices: torch.Tensor) -> int | None:
        """Return the largest value of a view of a storage that counts up; None if its values are unknown."""
        entry = self._ledger.find(indices)
        known = None if entry is None else self._first_and_step.get(entry.id)
        if known is None or not indices.numel():
            return None
        first, step = known
        begin = int(indices.storage_offset())
        end = begin + sum(
            (int(size) - 1) * int(stride) for size, stride in zip(indices.shape, indices.stride(), strict=True)
        )
        return max(first + step * begin, first + step * end)
