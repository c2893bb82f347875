"""The fused call that stands for attention that was written out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F  # torch's own name for it


@dataclass(slots=True)
class Pending:
    """Scores that were not computed: of what, and what was done to them since.

    ``heads`` are queries (..., queries, head) and keys (..., keys, head), ``shape`` is that of the scores.
    """

    heads: list[torch.Tensor]
    shape: tuple[int, ...]
    masks: list[tuple[Literal["add", "keep", "drop"], torch.Tensor, tuple[int, ...]]] = field(default_factory=list)
    dropout: float = 0.0
    normalized: bool = False
    """Whether the softmax was taken."""
    spoiled: bool = False
    """Whether something was done to them that no fused call does."""

    def masked(self, kind: Literal["add", "keep", "drop"], mask: torch.Tensor, shape: Sequence[int]) -> None:
        """Note a mask and the shape of the scores that it met: added, or bools of those to keep or to drop."""
        self.spoiled |= self.normalized
        self.masks.append((kind, mask, tuple(shape)))

    def let_go(self) -> None:
        """Hold no tensor any longer."""
        self.heads.clear()
        self.masks.clear()


@dataclass(frozen=True, slots=True)
class Call:
    """``scaled_dot_product_attention`` of tensors (batch, heads, rows, size) each, and the shape of what is wanted."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    shape: tuple[int, ...]

    def run(self) -> torch.Tensor:
        """Call it."""
        heads = self.query, self.key, self.value
        return F.scaled_dot_product_attention(*heads, self.mask, self.dropout).reshape(self.shape)

    def against_cpu(self) -> Iterator[str]:
        """Yield why the CPU's fused kernel does not take it: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp."""
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
    """Return the call for scores that were put off; ``values`` are (..., keys, size)."""
    lead, rows = pending.shape[:-2], pending.shape[-2]
    query, key, value = (_of_four(tensor, lead) for tensor in (*pending.heads, values))
    masks = [_additive_or_bool(kind, _of_scores(mask, shape, pending.shape)) for kind, mask, shape in pending.masks]
    return Call(query, key, value, _combined(masks), pending.dropout, (*lead, rows, values.shape[-1]))


def _of_four(tensor: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """Return a tensor as (batch, heads, rows, size): a view, wherever the leading dimensions can be one."""
    whole = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) == 1:
        return whole.unsqueeze(0)
    return whole if len(lead) == 2 else whole.reshape(-1, lead[-1], *tensor.shape[-2:])


def _of_scores(mask: torch.Tensor, met: tuple[int, ...], scores: tuple[int, ...]) -> torch.Tensor:
    """Return a mask for scores of (batch, heads, queries, keys), that it met in some other shape."""
    lead = (1, *scores[:1]) if len(scores) == 3 else (math.prod(scores[:-3]), scores[-3])
    if met != scores or len(scores) > 4:
        return mask.expand(met).reshape(*lead, *scores[-2:])
    return mask if mask.dim() == 2 else mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)


def _additive_or_bool(kind: str, mask: torch.Tensor) -> torch.Tensor:
    if kind == "add":
        return mask
    return mask.logical_not() if kind == "drop" else mask


def _combined(masks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    found: torch.Tensor | None = None
    for mask in masks:
        if found is None:
            found = mask
        elif found.dtype is torch.bool and mask.dtype is torch.bool:
            found = found & mask
        elif mask.dtype is torch.bool:
            found = found.masked_fill(mask.logical_not(), -math.inf)
        elif found.dtype is torch.bool:
            found = mask.masked_fill(found.logical_not(), -math.inf)
        else:
            found = found + mask
    return found
