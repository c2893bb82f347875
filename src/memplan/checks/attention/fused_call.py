"""The `scaled_dot_product_attention` call that replaces attention that is written out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F  # torch's own name for it


@dataclass(slots=True)
class Pending:
    """Scores that are not computed: their operands, and the ops on them so far.

    ``heads`` are queries (..., queries, head) and keys (..., keys, head), ``shape`` is that of the scores.
    """

    heads: list[torch.Tensor]
    shape: tuple[int, ...]
    masks: list[tuple[Literal["add", "keep", "drop"], torch.Tensor, tuple[int, ...]]] = field(default_factory=list)
    dropout: float = 0.0
    normalized: bool = False
    """Whether the softmax has run."""
    unsupported: bool = False
    """Whether an op was applied that no fused call does."""

    def add_mask(self, kind: Literal["add", "keep", "drop"], mask: torch.Tensor, shape: Sequence[int]) -> None:
        """Append a mask: a summand, or bools of the scores to keep or to drop. ``shape`` is that of the scores when the
        mask is applied."""
        self.unsupported |= self.normalized  # a fused call masks before the softmax
        self.masks.append((kind, mask, tuple(shape)))

    def release(self) -> None:
        """Drop the references to all tensors."""
        self.heads.clear()
        self.masks.clear()


@dataclass(frozen=True, slots=True)
class Call:
    """``scaled_dot_product_attention`` of tensors (batch, heads, rows, size); ``shape`` is that of its result."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    shape: tuple[int, ...]

    def run(self) -> torch.Tensor:
        """Return the result of the call."""
        heads = self.query, self.key, self.value
        return F.scaled_dot_product_attention(*heads, self.mask, self.dropout).reshape(self.shape)

    def cpu_refusals(self) -> Iterator[str]:
        """Yield why the CPU's fused kernel refuses it (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp)."""
        if self.dropout > 0:
            yield "dropout, which the CPU's fused kernel does not take (those of CUDA do)"
        if self.mask is not None and self.mask.requires_grad:
            yield "a bias that gets a gradient, which the CPU's fused kernel does not give"
        sizes = sorted({tensor.shape[-1] for tensor in (self.query, self.key, self.value)})
        if len(sizes) > 1:
            yield f"heads of unequal sizes ({', '.join(map(str, sizes))})"
        if any(tensor.stride(-1) != 1 for tensor in (self.query, self.key, self.value)):
            yield "heads whose elements are not contiguous"


def call_of(pending: Pending, values: torch.Tensor) -> Call:
    """Return the call that computes these scores, masks, dropout and the product with values (..., keys, size)."""
    lead, rows = pending.shape[:-2], pending.shape[-2]
    query, key, value = (_as_4d(tensor, lead) for tensor in (*pending.heads, values))
    masks: list[torch.Tensor] = []
    for kind, mask, shape in pending.masks:
        mask = _mask_as_4d(mask, shape, pending.shape)
        masks.append(mask.logical_not() if kind == "drop" else mask)
    return Call(query, key, value, _combined(masks), pending.dropout, (*lead, rows, values.shape[-1]))


def _as_4d(tensor: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """Return a tensor as (batch, heads, rows, size), as a view if the leading dimensions allow it."""
    expanded = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) == 1:
        return expanded.unsqueeze(0)
    return expanded if len(lead) == 2 else expanded.reshape(-1, lead[-1], *tensor.shape[-2:])


def _mask_as_4d(mask: torch.Tensor, shape: tuple[int, ...], scores: tuple[int, ...]) -> torch.Tensor:
    """Return a mask that broadcasts against (batch, heads, queries, keys). The mask broadcasts against ``shape``, that
    of the scores when it was applied, after views; ``scores`` is their shape when they were computed: (..., heads,
    queries, keys)."""
    if shape != scores or len(scores) > 4:
        batch, heads = math.prod(scores[:-3]), scores[-3]  # the product of no sizes is 1
        return mask.expand(shape).reshape(batch, heads, *scores[-2:])
    return mask if mask.dim() == 2 else mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)


def _combined(masks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a single mask for several; None for none. Masks are summands of the scores, or bools of scores to keep."""
    combined: torch.Tensor | None = None
    for mask in masks:
        if combined is None:
            combined = mask
        elif combined.dtype is torch.bool and mask.dtype is torch.bool:
            combined = combined & mask
        elif mask.dtype is torch.bool:
            combined = combined.masked_fill(mask.logical_not(), -math.inf)
        elif combined.dtype is torch.bool:
            combined = mask.masked_fill(combined.logical_not(), -math.inf)
        else:
            combined = combined + mask
    return combined
