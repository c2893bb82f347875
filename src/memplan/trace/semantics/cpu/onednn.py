"""A convolution as oneDNN sees it, and its kernel that takes every shape: an im2col and a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from memplan.trace.semantics.layout import padded, simd

MOST_WIDE_BLOCKS = 9
"""Of the input's channels, that the weight's gradient of a 1x1 kernel takes at a time, roughly (``bcast_blocking``)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution as oneDNN sees it: a transposed one is the data gradient of this one."""

    batch: int
    wide: int
    """Channels of the convolution's input (the output, where transposed)."""
    narrow: int
    """Channels of its output."""
    wide_space: tuple[int, ...]
    narrow_space: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    steps: int
    """The strides' product."""
    padding: tuple[int, ...]
    """On one side, of each dimension."""
    dilated: bool
    itemsize: int
    bf16: bool
    low: bool
    """Every row of the output meets padding, or columns are skipped: kernels for a depthwise weight's gradient do not
    take it."""

    @property
    def strided(self) -> bool:
        """Return whether it skips positions."""
        return self.steps > 1

    @property
    def depthwise(self) -> bool:
        """Return whether every channel stays by itself."""
        return self.groups > 1 and self.groups == self.wide == self.narrow

    @property
    def volumetric(self) -> bool:
        """Return whether it is a 3-d convolution."""
        return len(self.kernel) == 3

    @property
    def pointwise(self) -> bool:
        """Return whether it is a matrix product over the channels."""
        return prod(self.kernel) == 1 and not any(self.padding)

    @property
    def simple(self) -> bool:
        """Return whether the kernels for 1x1 take it: unpadded, of images also strided ones whose size the stride
        divides."""
        divided = not self.volumetric and prod(self.narrow_space) * self.steps == prod(self.wide_space)
        return self.pointwise and (not self.strided or divided)

    def wide_bytes(self, block: int = 1) -> int:
        """Return the bytes of the input, its channels in blocks."""
        return self.batch * padded(self.wide, block) * prod(self.wide_space) * self.itemsize

    def narrow_bytes(self, block: int = 1) -> int:
        """Return the bytes of the output, its channels in blocks."""
        return self.batch * padded(self.narrow, block) * prod(self.narrow_space) * self.itemsize

    def weight_bytes(self, wide_block: int = 1, narrow_block: int = 1) -> int:
        """Return the bytes of the weight, its channels in blocks."""
        channels = padded(self.wide // self.groups, wide_block) * padded(self.narrow, narrow_block)
        return channels * prod(self.kernel) * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """What one oneDNN call holds in its own layout. ``last``: it works on channels last."""

    source: int
    weight: int
    result: int
    scratch: int = 0
    last: bool = False
    other: int = 0
    """The second source, of a weight gradient."""


def group_block(s: Shape) -> int:
    """Block of a grouped convolution whose channels can't be padded; 1: no kernel takes it. 4 are AVX-512's alone."""
    for block in (16, 8, 4) if simd() == 16 else (8,):
        if not (s.wide // s.groups) % block and not (s.narrow // s.groups) % block:
            return block
    return 1


def image_scratch(s: Shape, space: Sequence[int], channels: int, halo: bool) -> int:
    """Return a padded image a thread and the accumulators (brgemm's ``inp_buffer``)."""
    extra = [(k - 1) // 2 if halo else 0 for k in s.kernel]
    area = prod(n + e for n, e in zip(space, extra, strict=True))
    return torch.get_num_threads() * (area * channels * s.itemsize + 24_576)


def to_unit_stride(s: Shape, channels: int) -> int:
    """Return an image a thread of a strided 1x1 convolution's input, without what is skipped (``rtus``)."""
    return torch.get_num_threads() * channels * prod(s.narrow_space) * s.itemsize


def divided(blocks: int, most: int) -> int:
    """Return the blocks of channels that a 1x1 kernel takes at a time: halved, or else a third, down to so many."""
    while blocks > most and (blocks % 2 == 0 or blocks % 3 == 0):
        blocks //= 2 if blocks % 2 == 0 else 3
    return blocks


def weight_gradient_to_unit_stride(s: Shape, block: int) -> int:
    """`to_unit_stride` in the weight's gradient, which takes some of the input's blocks at a time; 0 where none needs
    it."""
    if not (s.simple and s.strided):
        return 0
    return to_unit_stride(s, divided(-(-s.wide // block), MOST_WIDE_BLOCKS) * block)


def _columns(s: Shape) -> int:
    """Return an im2col of one group of one image; a slice of a volume at a time."""
    if s.pointwise and not s.strided:
        return 0
    columns = s.wide // s.groups * prod(s.kernel) * prod(s.narrow_space) * s.itemsize
    return columns // s.narrow_space[0] if s.volumetric else columns


def plain(s: Shape, result: int, cap: int | None = None) -> Work:
    """x64:gemm (gemm_convolution_utils.cpp): columns for each thread; ``cap`` bounds those of images in a forward."""
    columns = _columns(s)
    return Work(0, 0, result, torch.get_num_threads() * (min(columns, cap) if cap and not s.volumetric else columns))


def plain_weight_gradient(s: Shape, last: bool = False) -> Work:
    """x64:gemm: one image at a time, or, where an image is too small to be shared, one for each thread; an image in
    channels last is turned round first."""
    threads = torch.get_num_threads()
    positions = prod(s.narrow_space) // (s.narrow_space[0] if s.volumetric else 1)
    outer = positions // threads < 256 and (s.batch != 1 or s.groups > 2)
    weight = s.weight_bytes()
    turned = s.wide_bytes() // s.batch if last else 0
    return Work(0, weight, 0, (threads if outer else 1) * (_columns(s) + 4 * weight + turned))
