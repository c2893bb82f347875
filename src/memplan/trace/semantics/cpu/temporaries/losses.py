"""Temporaries of the CPU's losses (ATen/native/Loss.cpp): unreduced losses, and their means."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memplan.trace.semantics.cpu.scalar_operands import averaged, of_number
from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of

_NONE, _MEAN = 0, 1
"""Values of ``at::Reduction``."""


def reduced_loss(
    args: Arguments, kwargs: Keywords, result: Any, *, position: int, unreduced: int, copies_mean: bool = False
) -> int:
    """Bytes of temporaries of a loss that is computed unreduced and then reduced.

    Args:
        position: of the argument ``reduction``.
        unreduced: number of unreduced losses besides the storage of the result, which structured ops compute the
            unreduced loss into.
        copies_mean: whether the mean is a temporary that is copied to the result.
    """
    reduction = args[position] if len(args) > position else kwargs.get("reduction", _MEAN)
    if reduction == _NONE:
        return 0
    numel = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    division = averaged(numel, result.dtype) if reduction == _MEAN else 0
    return (unreduced * numel + copies_mean) * result.element_size() + division


def binary_cross_entropy_with_logits(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ATen/native/Loss.cpp): the log-sigmoid; if the loss is reduced, also the unreduced loss and
    the temporaries of `mean`."""
    x, reduction = args[0], args[4] if len(args) > 4 else kwargs.get("reduction", _MEAN)
    if reduction == _NONE:
        return bytes_of(x)
    return 2 * bytes_of(x) + (averaged(x.numel(), x.dtype) if reduction == _MEAN else 0)


def soft_margin_loss_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Loss.cpp, soft_margin_loss_backward_out): two tensors of the operand's size at first, later
    a single such tensor and a wrapped number."""
    size = bytes_of(result)
    return max(2 * size, size + of_number(1, result.dtype))


FORMULAS: dict[str, Formula] = {
    "aten.mse_loss.default": partial(reduced_loss, position=2, unreduced=1),
    "aten.smooth_l1_loss.default": partial(reduced_loss, position=2, unreduced=1),
    "aten.l1_loss.default": partial(reduced_loss, position=2, unreduced=2),
    "aten.huber_loss.default": partial(reduced_loss, position=2, unreduced=1),
    "aten.kl_div.default": partial(reduced_loss, position=2, unreduced=3),
    "aten.soft_margin_loss.default": partial(reduced_loss, position=2, unreduced=0, copies_mean=True),
    "aten.soft_margin_loss_backward.default": soft_margin_loss_backward,
    "aten.binary_cross_entropy.default": partial(reduced_loss, position=3, unreduced=0, copies_mean=True),
    "aten.binary_cross_entropy_with_logits.default": binary_cross_entropy_with_logits,
}
