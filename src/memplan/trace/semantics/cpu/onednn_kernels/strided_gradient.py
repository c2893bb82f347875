"""oneDNN's strided data gradient by brgemm: which shapes it supports, its blocks, and its scratchpad.

Source: src/cpu/x64/jit_brgemm_conv_bwd_utils.cpp of oneDNN 3.12.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import ceil, prod

import torch

from memplan.trace.semantics.cpu.onednn import PAGE, Shape, batch_pointers, booked, reached
from memplan.trace.semantics.cpu.onednn_kernels.strided_estimate import Blocks, Estimate
from memplan.trace.semantics.layout import level_2_cache, padded

_LEAST_EFFICIENCY = 0.00001
"""Below which the kernel is refused in float32 (``min_eff``)."""
_MOST_VECTORS = 4
"""Most vectors of channels in a block."""
_SLOWER: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {
    (128, 256, (101, 85), (49, 41)): (),
    (3, 128, (207, 175), (101, 85)): (),
    (512, 1024, (8, 8), (4, 4)): (4, 4),
    (1024, 2048, (4, 4), (2, 2)): (4, 4),
    (64, 128, (513, 513), (256, 256)): (3, 3),
    (32, 64, (1025, 1025), (512, 512)): (3, 3),
    (128, 256, (257, 257), (128, 128)): (3, 3),
    (256, 512, (49, 41), (23, 19)): (5, 5),
    (64, 128, (14, 14), (7, 7)): (4, 4),
    (1, 64, (28, 28), (14, 14)): (4, 4),
}
"""(channels and sizes) -> kernel, for which oneDNN prefers other implementations in float32."""


@functools.lru_cache(maxsize=4096)
def best_blocks(s: Shape, vector: int, threads: int) -> Blocks | None:
    """Return the blocks with the best estimated speed, or None if the kernel refuses the convolution (``init_conf``).

    Args:
        s: the convolution.
        vector: floats in a register: 16 of AVX-512's kernel, 8 of AVX2's.
        threads: number of threads that share the work.
    """
    kernel = None if s.bf16 else _SLOWER.get((s.wide // s.groups, s.narrow // s.groups, s.wide_space, s.narrow_space))
    if kernel in ((), s.kernel):
        return None
    estimate = Estimate(s, vector, threads)
    best, fastest, previous = None, 0.0, 0.0
    for vectors in range(min(-(-estimate.wide // vector), _MOST_VECTORS), 0, -1):
        if not _is_tried(estimate, vectors * vector):
            continue
        chosen = None
        for candidate in _candidates(estimate, vectors * vector):
            efficiency = estimate.efficiency(candidate)
            # `previous` starts at the estimate for larger channel blocks: oneDNN does not reset it.
            if (efficiency > previous or previous == 0) and (s.bf16 or efficiency >= _LEAST_EFFICIENCY):
                chosen, previous = candidate, efficiency
        if chosen and previous > fastest:
            best, fastest = chosen, previous
    return best


def strided_weight(s: Shape, blocks: Blocks) -> int:
    """Return the bytes of the weight: input channels padded to blocks, in 16 bits output channels padded to pairs, per
    group."""
    narrow = padded(s.narrow // s.groups, 2 if s.bf16 else 1)
    return s.groups * padded(s.wide // s.groups, blocks.channels) * narrow * prod(s.kernel) * s.itemsize


def strided_data_gradient(s: Shape, blocks: Blocks) -> int:
    """Return the bytes of the scratchpad (``init_scratchpad``): the brgemm batch, a padded image and its mask per
    thread, a row of the result if the stride does not divide it, and float32 accumulators in 16 bits.

    Args:
        s: the convolution.
        blocks: the blocks it runs with.
    """
    channels = s.groups * padded(s.narrow // s.groups, 2 if s.bf16 else 1)
    image = padded(channels * prod(reached(s)), PAGE)
    calls = prod(-(-n // m) for n, m in zip(s.wide_space[-2:], (blocks.height, blocks.width), strict=True))
    calls *= -(-s.wide_space[0] // blocks.depth) if s.volumetric else 1
    row = padded(blocks.width * s.stride[-1] * s.wide, PAGE) if s.uneven else 0
    sums = 4 * blocks.channels * -(-blocks.width // s.stride[-1]) if s.bf16 else 0
    tiles = 2 * PAGE if s.tiled else 0
    mask = padded(calls * s.groups, PAGE)
    buffers = batch_pointers(prod(blocks.taps) * s.kernel[-1]), image * s.itemsize, mask, row * s.itemsize, sums, tiles
    return booked(*(torch.get_num_threads() * size for size in buffers), aligned=PAGE)


def _is_tried(e: Estimate, channels: int) -> bool:
    """``fast_check_ic_block``."""
    filled, steps = padded(e.wide, e.vector), e.s.steps
    if channels == 64:
        few = prod(e.space) >= 64 * steps if e.pointwise else filled * e.s.itemsize < 192 * 4
        return filled % channels == 0 and few
    if channels == 48 and e.pointwise:
        return e.wide / padded(e.wide, channels) >= 0.95
    if channels == 48:
        large = prod(e.narrow_space) > 81 * steps
        return filled % channels == 0 and filled * e.s.itemsize <= 384 * 4 and large
    return True


def _candidates(e: Estimate, channels: int) -> Iterator[Blocks]:
    """``calc_blocks``, ``iterate_ker_block``: parts of the kernel, and widths that are multiples of the stride."""
    depth, height = _planes(e, channels)
    work = e.s.batch * e.s.groups * -(-e.wide // channels) * prod(e.space)
    most = min(max(1, min(e.row, ceil(work / (0.9 * e.threads)))), e.space[2])
    most = padded(most, e.stride[2]) if e.s.uneven else most
    widths = dict.fromkeys(-(-e.row // pieces) for pieces in range(1, e.row + 1))
    for of_depth in dict.fromkeys((e.kernel[0], e.stride[0] if e.kernel[0] > 1 else 1)):
        for of_height in dict.fromkeys((e.kernel[1], e.stride[1] if e.kernel[1] > 1 else 1)):
            for width in widths:
                if width <= most and width % e.stride[2] == 0 and (e.s.uneven or e.space[2] % width == 0):
                    yield Blocks(channels, depth, height, width, (of_depth, of_height))


def _planes(e: Estimate, channels: int) -> tuple[int, int]:
    """Return the depth and height of a block: as much as fits into half of the L2 cache while all threads have work."""
    s, (depth, height, width) = e.s, e.space
    planes, lines, columns = (1, *reached(s))[-3:]
    row = s.itemsize * (2 * e.narrow * columns + width * channels)
    weight_bytes = s.itemsize * prod(e.kernel) * e.narrow * channels + 4 * 2 * 16 * channels
    room = min(-(-level_2_cache() // 2), max(0, level_2_cache() - weight_bytes))
    of_depth, of_height = 1, height
    if planes * lines * row > room:
        of_depth = max(1, min(depth, room // (lines * row)))
        of_height = max(1, min(height, room // row)) if of_depth == 1 else height
    all_channels = (s.groups if e.wide > 32 else 1) * e.wide
    threads = -(-e.threads // (s.batch * -(-all_channels // channels)))
    shared = -(-depth // threads)
    rows = -(-height // (threads * -(-depth // shared)))
    of_depth = _rounded_to_stride(min(of_depth, shared), depth, e.stride[0])
    return of_depth, _rounded_to_stride(min(of_height, rows), height, e.stride[1])


def _rounded_to_stride(block: int, size: int, step: int) -> int:
    """Return `block` rounded up to a multiple of the stride that divides `size`, if the stride does."""
    while (block % step or (size % step == 0 and size % block)) and block < size:
        block += 1
    return block
