"""Buffers of oneDNN's convolutions, estimated without oneDNN's own choice of kernels.

oneDNN reorders the operands into its own layout and computes in one of three ways (x64/cpu_convolution_list.cpp):

- blocked: channels in blocks of a vector register, padded unless there are groups ("aBcd16b");
- channels last ("acdb"), for strided gradients and in AMX's tiles;
- by columns, an im2col and a GEMM, for shapes that no other kernel supports.

The choice and the scratchpad depend on the processor and on oneDNN's estimates of speed. The rules here compute the
sizes of the tensors in these layouts, and an upper bound of the scratchpad of all threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from memplan.trace.semantics.layout import padded, simd


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution as passed to oneDNN; a transposed convolution is the data gradient of this convolution."""

    batch: int
    wide: int
    """Channels of the convolution's input (of the output if transposed)."""
    narrow: int
    """Channels of the convolution's output (of the input if transposed)."""
    wide_space: tuple[int, ...]
    narrow_space: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """On the low side of each dimension."""
    dilated: bool
    itemsize: int
    tiled: bool = False
    """Whether AMX's tiles compute it, in bfloat16."""

    @property
    def strided(self) -> bool:
        """Whether any stride is larger than 1."""
        return prod(self.stride) > 1

    @property
    def padded_beyond(self) -> bool:
        """Whether a kernel position can lie completely in the padding, which vector kernels do not support."""
        sides = zip(self.padding, self.kernel, strict=True)
        return any(pad >= size for pad, size in sides if pad and (size == 1 or not self.dilated))

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups > 1 and self.groups == self.wide == self.narrow

    @property
    def small_depthwise(self) -> bool:
        """Whether the kernel for depthwise weight gradients supports it: up to 3x3, on images at least as high."""
        return self.depthwise and not self.dilated and max(self.kernel) <= 3 and self.wide_space[-2] >= self.kernel[-2]

    @property
    def volumetric(self) -> bool:
        """Whether it is a 3-d convolution."""
        return len(self.kernel) == 3

    @property
    def pointwise(self) -> bool:
        """Whether the 1x1 kernels support it: without padding; strided only for images whose size the stride
        divides."""
        if prod(self.kernel) != 1 or any(self.padding):
            return False
        divides = not self.volumetric and prod(self.narrow_space) * prod(self.stride) == prod(self.wide_space)
        return divides or not self.strided

    def wide_bytes(self, block: int = 1) -> int:
        """Return the bytes of the input, with channels padded to blocks."""
        return self.batch * padded(self.wide, block) * prod(self.wide_space) * self.itemsize

    def narrow_bytes(self, block: int = 1) -> int:
        """Return the bytes of the output, with channels padded to blocks."""
        return self.batch * padded(self.narrow, block) * prod(self.narrow_space) * self.itemsize

    def weight_bytes(self, wide_block: int = 1, narrow_block: int = 1) -> int:
        """Return the bytes of the weight, with channels padded to blocks."""
        channels = padded(self.wide // self.groups, wide_block) * padded(self.narrow, narrow_block)
        return channels * prod(self.kernel) * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of the buffers of one oneDNN call in its own layout."""

    source: int
    weight: int
    result: int
    scratch: int = 0
    channels_last: bool = False
    """Whether the layout is channels last."""
    other: int = 0
    """The second source, of a weight gradient."""


def forward(s: Shape) -> Work:
    """Return the buffers of a forward pass, depending on oneDNN's kernel for it."""
    block = simd()
    if s.tiled or (s.depthwise and s.volumetric and not s.dilated):
        return Work(s.wide_bytes(), s.weight_bytes(1, block), s.narrow_bytes(), channels_last=True)
    if _goes_by_columns(s, _least_block(), s.narrow_space[-1]):
        return Work(0, 0, s.narrow_bytes(), _columns(s))
    if s.depthwise:
        return Work(s.wide_bytes(block), s.weight_bytes(1, block), s.narrow_bytes(block))
    if s.groups > 1:
        return Work(s.wide_bytes(), s.weight_bytes(), s.narrow_bytes())
    if s.wide < block and not s.pointwise:  # ``is_1stconv``: reads a plain tensor
        return Work(0, s.weight_bytes(1, block), s.narrow_bytes(block))
    return Work(s.wide_bytes(block), s.weight_bytes(block, block), s.narrow_bytes(block), _unit_stride_copy(s))


def data_gradient(s: Shape) -> Work:
    """Return the buffers of a data gradient: the source is the gradient of the output (``narrow``), the result the
    gradient of the input (``wide``).

    Strided convolutions without dilation are computed channels last, except if the output channels of a group fit into
    a vector register.
    """
    block = simd()
    narrow_groups = s.groups > 1 and s.narrow // s.groups <= block
    if s.tiled or (s.strided and not narrow_groups and not s.dilated):
        # with a single channel or position, both formats are the same
        source = 0 if s.narrow == 1 or prod(s.narrow_space) == 1 else s.narrow_bytes()
        return Work(source, s.weight_bytes(block, 1), s.wide_bytes(), _padded_image(s), channels_last=s.wide > 1)
    unsupported = s.dilated and (s.strided or s.depthwise)
    if unsupported or _goes_by_columns(s, _least_block(), s.wide_space[-1]):
        return Work(0, 0, s.wide_bytes(), _columns(s))
    if s.depthwise:
        return Work(s.narrow_bytes(block), s.weight_bytes(1, block), s.wide_bytes(block))
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), s.wide_bytes())
    return Work(s.narrow_bytes(block), s.weight_bytes(block, block), s.wide_bytes(block))


