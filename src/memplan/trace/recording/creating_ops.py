"""Which forward op created which autograd node, by the increasing sequence numbers of nodes."""

from __future__ import annotations

from memplan import _torch


class CreatingOps:
    """Maps autograd nodes to the ops that created them: those dispatched next after the node's creation."""

    def __init__(self) -> None:
        self.by_sequence_number: dict[int, int] = {}
        """Autograd sequence number of a node -> index of the op that created the node."""
        self._newest_assigned = _torch.sequence_number()
        """Newest sequence number that was assigned to an op."""
        self._copy_slices_op: int | None = None
        """The previous op, if autograd adds a CopySlices node for it after its dispatch."""

    def restart(self) -> None:
        """Assign the nodes created so far to no op."""
        self._newest_assigned = _torch.sequence_number()

    def follow(self, index: int, *, after_clone: bool, on_view: bool) -> None:
        """Assign the autograd nodes that were created since the previous op to the op dispatched now.

        Args:
            index: of that op.
            after_clone: the op is in place and follows a clone: an in-place op whose formula needs its input clones it
                first, and the clone's nodes are its own.
            on_view: the op writes into a view and needs a gradient: autograd adds a CopySlices node after it
                (torch/csrc/autograd/variable.cpp, `rebase_history`).
        """
        newest = _torch.sequence_number()
        if after_clone:
            for number in (newest - 1, newest):
                if self.by_sequence_number.get(number) == index - 1:
                    self.by_sequence_number[number] = index
        for number in range(self._newest_assigned + 1, newest + 1):
            self.by_sequence_number[number] = index
        # of the new nodes, the CopySlices node of the previous op is the first
        if self._copy_slices_op is not None and newest > self._newest_assigned:
            self.by_sequence_number[self._newest_assigned + 1] = self._copy_slices_op
        self._newest_assigned = max(newest, self._newest_assigned)
        self._copy_slices_op = index if on_view else None
