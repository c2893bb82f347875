"""A convolution as oneDNN sees it, and its kernel that takes every shape: an im2col and a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """On one side, of each dimension."""
    dilated: bool
    itemsize: int
    bf16: bool
    """Whether it is in 16 bits: bfloat16 or float16."""
    tiled: bool = False
    """Whether AMX's tiles multiply it, which take bfloat16."""

    @property
    def steps(self) -> int:
        """Return the strides' product."""
        return prod(self.stride)

    @property
    def strided(self) -> bool:
        """Return whether it skips positions."""
        return self.steps > 1

    @property
    def uneven(self) -> bool:
        """Return whether the stride does not divide the width of the input."""
        return self.wide_space[-1] % self.stride[-1] > 0

    @property
    def padded_beyond(self) -> bool:
        """Return whether a kernel lies in the padding alone somewhere, which those of vectors don't take."""
        sides = zip(self.padding, self.kernel, strict=True)
        return any(pad >= size for pad, size in sides if pad and (size == 1 or not self.dilated))

    @property
    def padded_by_half(self) -> bool:
        """Return whether the height is padded by no more than half of the kernel's, unless it is dilated."""
        return self.dilated or self.padding[-2] <= self.kernel[-2] // 2

    @property
    def low(self) -> bool:
        """Return whether every row of the output meets padding, or columns are skipped: kernels for a depthwise
        weight's gradient do not take it. Measured."""
        step, pad, rows = self.stride[-2], self.padding[-2], self.wide_space[-2] - self.kernel[-2]
        firsts = range(-pad, self.narrow_space[-2] * step - pad, step)
        return self.stride[-1] > self.kernel[-1] or not any(0 <= first <= rows for first in firsts)

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
    as_plain: bool = False
    """Whether the result lies in channels last as it would in a plain tensor, which saves one copy."""
    by_columns: bool = False
    """Whether it is an im2col and a matrix product, which pad nothing."""


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


ALIGNED = 128
"""Bytes that a buffer of oneDNN's may move by, to be aligned (memory_tracking.hpp, ``minimal_alignment``)."""
PAGE = 4096
"""Bytes."""
_BATCH_ELEMENT = 40
"""Bytes of ``brgemm_batch_element_t``."""


def booked(*sizes: int, aligned: int = ALIGNED) -> int:
    """Return the bytes of a scratchpad with these buffers: each can be moved to be aligned; empty ones take nothing."""
    return sum(size + aligned for size in sizes if size)


def batch_pointers(taps: int) -> int:
    """Return a thread's pointers of a batch of brgemm's, one for each position of the kernel, in whole pages."""
    return padded(padded(taps * _BATCH_ELEMENT, PAGE), _BATCH_ELEMENT)


def in_channels_last(s: Shape) -> int:
    """Return the scratch of brgemm's convolution of unit stride, and of a forward, on channels last.

    Source: src/cpu/x64/jit_brgemm_conv_utils.cpp, `init_scratchpad`.
    """
    return booked(torch.get_num_threads() * batch_pointers(prod(s.kernel)), aligned=PAGE)


def reached(s: Shape) -> tuple[int, ...]:
    """Return the sizes of the output's gradient, with the positions that a kernel reaches beyond it."""
    dimensions = zip(s.narrow_space, s.wide_space, s.kernel, s.stride, s.padding, strict=True)
    return tuple(
        narrow + max(0, k - 1 - pad) // step + max(0, k - 1 - ((narrow - 1) * step + k - wide - pad)) // step
        for narrow, wide, k, step, pad in dimensions
    )


def unrolled_in_avx512(s: Shape) -> bool:
    """Return whether AVX-512's kernel without brgemm takes a data gradient: what it writes out for a row is long where
    kernel or stride are.

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
    """Return whether the same kernel takes a forward: a row is as long as padding, and its code short enough.

    Source: the same file, `jit_avx512_common_conv_fwd_kernel_t::init_conf`; how many blocks of channels it takes at a
    time is taken as the most that divide them.
    """
    if s.dilated:
        return True
    blocks = -(-(s.narrow // s.groups) // 16)
    at_once = max(n for n in range(1, 6) if blocks % n == 0)
    row = min(s.narrow_space[-1], 31 // (at_once + 1))
    whole = s.narrow_space[-1] // row * row
    reach = (whole - 1) * s.stride[-1] + s.kernel[-1] - s.wide_space[-1] - s.padding[-1]
    if max(s.padding[-1], reach) > row:
        return False
    end = (s.narrow_space[-1] - 1) * s.stride[-1] + s.kernel[-1] - s.wide_space[-1] - s.padding[-1]
    copies = 1 + (s.padding[-1] > 0) + (end > 0)
    block = s.wide if s.groups == 1 and s.wide < 16 else 16 if s.groups == 1 else group_block(s)
    return copies * s.kernel[-1] * block * at_once * row * _LONGEST_INSTRUCTION <= _MOST_CODE


_UNROLLED = 28
"""Positions of a row that are written out."""
_LONGEST_INSTRUCTION = 15
_MOST_CODE = 256 * 1024
"""Bytes of a kernel's code."""


def to_unit_stride(s: Shape, channels: int) -> int:
    """Return an image a thread of a strided 1x1 convolution's input, without what is skipped (``rtus``)."""
    return booked(torch.get_num_threads() * channels * prod(s.narrow_space) * s.itemsize)


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


_BARRIER = 8192
"""Bytes for the threads that wait for each other to add up their sums."""
_REDUCED_ROWS = 9
"""Rows of an output from whose number on threads share those of an image."""


