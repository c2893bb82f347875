"""Ops that torch runs in another form under a dispatch mode than without one: autograd's engine, and a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger, Note
from memplan.trace.semantics.layout import is_dense

_ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default"})
_NEGATED = "aten.neg.default"
_SOON = 3
"""Ops that may lie between zeros and what a derivative formula writes into them (the indices, say)."""


class EngineForms:
    """Recognizes the ops that the engine would run in place if nothing watched it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last_reference: tuple[int, int] | None = None
        self._linear = False
        self.calibrating: list[tuple[int, int]] | None = None

    def in_linear(self, inside: bool) -> None:
        """Note that a linear layer begins or ends."""
        self._linear = inside

    def is_on_zeros(self, target: Any, notes: Sequence[Note]) -> bool:
        """Return whether a derivative formula writes into zeros that it has just made.

        Without a dispatch mode it does so in place; under one it takes the functional form, which makes another tensor
        (torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`).
        """
        if not _torch.in_backward() or torch.is_grad_enabled() or not notes:
            return False
        entry = self._ledger.find(target)
        if entry is None or entry.op is None or notes[entry.op].name not in _ZEROS:
            return False
        since = notes[entry.op + 1 :]
        if len(since) > _SOON or any(entry.id == read for note in since for _, read in note.reads):
            return False
        return _torch.called_by_engine()

    def in_formula(self, op: Any, args: tuple[Any, ...], notes: Sequence[Note]) -> Any:
        """Return the form of an op in which a derivative formula changes in place what it has made; None for others."""
        form, nodes = _torch.IN_PLACE_IN_FORMULAS.get(op, (None, ()))
        if form is None or not _torch.in_backward() or torch.is_grad_enabled():
            return None
        node = _torch.backward_node()
        if node is None or node.name() not in nodes:
            return None
        entry = self._ledger.find(args[0])
        if entry is None or entry.op is None or not self._made_by(node, args[0], notes):
            return None
        # the gradient of the targets of a loss is negated, then multiplied into another tensor, with or without a mode
        return form if notes[entry.op].name != _NEGATED and _torch.called_by_engine() else None

    def calibrate(self) -> None:
        """Learn how often a tensor is referenced that only the engine's buffer holds. Call it under the mode."""
        self.calibrating = []
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        (y.sigmoid() + y.tanh()).sum().backward()
        self._last_reference = self.calibrating[0] if self.calibrating else None
        self.calibrating = None

    def is_in_place(self, args: tuple[Any, ...], notes: Sequence[Note]) -> bool:
        """Return whether the engine adds a second gradient to one that nobody else holds, or a linear layer its bias.

        Without a dispatch mode it does so in place (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`);
        under one it cannot, so we do, lest every sum of two gradients count a storage too many.
        """
        if self._linear:
            return isinstance(args[1], torch.Tensor) and args[1].shape == args[0].shape[-1:]
        if self._last_reference is None or not _torch.in_backward() or torch.is_grad_enabled():
            return False
        held, other = args[0], args[1]
        if not isinstance(other, torch.Tensor) or held.shape != other.shape or held.dtype != other.dtype:
            return False
        if _torch.is_sparse(held) or _torch.use_counts(held) != self._last_reference or not is_dense(held):
            return False
        if _torch.is_sparse(other):
            return self._adds_sparse_one(held, notes)
        node = _torch.backward_node()  # the one that ran last
        if node is not None and self._made_by(node, held, notes) and not _torch.gives_twice(node):
            return False  # a sum of the formula's own
        return _torch.called_by_engine()

    def _adds_sparse_one(self, held: torch.Tensor, notes: Sequence[Note]) -> bool:
        """Return whether the engine adds a sparse gradient that it has to a dense one that has just come. The other way
        round it makes a third (input_buffer.cpp, `accumulate`)."""
        node = _torch.backward_node()
        return node is not None and self._made_by(node, held, notes) and _torch.called_by_engine()

    def _made_by(self, node: Any, tensor: torch.Tensor, notes: Sequence[Note]) -> bool:
        """Return whether a node of autograd has made a tensor."""
        entry = self._ledger.find(tensor)
        return entry is not None and entry.op is not None and notes[entry.op].sequence == _torch.node_sequence(node)
