"""Describe tensors by shape, strides, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Like:
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this description."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        """Bytes of the memory that it spans."""
        return spanned_elements(self.shape, self.stride) * self.dtype.itemsize


def spanned_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans, from its first to its last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, without gaps and overlaps."""
    # torch.empty_like keeps the strides of such tensors only
    return tensor.layout == torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
