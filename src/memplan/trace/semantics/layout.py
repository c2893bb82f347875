"""What the formulas of the kernels' temporaries share: bytes, copies, layouts, this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

Arguments = tuple[Any, ...]


@functools.cache
def simd() -> int:
    """Return the floats in a vector register: the channel block of oneDNN's layouts.

    16 was verified on AVX512 and 8 on AVX2; elsewhere (ARM, plain x86) they are what oneDNN documents. Where the one
    of ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` is set without the other, oneDNN's are not torch's.
    """
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


@functools.cache
def has_amx() -> bool:
    """Return whether oneDNN multiplies bfloat16 with tiles: brgemm kernels, which want channels last."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # in 2.13, not in 2.11
    return bool(capabilities.get("amx_bf16", False))


@functools.cache
def level_1_cache() -> int:
    """Return the bytes of the L1 cache of data, which oneDNN sizes its blocks by."""
    return int(getattr(torch.cpu, "get_capabilities", dict)().get("l1d_cache_size", 1 << 15))


@functools.cache
def level_2_cache() -> int:
    """Return the bytes of the L2 cache, which oneDNN sizes its buffers by."""
    return int(getattr(torch.cpu, "get_capabilities", dict)().get("l2_cache_size", 1 << 20))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def padded(n: int, block: int) -> int:
    """Return the next multiple of ``block``."""
    return -(-n // block) * block


def copied(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor.contiguous()``."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


_TRANSPOSED = 60
"""Rows and columns of the blocks that a kernel transposes at a time (120 of bytes)."""


def transposing(source: torch.Tensor) -> int:
    """Return the bytes of the block that a copy of a transposed matrix in row-major order goes through.

    Source: aten/src/ATen/native/Copy.cpp, `copy_transpose_valid` and `copy_same_type_transpose_`.
    """
    if source.dim() != 2 or source.stride(0) != 1 or source.stride(1) != source.shape[0]:
        return 0
    if source.numel() < _TRANSPOSED**2 or source.is_conj() or source.is_neg():
        return 0
    side = 2 * _TRANSPOSED if source.dtype is torch.uint8 else _TRANSPOSED
    return side**2 * source.element_size()


def like_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4 and ..._3d_s5."""
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
    """``Tensor::suggest_memory_format``."""
    return like_channels_last(tensor.shape, tensor.stride())


def in_own_format(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.contiguous(tensor.suggest_memory_format())``: itself, or a copy that is laid out in a format."""
    if not suggests_channels_last(tensor):
        return tensor.contiguous()
    return tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


def copied_to(tensor: torch.Tensor, last: bool) -> int:
    """Return the bytes of ``tensor.contiguous(memory_format)``, channels last or plain."""
    if not last:
        return copied(tensor)
    form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return 0 if tensor.is_contiguous(memory_format=form) else bytes_of(tensor)


def space(sizes: Sequence[int]) -> int:
    """Return the number of positions in the dimensions after batch and channel."""
    return prod(sizes[2:])


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1), key=lambda p: p[1]
    ):
        if stride != expected:
            return False
        expected *= size
    return True
