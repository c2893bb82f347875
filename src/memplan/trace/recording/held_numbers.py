"""Numbers that a derivative needs: of `x * 2.0`, autograd keeps the tensor that torch made of the number.

Under a dispatch mode an op is given the number itself, so that no tensor shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Entry, Ledger
from memplan.trace.semantics.cpu.scalar_operands import wrapped
from memplan.trace.semantics.kinds import Extra

_OPS = frozenset(f"aten.{name}.Tensor" for name in ("mul", "div", "mul_", "div_"))
"""Ops whose derivative by the first operand reads the second (derivatives.yaml)."""

LARGEST_NUMBER = torch.complex128.itemsize
"""Bytes that a number takes at most."""


class _Token:
    """What a node of autograd holds, to be told when it is gone."""

    __slots__ = ("_entry", "_owner")

    def __init__(self, owner: HeldNumbers, entry: Entry) -> None:
        self._owner, self._entry = owner, entry

    def __del__(self) -> None:
        self._owner.end(self._entry)


class HeldNumbers:
    """Ends each number when its node has run, unless the graph is kept, or is gone."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._new: tuple[weakref.ref[torch.Tensor], Entry] | None = None
        self._by_sequence: dict[int, Entry] = {}
        self._running: int | None = None

    def made(self, name: str, args: tuple[Any, ...], result: Any, index: int) -> None:
        """Note the number among the operands of an op that has run: the result's node will keep it."""
        if name not in _OPS or isinstance(args[1], torch.Tensor) or self._ledger.real:
            return
        if _torch.is_view(result):  # its node may be made while an op is dispatched, under a lock that asking waits for
            return
        self._new = weakref.ref(result), self._ledger.hidden(wrapped(args[1]).itemsize, index)

    def reached(self, sequence: int | None) -> None:
        """Note which node's op comes next, None outside of a backward pass. Before it, what its results are."""
        if self._new is not None:
            self._find_node(*self._new)
            self._new = None
        if self._running is not None and sequence != self._running:
            self.end(self._by_sequence.pop(self._running))
            self._running = None
        if sequence in self._by_sequence and not _torch.keeps_graph():
            self._running = sequence

    def without(
        self, extras: Sequence[Extra], name: str, args: tuple[Any, ...], sequence: int | None
    ) -> Sequence[Extra]:
        """Return the workspaces of a backward op without the scalar that the node of its derivative holds already.

        The formula of such an op (`semantics.cpu.scalar_operands`) counts one workspace: that scalar. A table without
        that formula has none to leave out.
        """
        if not extras or name not in _OPS or isinstance(args[1], torch.Tensor) or sequence not in self._by_sequence:
            return extras
        return (Extra(extras[0].bytes - wrapped(args[1]).itemsize),)

    def _find_node(self, reference: weakref.ref[torch.Tensor], entry: Entry) -> None:
        result = reference()
        node: Any = None if result is None else result.grad_fn
        if node is None:
            self.end(entry)
            return
        node.metadata[self] = _Token(self, entry)
        self._by_sequence[_torch.node_sequence(node)] = entry

    def end(self, entry: Entry) -> None:
        """Free a number, if it is still there."""
        if entry.died is None:
            self._ledger.end(entry)
