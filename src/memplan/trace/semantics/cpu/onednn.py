"""A convolution as oneDNN sees it, the buffers of one call, and the scratchpads that its kernels share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from memplan.trace.semantics.layout import padded, simd

MOST_WIDE_BLOCKS = 9
"""Approximate blocks of input channels that a 1x1 kernel's weight gradient processes at a time (``bcast_blocking``)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution as oneDNN sees it; a transposed one is the data gradient of this convolution."""

    batch: int
    wide: int
    """Channels of the convolution's input (of the output if transposed)."""
    narrow: int
    """Channels of its output."""
    wide_space: tuple[int, ...]
    narrow_space: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """On the low side of each dimension."""
    dilated: bool
    itemsize: int
    bf16: bool
    """Whether it is in 16 bits: bfloat16 or float16."""
    tiled: bool = False
    """Whether AMX's tiles multiply it, in bfloat16."""

    @property
    def steps(self) -> int:
        """Return the product of the strides."""
        return prod(self.stride)

    @property
    def strided(self) -> bool:
        """Return whether any stride is larger than 1."""
        return self.steps > 1

    @property
    def uneven(self) -> bool:
        """Return whether the stride does not divide the width of the input."""
        return self.wide_space[-1] % self.stride[-1] > 0

    @property
    def padded_beyond(self) -> bool:
        """Return whether the kernel lies completely in the padding somewhere, which vector kernels do not support."""
        sides = zip(self.padding, self.kernel, strict=True)
        return any(pad >= size for pad, size in sides if pad and (size == 1 or not self.dilated))

    @property
    def padded_by_half(self) -> bool:
        """Return whether the height is padded by at most half of the kernel's, or the kernel is dilated."""
        return self.dilated or self.padding[-2] <= self.kernel[-2] // 2

    @property
    def low(self) -> bool:
        """Return whether every row of the output overlaps padding, or columns are skipped: the depthwise
        weight-gradient kernels do not support it. Measured."""
        step, pad, rows = self.stride[-2], self.padding[-2], self.wide_space[-2] - self.kernel[-2]
        starts = range(-pad, self.narrow_space[-2] * step - pad, step)
        return self.stride[-1] > self.kernel[-1] or not any(0 <= start <= rows for start in starts)

    @property
    def depthwise(self) -> bool:
        """Return whether each channel is convolved by itself."""
        return self.groups > 1 and self.groups == self.wide == self.narrow

    @property
    def volumetric(self) -> bool:
        """Return whether it is a 3-d convolution."""
        return len(self.kernel) == 3

    @property
    def pointwise(self) -> bool:
        """Return whether it is a matrix product over the channels: a 1x1 kernel without padding."""
        return prod(self.kernel) == 1 and not any(self.padding)

    @property
    def simple(self) -> bool:
        """Return whether the 1x1 kernels support it: without padding, and for images also strided if the stride divides
        the size."""
        divided = not self.volumetric and prod(self.narrow_space) * self.steps == prod(self.wide_space)
        return self.pointwise and (not self.strided or divided)

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
    """Bytes of the buffers of one oneDNN call in its own layout. ``last``: whether that is channels last."""

    source: int
    weight: int
    result: int
    scratch: int = 0
    last: bool = False
    other: int = 0
    """The second source, of a weight gradient."""
    as_plain: bool = False
    """Whether the channels-last result has the bytes of a plain tensor in the same order, which saves a copy."""
    by_columns: bool = False
    """Whether it is an im2col and a GEMM, which do not pad channels."""


