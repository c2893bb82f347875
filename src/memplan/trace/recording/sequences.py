"""Which forward op created which autograd node, by the increasing sequence numbers of nodes."""

from __future__ import annotations

from memplan import _torch


class Sequences:
    """Maps autograd nodes to ops: nodes created since the previous dispatch belong to the op dispatched now."""

    def __init__(self) -> None:
        self.ops: dict[int, int] = {}
        """Sequence number of a node -> index of the op that created it."""
        self._last = _torch.sequence_number()
        self._view_op: int | None = None

    def restart(self) -> None:
        """Assign the nodes created so far to no op."""
        self._last = _torch.sequence_number()

    def follow(self, index: int, *, after_clone: bool, on_view: bool) -> None:
        """Assign the nodes created since the previous op.

        Args:
            index: of the op dispatched now.
            after_clone: the op is in place and follows a clone: an in-place op whose formula needs its input clones it
                first, and the clone's nodes are its own.
            on_view: the op writes into a view and needs a gradient: autograd adds a CopySlices node after it
                (torch/csrc/autograd/variable.cpp, `rebase_history`).
        """
        newest = _torch.sequence_number()
        if after_clone:
            for number in (newest - 1, newest):
                if self.ops.get(number) == index - 1:
                    self.ops[number] = index
        for number in range(self._last + 1, newest + 1):
            self.ops[number] = index
        if self._view_op is not None and newest > self._last:
            self.ops[self._last + 1] = self._view_op
        self._last = max(newest, self._last)
        self._view_op = index if on_view else None