def weight_sums(s: Shape, wide_block: int) -> int:
    """Return the sums of threads that share a weight's gradient on AVX-512, but the first thread's; beside them those
    of the bias, save for a 1x1 kernel.

    Source: src/cpu/x64/jit_avx512_common_conv_kernel.cpp and jit_avx512_common_1x1_conv_kernel.cpp, `init_scratchpad`.
    """
    others = sharers(s, wide_block) - 1
    if others == 0:
        return 0
    wide, narrow = padded(s.wide // s.groups, wide_block), s.groups * padded(s.narrow // s.groups, simd())
    bias = 0 if s.simple else narrow
    return booked(others * (wide * narrow * prod(s.kernel) + bias) * s.itemsize) + _BARRIER


def channel_sums(s: Shape) -> int:
    """Return the sums of threads that share the images of a weight's gradient by channels, but the first thread's.

    Source: src/cpu/x64/jit_uni_dw_conv_kernel_utils.hpp, `balance` and `init_scratchpad`.
    """
    threads = torch.get_num_threads()
    of_channels = min(-(-s.groups // simd()), threads)
    others = min(threads // of_channels, s.batch) - 1
    return booked(others * padded(s.groups, simd()) * prod(s.kernel) * s.itemsize)


def sharers(s: Shape, wide_block: int) -> int:
    """Return the threads that share the images, or their positions, of a weight's gradient."""
    return _sharers(s, wide_block, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _sharers(s: Shape, wide_block: int, threads: int) -> int:
    """As oneDNN weighs it: the same files, `balance`. The threads of a group of channels share the images, and blocks
    of the channels of input and output."""
    if threads < s.groups:
        return 1
    blocks = -(-(s.wide // s.groups) // wide_block), -(-(s.narrow // s.groups) // simd())
    weigh, most = _pointwise_costs(s, *blocks) if s.simple else _costs(s, wide_block, *blocks)
    each = threads // s.groups
    best, cost = (1, 1, 1), weigh(1, 1, 1)
    ways = [
        (images, narrow, min(each // images // narrow, blocks[0]))
        for images in range(1, min(each, most) + 1)
        for narrow in range(1, min(each // images, blocks[1]) + 1)
    ]
    for way in ways:
        if weigh(*way) <= cost:
            best, cost = way, weigh(*way)
    if not s.simple:
        best = _with_less_work(s, ways, best, {way: weigh(*way) for way in [best, *ways]}, blocks)
    if threads // 2 < best[0] < threads:
        return min(s.batch if s.simple else most, threads)
    return best[0]


_Costs = tuple[Callable[[int, int, int], int], int]
"""Bytes that threads of images and of blocks of output and input move; the most threads of images."""


def _pointwise_costs(s: Shape, wide: int, narrow: int) -> _Costs:
    positions = prod(s.narrow_space)
    row = _best_divider(positions, 7, 16, True)
    if positions % row:
        row = _best_divider(s.narrow_space[-1], 4, s.narrow_space[-1], False)
    row = 1 if row > 256 else row
    pieces, block = s.batch * -(-positions // row), simd()

    def weigh(images: int, of_narrow: int, of_wide: int) -> int:
        share, n, w = -(-pieces // images), -(-narrow // of_narrow), -(-wide // of_wide)
        return share * (w + n) * block * row + 12 * n * w * block * block

    return weigh, pieces


def _costs(s: Shape, wide_block: int, wide: int, narrow: int) -> _Costs:
    rows = _shared_rows(s)
    wide_space, narrow_space = list(s.wide_space), list(s.narrow_space)
    images_wide = images_narrow = s.batch
    if rows > 1 or _by_rows(s):
        images_wide, images_narrow = s.batch * wide_space[-2], s.batch * narrow_space[-2]
        wide_space[-2] = narrow_space[-2] = 1
    block = simd()

    def weigh(images: int, of_narrow: int, of_wide: int) -> int:
        n, w = -(-narrow // of_narrow), -(-wide // of_wide)
        read = -(-images_wide // images) * w * wide_block * prod(wide_space) // s.steps
        gradients = -(-images_narrow // images) * n * block * prod(narrow_space)
        return read + gradients + 8 * n * w * prod(s.kernel) * wide_block * block

    depth = s.narrow_space[0] if s.volumetric else 1
    return weigh, s.batch * depth * rows


def _by_rows(s: Shape) -> bool:
    return not s.volumetric and not s.dilated and s.narrow_space[-2] > _REDUCED_ROWS


def _shared_rows(s: Shape) -> int:
    return s.narrow_space[-2] // _REDUCED_ROWS if _by_rows(s) else 1


def _with_less_work(
    s: Shape,
    ways: Sequence[tuple[int, int, int]],
    best: tuple[int, int, int],
    costs: dict[tuple[int, int, int], int],
    blocks: tuple[int, int],
) -> tuple[int, int, int]:
    """Return a way with less work for the thread that has most: not with 1.1 times the bytes, or with a quarter off."""
    pieces = s.batch * (s.narrow_space[-2] if _by_rows(s) else 1)

    def work(way: tuple[int, int, int]) -> int:
        images, narrow, wide = way
        return -(-pieces // images) * -(-blocks[1] // narrow) * -(-blocks[0] // wide)

    bytes_of_best, least = costs[best], work(best)
    for way in ways:
        done = work(way)
        if (done <= least and costs[way] < 1.1 * bytes_of_best) or 4 * done <= 3 * least:
            best, least = way, done
    return best


def _best_divider(value: int, least: int, most: int, largest: bool) -> int:
    """Return the divider that leaves least over, as oneDNN's `best_divider` does."""
    most = max(1, min(most, value))
    least = max(1, min(least, most))
    loss, best = float("inf"), most
    for divider in range(most, least - 1, -1):
        total = padded(value, divider)
        left = (total - value) / total
        if left < loss or (left == loss and not largest):
            loss, best = left, divider
    return best