def group_block(s: Shape) -> int:
    """Return the channel block of a grouped convolution, which cannot pad; 1 if no kernel supports it. 4 is only
    AVX-512's."""
    for block in (16, 8, 4) if simd() == 16 else (8,):
        if not (s.wide // s.groups) % block and not (s.narrow // s.groups) % block:
            return block
    return 1


def image_scratch(s: Shape, space: Sequence[int], channels: int, halo: bool) -> int:
    """Return the bytes of a padded image and the accumulators per thread (brgemm's ``inp_buffer``)."""
    extra = [(k - 1) // 2 if halo else 0 for k in s.kernel]
    area = prod(n + e for n, e in zip(space, extra, strict=True))
    return torch.get_num_threads() * (area * channels * s.itemsize + 24_576)


ALIGNED = 128
"""Bytes added to each oneDNN buffer to align it (memory_tracking.hpp, ``minimal_alignment``)."""
PAGE = 4096
"""Bytes."""
_BATCH_ELEMENT = 40
"""Bytes of ``brgemm_batch_element_t``."""


def booked(*sizes: int, aligned: int = ALIGNED) -> int:
    """Return the bytes of a scratchpad with these buffers, each with room to align it; empty buffers take nothing."""
    return sum(size + aligned for size in sizes if size)


def batch_pointers(taps: int) -> int:
    """Return the bytes of a thread's brgemm batch, one element per kernel position, in whole pages."""
    return padded(padded(taps * _BATCH_ELEMENT, PAGE), _BATCH_ELEMENT)


def in_channels_last(s: Shape) -> int:
    """Return the scratchpad of brgemm's convolution on channels last: a forward, or a data gradient of unit stride.

    Source: src/cpu/x64/jit_brgemm_conv_utils.cpp, `init_scratchpad`.
    """
    return booked(torch.get_num_threads() * batch_pointers(prod(s.kernel)), aligned=PAGE)


def reached(s: Shape) -> tuple[int, ...]:
    """Return the spatial sizes of the output's gradient, padded by what the kernel reads beyond it."""
    dimensions = zip(s.narrow_space, s.wide_space, s.kernel, s.stride, s.padding, strict=True)
    return tuple(
        narrow + max(0, k - 1 - pad) // step + max(0, k - 1 - ((narrow - 1) * step + k - wide - pad)) // step
        for narrow, wide, k, step, pad in dimensions
    )


def unrolled_in_avx512(s: Shape) -> bool:
    """Return whether AVX-512's kernel without brgemm supports a data gradient: its code, unrolled over a row, must fit.

    Source: src/cpu/x64/jit_avx512_common_conv_kernel.cpp, `jit_avx512_common_conv_bwd_data_kernel_f32_t::init_conf`.
    """
    width, step, reach = s.wide_space[-1], s.stride[-1], s.kernel[-1] - 1
    row = min(width, _UNROLLED)
    tail = width % row
    behind = (s.narrow_space[-1] - 1) * step + s.kernel[-1] - width - s.padding[-1]
    before, after = max(0, reach - s.padding[-1]) // step, max(0, reach - max(0, behind + tail)) // step
    if max(before, after) * step > row or (width > row and (row % step or behind + tail < 0)):
        return False
    copies, block = 1 + (before > 0) + (after > 0), 16 if s.groups == 1 else group_block(s)
    return copies * s.kernel[-1] * block * row * _LONGEST_INSTRUCTION <= _MOST_CODE


def forward_unrolled_in_avx512(s: Shape) -> bool:
    """Return whether AVX-512's kernel without brgemm supports a forward: rows as long as the padding, and short code.

    Source: the same file, `jit_avx512_common_conv_fwd_kernel_t::init_conf`. The number of channel blocks processed at a
    time is assumed to be the largest divisor up to 5.
    """
    if s.dilated:
        return True
    blocks = -(-(s.narrow // s.groups) // 16)
    blocks_at_a_time = max(n for n in range(1, 6) if blocks % n == 0)
    row = min(s.narrow_space[-1], 31 // (blocks_at_a_time + 1))
    full_rows = s.narrow_space[-1] // row * row
    reach = (full_rows - 1) * s.stride[-1] + s.kernel[-1] - s.wide_space[-1] - s.padding[-1]
    if max(s.padding[-1], reach) > row:
        return False
    end = (s.narrow_space[-1] - 1) * s.stride[-1] + s.kernel[-1] - s.wide_space[-1] - s.padding[-1]
    copies = 1 + (s.padding[-1] > 0) + (end > 0)
    block = s.wide if s.groups == 1 and s.wide < 16 else 16 if s.groups == 1 else group_block(s)
    return copies * s.kernel[-1] * block * blocks_at_a_time * row * _LONGEST_INSTRUCTION <= _MOST_CODE


_UNROLLED = 28
"""Positions of a row that are unrolled."""
_LONGEST_INSTRUCTION = 15
_MOST_CODE = 256 * 1024
"""Bytes."""


def to_unit_stride(s: Shape, channels: int) -> int:
    """Return the bytes of a strided 1x1 convolution's input without skipped positions, per thread (``rtus``)."""
    return booked(torch.get_num_threads() * channels * prod(s.narrow_space) * s.itemsize)


def divided(blocks: int, most: int) -> int:
    """Return the channel blocks that a 1x1 kernel processes at a time: divided by 2 or else 3 until at most `most`."""
    while blocks > most and (blocks % 2 == 0 or blocks % 3 == 0):
        blocks //= 2 if blocks % 2 == 0 else 3
    return blocks


def weight_gradient_to_unit_stride(s: Shape, block: int) -> int:
    """`to_unit_stride` for the weight's gradient, which processes some of the input's blocks at a time."""
    if not (s.simple and s.strided):
        return 0
    return to_unit_stride(s, divided(-(-s.wide // block), MOST_WIDE_BLOCKS) * block)


_BARRIER = 8192
"""Bytes of the barriers of the reduction."""
_REDUCED_ROWS = 9
"""Output rows above which threads share the rows of an image."""


def weight_sums(s: Shape, wide_block: int) -> int:
    """Return the bytes of the partial sums of AVX-512's weight gradient, one for each sharing thread but the first,
    with those of the bias unless the kernel is 1x1.

    Source: src/cpu/x64/jit_avx512_common_conv_kernel.cpp and jit_avx512_common_1x1_conv_kernel.cpp, `init_scratchpad`.
    """
    others = sharers(s, wide_block) - 1
    if others == 0:
        return 0
    wide, narrow = padded(s.wide // s.groups, wide_block), s.groups * padded(s.narrow // s.groups, simd())
    bias = 0 if s.simple else narrow
    return booked(others * (wide * narrow * prod(s.kernel) + bias) * s.itemsize) + _BARRIER


def channel_sums(s: Shape) -> int:
    """Return the bytes of the partial sums of a depthwise weight gradient, one for each sharing thread but the first.

    Source: src/cpu/x64/jit_uni_dw_conv_kernel_utils.hpp, `balance` and `init_scratchpad`.
    """
    threads = torch.get_num_threads()
    channel_threads = min(-(-s.groups // simd()), threads)
    others = min(threads // channel_threads, s.batch) - 1
    return booked(others * padded(s.groups, simd()) * prod(s.kernel) * s.itemsize)


def sharers(s: Shape, wide_block: int) -> int:
    """Return the number of threads that share the images, or their positions, of a weight's gradient."""
    return _sharers(s, wide_block, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _sharers(s: Shape, wide_block: int, threads: int) -> int:
    """`balance` of the same files: split the threads of a group over images and over blocks of output and input
    channels so that the fewest bytes are moved."""
    if threads < s.groups:
        return 1
    blocks = -(-(s.wide // s.groups) // wide_block), -(-(s.narrow // s.groups) // simd())
    cost_of, most_images = _pointwise_costs(s, *blocks) if s.simple else _costs(s, wide_block, *blocks)
    group_threads = threads // s.groups
    best, cost = (1, 1, 1), cost_of(1, 1, 1)
    splits = [
        (images, narrow, min(group_threads // images // narrow, blocks[0]))
        for images in range(1, min(group_threads, most_images) + 1)
        for narrow in range(1, min(group_threads // images, blocks[1]) + 1)
    ]
    for split in splits:
        if cost_of(*split) <= cost:
            best, cost = split, cost_of(*split)
    if not s.simple:
        best = _with_less_work(s, splits, best, {split: cost_of(*split) for split in [best, *splits]}, blocks)
    if threads // 2 < best[0] < threads:
        return min(s.batch if s.simple else most_images, threads)
    return best[0]


_Costs = tuple[Callable[[int, int, int], int], int]
"""(threads for images, output blocks, input blocks) -> bytes moved; and the most threads for images."""


def _pointwise_costs(s: Shape, wide: int, narrow: int) -> _Costs:
    positions = prod(s.narrow_space)
    row = _best_divider(positions, 7, 16, True)
    if positions % row:
        row = _best_divider(s.narrow_space[-1], 4, s.narrow_space[-1], False)
    row = 1 if row > 256 else row
    pieces, block = s.batch * -(-positions // row), simd()

    def cost_of(images: int, of_narrow: int, of_wide: int) -> int:
        share, n, w = -(-pieces // images), -(-narrow // of_narrow), -(-wide // of_wide)
        return share * (w + n) * block * row + 12 * n * w * block * block

    return cost_of, pieces


def _costs(s: Shape, wide_block: int, wide: int, narrow: int) -> _Costs:
    rows = _shared_rows(s)
    wide_space, narrow_space = list(s.wide_space), list(s.narrow_space)
    images_wide = images_narrow = s.batch
    if rows > 1 or _by_rows(s):
        images_wide, images_narrow = s.batch * wide_space[-2], s.batch * narrow_space[-2]
        wide_space[-2] = narrow_space[-2] = 1
    block = simd()

    def cost_of(images: int, of_narrow: int, of_wide: int) -> int:
        n, w = -(-narrow // of_narrow), -(-wide // of_wide)
        read = -(-images_wide // images) * w * wide_block * prod(wide_space) // s.steps
        gradients = -(-images_narrow // images) * n * block * prod(narrow_space)
        return read + gradients + 8 * n * w * prod(s.kernel) * wide_block * block

    depth = s.narrow_space[0] if s.volumetric else 1
    return cost_of, s.batch * depth * rows


def _by_rows(s: Shape) -> bool:
    return not s.volumetric and not s.dilated and s.narrow_space[-2] > _REDUCED_ROWS


def _shared_rows(s: Shape) -> int:
    return s.narrow_space[-2] // _REDUCED_ROWS if _by_rows(s) else 1


def _with_less_work(
    s: Shape,
    splits: Sequence[tuple[int, int, int]],
    best: tuple[int, int, int],
    costs: dict[tuple[int, int, int], int],
    blocks: tuple[int, int],
) -> tuple[int, int, int]:
    """Return a split with less work for the busiest thread, if it moves less than 1.1 times the bytes or cuts a
    quarter."""
    pieces = s.batch * (s.narrow_space[-2] if _by_rows(s) else 1)

    def work(split: tuple[int, int, int]) -> int:
        images, narrow, wide = split
        return -(-pieces // images) * -(-blocks[1] // narrow) * -(-blocks[0] // wide)

    best_cost, least = costs[best], work(best)
    for split in splits:
        split_work = work(split)
        if (split_work <= least and costs[split] < 1.1 * best_cost) or 4 * split_work <= 3 * least:
            best, least = split, split_work
    return best


def _best_divider(value: int, least: int, most: int, largest: bool) -> int:
    """Return the divider with the smallest padding, as oneDNN's `best_divider`; ties go to the largest, or the
    smallest."""
    most = max(1, min(most, value))
    least = max(1, min(least, most))
    loss, best = float("inf"), most
    for divider in range(most, least - 1, -1):
        total = padded(value, divider)
        padding = (total - value) / total
        if padding < loss or (padding == loss and not largest):
            loss, best = padding, divider
    return best
