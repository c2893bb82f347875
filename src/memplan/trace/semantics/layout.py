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
    """Return the number of float32 values in a vector register, which is the channel block of oneDNN's layouts.

    Verified: 16 on AVX512 and 8 on AVX2; elsewhere (ARM, plain x86) 8 is what oneDNN documents. If only one of
    ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` is set, oneDNN's block differs from torch's.
    """
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


@functools.cache
def has_amx() -> bool:
    """Return whether oneDNN multiplies bfloat16 in AMX tiles, by its brgemm kernels, which want channels last."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # in 2.13, not in 2.11
    return bool(capabilities.get("amx_bf16", False))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def padded(size: int, multiple: int) -> int:
    """Return ``size`` rounded up to a multiple of ``multiple``."""
    return ceil_div(size, multiple) * multiple


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def copy_bytes(tensor: torch.Tensor, channels_last: bool = False) -> int:
    """Return the bytes that ``tensor.contiguous()`` allocates, or its conversion to channels last: 0 if the tensor has
    that format already."""
    memory_format = channels_last_format(tensor) if channels_last else torch.contiguous_format
    return 0 if tensor.is_contiguous(memory_format=memory_format) else bytes_of(tensor)


def channels_last_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the channels-last format for a tensor of 4 or 5 dimensions."""
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def like_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are channels last (MemoryFormat.h, is_channels_last_strides_2d_s4 and ..._3d_s5)."""
    inner_to_outer = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(sizes))
    if inner_to_outer is None or strides[1] == 0:
        return False
    min_stride = 0
    for dim in inner_to_outer:
        if sizes[dim] == 0 or strides[dim] < min_stride:
            return False
        # torch counts as contiguous what fits both formats: shapes (N, 1, 1, 1)
        if dim == 0 and min_stride == strides[1]:
            return False
        min_stride = strides[dim] * max(sizes[dim], 1)
    return True


def suggests_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether ``Tensor::suggest_memory_format`` is channels last."""
    return like_channels_last(tensor.shape, tensor.stride())


def in_own_format(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.contiguous(memory_format=tensor.suggest_memory_format())``: the tensor itself, or a copy."""
    channels_last = suggests_channels_last(tensor)
    return tensor.contiguous(memory_format=channels_last_format(tensor) if channels_last else torch.contiguous_format)


def space(sizes: Sequence[int]) -> int:
    """Return the number of positions in the spatial dimensions of (batch, channels, *spatial) sizes."""
    return prod(sizes[2:])


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps or overlaps (non-overlapping and dense)."""
    dims = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    expected_stride = 1
    for stride, size in sorted(dims):
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True
