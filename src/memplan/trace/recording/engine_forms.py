"""Recognizes ops that torch runs in place without a dispatch mode: in autograd's engine and in linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger, Note
from memplan.trace.semantics.layout import is_dense

_ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default"})
_NEGATED = "aten.neg.default"
_MAX_OPS_BETWEEN = 3
"""Most ops (on indices) between a derivative formula's allocation of zeros and its write into them."""


class EngineForms:
    """Recognizes ops that run in place without a dispatch mode, so that a recording counts no new tensor."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffered_use_counts: tuple[int, int] | None = None
        """Use counts (see `_torch.use_counts`) of a gradient that only the engine's buffer references."""
        self._in_linear = False
        """Whether `torch.nn.functional.linear` is running."""
        self.use_counts: list[tuple[int, int]] | None = None
        """While `calibrate` runs: use counts of the left operands of additions in the backward pass; else None."""

    def set_in_linear(self, inside: bool) -> None:
        """Set whether `torch.nn.functional.linear` is running."""
        self._in_linear = inside

    def writes_fresh_zeros(self, target: Any, notes: Sequence[Note]) -> bool:
        """Return whether a derivative formula writes into zeros that it has just allocated.

        The write is in place, but under a dispatch mode the formula calls the functional op, which allocates another
        tensor (torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`).
        """
        if not _torch.in_backward() or torch.is_grad_enabled() or not notes:
            return False
        entry = self._ledger.find(target)
        if entry is None or entry.op is None or notes[entry.op].name not in _ZEROS:
            return False
        later = notes[entry.op + 1 :]  # ops since: a formula runs few between, and none that reads the zeros
        if len(later) > _MAX_OPS_BETWEEN or any(entry.id == storage for note in later for _, storage in note.reads):
            return False
        return _torch.called_by_engine()

    def in_place_variant(self, op: Any, args: tuple[Any, ...], notes: Sequence[Note]) -> Any:
        """Return the in-place variant of an op if a derivative formula applies it to its own temporary, or None."""
        in_place, nodes = _torch.IN_PLACE_IN_FORMULAS.get(op, (None, ()))
        if in_place is None or not _torch.in_backward() or torch.is_grad_enabled():
            return None
        node = _torch.backward_node()
        if node is None or node.name() not in nodes:
            return None
        entry = self._ledger.find(args[0])
        if entry is None or entry.op is None or not self._is_result_of(node, args[0], notes):
            return None
        # the gradient of a loss's targets is negated, then multiplied out of place, with or without a mode
        return in_place if notes[entry.op].name != _NEGATED and _torch.called_by_engine() else None

    def calibrate(self) -> None:
        """Measure the use counts of a gradient that only the engine's buffer references, under the dispatch mode.

        `y` gets two gradients here, which the engine adds; while `use_counts` is a list, the observer's dispatch
        appends the counts of the buffered gradient. `is_in_place` compares with these counts, by which alone such a
        gradient can be recognized.
        """
        self.use_counts = []
        x = torch.ones((), requires_grad=True)
        y = x * 2
        (y * y).backward()  # few ops: each recording runs them
        self._buffered_use_counts = self.use_counts[0] if self.use_counts else None
        self.use_counts = None

    def is_in_place(self, args: tuple[Any, ...], notes: Sequence[Note]) -> bool:
        """Return whether an addition is in place in a real run: to a gradient in the engine's buffer, or of a linear
        layer's bias.

        The engine accumulates in place if nothing else references the buffered gradient
        (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`), but never under a dispatch mode.
        """
        if self._in_linear:
            return isinstance(args[1], torch.Tensor) and args[1].shape == args[0].shape[-1:]
        if self._buffered_use_counts is None or not _torch.in_backward() or torch.is_grad_enabled():
            return False
        gradient, other = args[0], args[1]
        if not isinstance(other, torch.Tensor) or gradient.shape != other.shape or gradient.dtype != other.dtype:
            return False
        if _torch.is_sparse(gradient):  # it has no storage of its own
            return False
        if _torch.use_counts(gradient) != self._buffered_use_counts or not is_dense(gradient):
            return False
        node = _torch.backward_node()  # the node that ran last
        by_node = node is not None and self._is_result_of(node, gradient, notes)
        if _torch.is_sparse(other):
            # a buffered sparse gradient is added to a new dense one; the reverse allocates (input_buffer.cpp)
            return by_node and _torch.called_by_engine()
        if by_node and not _torch.sends_two_gradients(node):
            return False  # an addition within the formula
        return _torch.called_by_engine()

    def _is_result_of(self, node: Any, tensor: torch.Tensor, notes: Sequence[Note]) -> bool:
        """Return whether an op of an autograd node allocated a tensor."""
        entry = self._ledger.find(tensor)
        return entry is not None and entry.op is not None and notes[entry.op].sequence == _torch.node_sequence(node)