def weight_gradient(s: Shape) -> Work:
    """Return the buffers of a weight gradient: the sources are the output's gradient and the input. Threads share the
    images of a batch, and each has its own partial sums."""
    block = simd()
    if s.depthwise:
        wide_padding = any(2 * padding > size for padding, size in zip(s.padding, s.kernel, strict=True))
        if s.volumetric or not s.small_depthwise or wide_padding:
            return Work(0, s.weight_bytes(), 0, _columns(s))
        return Work(s.narrow_bytes(block), s.weight_bytes(1, block), 0, other=s.wide_bytes(block))
    shallow = s.volumetric and s.padding[0] > 0 and s.kernel[0] >= s.wide_space[0] + s.padding[0]
    skips = s.dilated and (s.volumetric or s.strided)
    if shallow or skips or _goes_by_columns(s, 8, 1) or s.kernel[-1] > _LONGEST_OF_WEIGHT_GRADIENT:
        return Work(0, s.weight_bytes(), 0, _columns(s) + 4 * torch.get_num_threads() * s.weight_bytes())
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, _weight_sums(s, s.weight_bytes()), other=s.wide_bytes())
    reads_plain_input = s.wide <= 3 and not s.pointwise
    if 3 < s.wide < block and not s.pointwise:  # AVX-512's kernel refuses it, AVX2's runs
        block = 8
    weight = s.weight_bytes(1 if reads_plain_input else block, block)
    scratch = _weight_sums(s, weight) + _unit_stride_copy(s)
    return Work(s.narrow_bytes(block), weight, 0, scratch, other=0 if reads_plain_input else s.wide_bytes(block))


def channels_last_weight_gradient(s: Shape) -> Work:
    """Return the buffers of a weight gradient of channels-last tensors, which are read in place; the channels of every
    group are padded."""
    if s.groups == 1 or s.small_depthwise:
        work = weight_gradient(s)
        return Work(0, work.weight, 0, work.scratch)
    block = simd()
    channels = s.groups * padded(s.narrow // s.groups, block) * padded(s.wide // s.groups, block)
    return Work(0, channels * prod(s.kernel) * s.itemsize, 0)


def _goes_by_columns(s: Shape, group_block: int, row: int) -> bool:
    """Return whether only the im2col kernel supports a convolution.

    Args:
        s: the convolution.
        group_block: the other kernels need groups whose channels are a multiple of this.
        row: results in a row, for which the other kernels unroll their code; it must stay short.
    """
    unrolled = s.kernel[-1] * min(s.wide // s.groups, 16) * min(row, 28)
    if s.padded_beyond or (s.depthwise and s.volumetric) or unrolled > _MAX_UNROLLED:
        return True
    return s.groups > 1 and not s.depthwise and any(n // s.groups % group_block for n in (s.wide, s.narrow))


def _least_block() -> int:
    """Return the least channels of a group that the kernels of forward and data gradient support."""
    return 4 if simd() == 16 else 8


_MAX_UNROLLED = (256 << 10) // (3 * 15)
"""Most instructions of 15 bytes in a kernel's code for each of its three cases: both edges of a row, and the middle
(`init_conf` in src/cpu/x64/jit_avx512_common_conv_kernel.cpp). Approximate."""
_LONGEST_OF_WEIGHT_GRADIENT = 13
"""Width of a kernel above which a weight gradient is computed by columns."""


def _columns(s: Shape) -> int:
    """Return the bytes of im2col's columns: for each thread, those of an image or of a slice of a volume.

    oneDNN limits them to 15 times the tensors.
    """
    if s.pointwise and not s.strided:  # reads its input in place
        return 0
    columns = s.wide // s.groups * prod(s.kernel) * prod(s.narrow_space[-2:]) * s.itemsize
    limit = 15 * (s.wide_bytes() + s.narrow_bytes() + s.weight_bytes())
    return torch.get_num_threads() * min(columns, limit)


def _padded_image(s: Shape) -> int:
    """Return the bytes of an image of the output's gradient, padded for the kernel's reads, for each thread."""
    sizes = zip(s.narrow_space, s.kernel, s.stride, strict=True)
    positions = prod(length + (kernel - 1) // stride for length, kernel, stride in sizes)
    return torch.get_num_threads() * positions * s.narrow * s.itemsize


def _unit_stride_copy(s: Shape) -> int:
    """Return the bytes of a strided 1x1 convolution's input without skipped positions, for each thread."""
    if not (s.pointwise and s.strided):
        return 0
    return torch.get_num_threads() * padded(s.wide, simd()) * prod(s.narrow_space) * s.itemsize


def _weight_sums(s: Shape, weight: int) -> int:
    """Return the bytes of partial weight gradients of threads that share the images of a batch, for all threads but the
    first.

    Threads share channels instead if the weight is large compared to the tensors: oneDNN minimizes the bytes moved
    (`balance` in src/cpu/x64/jit_avx512_common_conv_kernel.cpp). The limit here is approximate. ``weight``: bytes of
    the weight in the kernel's layout.
    """
    if 5 * weight > min(s.wide_bytes() // prod(s.stride), s.narrow_bytes()):
        return 0
    return (min(torch.get_num_threads(), s.batch) - 1) * weight
