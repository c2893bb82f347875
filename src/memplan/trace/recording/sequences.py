"""Which forward op made which node of autograd, by the numbers that nodes get in the order in which they are made."""

from __future__ import annotations

from memplan import _torch


class Sequences:
    """Numbers of autograd's nodes, read where an op is dispatched: what was made since the op before is its own."""

    def __init__(self) -> None:
        self.ops: dict[int, int] = {}
        """Number of a node -> index of the op that made it."""
        self._last = _torch.sequence_number()
        self._on_view: int | None = None

    def restart(self) -> None:
        """Take what was made up to now for no op's."""
        self._last = _torch.sequence_number()

    def follow(self, index: int, *, after_clone: bool, on_view: bool) -> None:
        """Note the nodes that were made for an op.

        Args:
            index: of the op that is dispatched now.
            after_clone: it writes in place, right after an op that cloned: an op in place whose formula needs its input
                clones that first.
            on_view: it writes into a view and needs a gradient: autograd makes one more node of it when it is over
                (torch/csrc/autograd/variable.cpp, `rebase_history`: CopySlices).
        """
        made = _torch.sequence_number()
        if after_clone:
            for number in (made - 1, made):
                if self.ops.get(number) == index - 1:
                    self.ops[number] = index
        for number in range(self._last + 1, made + 1):
            self.ops[number] = index
        if self._on_view is not None and made > self._last:
            self.ops[self._last + 1] = self._on_view
        self._last = max(made, self._last)
        self._on_view = index if on_view else None
