"""Helpers for the formulas of kernels' temporaries: sizes in bytes, copies, memory formats, properties of this CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

Arguments = tuple[Any, ...]


@functools.cache
def simd() -> int:
    """Return the floats in a vector register, which is the channel block of oneDNN's layouts.

    Verified: 16 on AVX512 and 8 on AVX2; elsewhere (ARM, plain x86) 8 is what oneDNN documents. If only one of
    ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` is set, oneDNN's block differs from torch's.
    """
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


@functools.cache
def has_amx() -> bool:
    """Return whether oneDNN multiplies bfloat16 in AMX tiles: its brgemm kernels, which want channels last."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # in 2.13, not in 2.11
    return bool(capabilities.get("amx_bf16", False))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def padded(n: int, block: int) -> int:
    """Return `n` rounded up to a multiple of ``block``."""
    return -(-n // block) * block


def copied(tensor: torch.Tensor) -> int:
    """Return the bytes that ``tensor.contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


def like_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are channels last (MemoryFormat.h, is_channels_last_strides_2d_s4 and ..._3d_s5)."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(sizes))
    if order is None or strides[1] == 0:
        return False
    least = 0
    for d in order:
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(sizes[d], 1)
    return True


def suggests_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether ``Tensor::suggest_memory_format`` is channels last."""
    return like_channels_last(tensor.shape, tensor.stride())


def in_own_format(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.contiguous(memory_format=tensor.suggest_memory_format())``: the tensor itself, or a copy."""
    if not suggests_channels_last(tensor):
        return tensor.contiguous()
    return tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


def copied_to(tensor: torch.Tensor, last: bool) -> int:
    """Return the bytes that ``tensor.contiguous(memory_format=...)`` allocates, for channels last if ``last``."""
    if not last:
        return copied(tensor)
    form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return 0 if tensor.is_contiguous(memory_format=form) else bytes_of(tensor)


def space(sizes: Sequence[int]) -> int:
    """Return the number of positions in the spatial dimensions, those after batch and channel."""
    return prod(sizes[2:])


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps or overlaps (non-overlapping and dense)."""
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1), key=lambda p: p[1]
    ):
        if stride != expected:
            return False
        expected *= size
    return True
