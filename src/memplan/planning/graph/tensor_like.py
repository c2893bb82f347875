"""Describe tensors by shape, strides, dtype and device."""

from __future__ import annotations

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
        last_element = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last_element + 1) * self.dtype.itemsize


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, without gaps and overlaps."""
    # torch.empty_like keeps the strides of such tensors only
    return tensor.layout == torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
