"""Python scalars saved for backward: for `x * 2.0`, autograd saves the 0-dim tensor that torch wraps the scalar in.

Under a dispatch mode the op receives the scalar itself, so no tensor shows this storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Entry, Ledger
from memplan.trace.semantics.cpu.scalar_operands import wrapped
from memplan.trace.semantics.kinds import Temporary

_OPS = frozenset(f"aten.{name}.Tensor" for name in ("mul", "div", "mul_", "div_"))
"""Ops whose derivative by the first operand reads the second (derivatives.yaml)."""

LARGEST_SCALAR = torch.complex128.itemsize
"""Bytes of the largest scalar."""


class _Token:
    """Stored in an autograd node's metadata: frees the scalar when the node is destroyed."""

    __slots__ = ("_entry", "_owner")

    def __init__(self, owner: SavedScalars, entry: Entry) -> None:
        """``entry``: the scalar's, in the ledger of ``owner``."""
        self._owner, self._entry = owner, entry

    def __del__(self) -> None:
        self._owner.free(self._entry)


class SavedScalars:
    """Records the scalars that autograd nodes save: freed when the node has run (unless the graph is retained) or is
    destroyed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._allocated: tuple[weakref.ref[torch.Tensor], Entry] | None = None
        """Result of the last op and its scalar, to attach to the result's autograd node once the node exists."""
        self._by_sequence: dict[int, Entry] = {}
        """Sequence number of an autograd node -> its scalar."""
        self._running_node: int | None = None
        """Sequence number of the running node, if its scalar is freed after it."""

    def save(self, name: str, args: tuple[Any, ...], result: Any, index: int) -> None:
        """Allocate the scalar operand of an op that has run, which the node of its result saves."""
        if name not in _OPS or isinstance(args[1], torch.Tensor) or self._ledger.real:
            return
        if _torch.is_view(result):  # reading its `grad_fn` in a dispatch can wait for a lock that autograd holds
            return
        self._allocated = weakref.ref(result), self._ledger.allocate_hidden(wrapped(args[1]).itemsize, index)

    def before_op(self, sequence: int | None) -> None:
        """Attach the last op's scalar to its node, and free the scalar of a node that has just run. Called before each
        op; ``sequence`` is that of the running node, None in forward."""
        if self._allocated is not None:
            self._attach(*self._allocated)
            self._allocated = None
        if self._running_node is not None and sequence != self._running_node:
            self.free(self._by_sequence.pop(self._running_node))
            self._running_node = None
        if sequence in self._by_sequence and not _torch.keeps_graph():
            self._running_node = sequence

    def without_saved(
        self, temporaries: Sequence[Temporary], name: str, args: tuple[Any, ...], sequence: int | None
    ) -> Sequence[Temporary]:
        """Return a backward op's temporaries without the scalar that its autograd node has saved.

        The formula of such an op (`semantics.cpu.scalar_operands`) counts a single temporary: the scalar.
        """
        is_saved = name in _OPS and sequence in self._by_sequence
        if not temporaries or not is_saved or isinstance(args[1], torch.Tensor):
            return temporaries
        return (Temporary(temporaries[0].bytes - wrapped(args[1]).itemsize),)

    def _attach(self, reference: weakref.ref[torch.Tensor], entry: Entry) -> None:
        """Let the result's autograd node own a scalar; free it if there is no such node."""
        result = reference()
        node: Any = None if result is None else result.grad_fn
        if node is None:
            self.free(entry)
            return
        node.metadata[self] = _Token(self, entry)
        self._by_sequence[_torch.node_sequence(node)] = entry

    def free(self, entry: Entry) -> None:
        """Free a scalar, unless it is freed already."""
        if entry.died is None:
            self._ledger.free(entry)
