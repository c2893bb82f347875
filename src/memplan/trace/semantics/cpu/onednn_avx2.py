"""Temporaries of oneDNN's convolutions on AVX2, with channels in blocks of 8.

Sources: src/cpu/x64/jit_avx2_conv_kernel_f32.cpp and jit_avx2_1x1_conv_kernel_f32.cpp (``init_conf``),
jit_avx2_convolution.hpp and jit_avx2_1x1_convolution.hpp (``init_balancers``), cpu_reducer.cpp.
"""

from __future__ import annotations

import functools
from math import prod

import torch

from memplan.trace.semantics.cpu.onednn import (
    MOST_WIDE_BLOCKS,
    Shape,
    Work,
    booked,
    divided,
    weight_gradient_to_unit_stride,
)
from memplan.trace.semantics.cpu.onednn_kernels.by_columns import plain_weight_gradient
from memplan.trace.semantics.layout import padded

_BLOCK = 8
_RGB_CHANNELS = 3
"""Number of input channels that the weight's gradient reads without reordering."""
_MOST_SUMS = 1 << 21
"""Most elements of the partial sums of a thread group."""
_UNROLLED_WIDTH, _WIDE_KERNEL, _WIDEST_KERNEL = 3, 7, 13
"""Positions of a row in registers at once, and the kernel widths above which forward and weight gradient do not run."""
_PAGE = 4096
_BARRIERS_1X1 = 8_320
"""Bytes of the barriers of a 1x1 kernel's reduction; other kernels have a page per thread group."""
_MOST_NARROW_BLOCKS = 32
"""Approximate blocks of output channels that a 1x1 kernel's weight gradient processes at a time."""


def goes_by_columns(s: Shape) -> bool:
    """Return whether the forward falls back to im2col because of its padding."""
    across = s.padding[-1]
    wider = s.kernel[-1] > _WIDE_KERNEL and s.strided and across > 0
    return across > min(_UNROLLED_WIDTH, s.narrow_space[-1]) or wider or s.padded_beyond


def weight_gradient(s: Shape, last: bool = False) -> Work:
    """Return the buffers of the weight's gradient of a convolution that is not depthwise."""
    if s.dilated or s.kernel[-1] > _WIDEST_KERNEL or s.padded_beyond or _is_larger(s) or _pads_depth(s):
        return plain_weight_gradient(s, last)
    scratch = _weight_sums(s) + weight_gradient_to_unit_stride(s, _BLOCK)
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, scratch, other=s.wide_bytes())
    flat = s.wide == _RGB_CHANNELS and not s.simple
    weight = s.weight_bytes(1 if flat else _BLOCK, _BLOCK)
    return Work(s.narrow_bytes(_BLOCK), weight, 0, scratch, other=0 if flat else s.wide_bytes(_BLOCK))


def bias_gradient(s: Shape) -> int:
    """Return the additional bytes for the bias's gradient: partial sums of the threads, and its padded channels."""
    filled = booked(padded(s.narrow, _BLOCK) * s.itemsize) if s.narrow % _BLOCK else 0
    return bias_sums(s, _BLOCK) + filled


def bias_sums(s: Shape, block: int) -> int:
    """Return the bytes of the threads' partial sums of the bias's gradient, `block` channels at a time."""
    jobs = s.groups * -(-(s.narrow // s.groups) // block)
    sums, _, groups = _partial_sums(jobs, block, s.batch, torch.get_num_threads(), _MOST_SUMS)
    return booked(sums * s.itemsize, groups * _PAGE, aligned=_PAGE) if sums else 0


def _is_larger(s: Shape) -> bool:
    """Return whether the kernel is larger than the image, in any dimension but the last."""
    return any(size > space for size, space in zip(s.kernel[:-1], s.wide_space[:-1], strict=True))


def _pads_depth(s: Shape) -> bool:
    return s.volumetric and s.padding[0] > 0


def _blocks(channels: int) -> int:
    return -(-channels // _BLOCK)


def _weight_sums(s: Shape) -> int:
    """Return the bytes of the partial sums of threads that share blocks of the weight."""
    threads = torch.get_num_threads()
    wide, narrow = _blocks(s.wide // s.groups), _blocks(s.narrow // s.groups)
    if not s.simple:
        block = _RGB_CHANNELS if s.groups == 1 and s.wide == _RGB_CHANNELS else _BLOCK
        job = prod(s.kernel) * block * _BLOCK
        pieces = s.batch * (s.narrow_space[0] if s.volumetric else 1)
        sums, _, groups = _partial_sums(s.groups * wide * narrow, job, pieces, threads, _MOST_SUMS)
        return booked(sums * s.itemsize, groups * _PAGE, aligned=_PAGE) if sums else 0
    some_wide, some_narrow = divided(wide, MOST_WIDE_BLOCKS), divided(narrow, _MOST_NARROW_BLOCKS)
    job = some_wide * some_narrow * _BLOCK * _BLOCK
    jobs = s.groups * -(-wide // some_wide) * -(-narrow // some_narrow)
    sums, all_sums, _ = _partial_sums(jobs, job, s.batch * prod(s.narrow_space), threads, 8 * threads * job)
    return all_sums * s.itemsize + _BARRIERS_1X1 if sums else 0


@functools.lru_cache(maxsize=4096)
def _partial_sums(jobs: int, job: int, pieces: int, threads: int, buffer: int) -> tuple[int, int, int]:
    """Return (elements of partial sums besides the output, elements including it, thread groups); (0, ...) if no block
    is shared between threads.

    As ``reduce_balancer_t::balance`` computes it: thread groups process blocks of the weight, and the threads of a
    group share the pieces that each block is summed over and add up at the end.

    Args:
        jobs: blocks of the weight.
        job: elements of a block.
        pieces: images, slices or positions that each block is summed over.
        threads: number of threads.
        buffer: most elements of the partial sums of a group that shares.
    """
    least = max(1, jobs // threads)
    best, cost = _balanced(jobs, least, pieces, threads), jobs * job * pieces
    for jobs_per_group in range(least, jobs):
        groups, sharing, most = _balanced(jobs, jobs_per_group, pieces, threads)
        if sharing > 1 and most > max(1, buffer // (threads * job)):
            continue
        work = job * most * (-(-pieces // sharing) + (sharing != 1))
        if work < cost:
            best, cost = (groups, sharing, most), work
    groups, sharing, most = best
    return groups * (sharing - 1) * most * job, groups * sharing * most * job, groups


def _balanced(jobs: int, each: int, pieces: int, threads: int) -> tuple[int, int, int]:
    """Return the thread groups, the threads of each, and the most jobs of a group if each is to process `each`."""
    groups = min(jobs // each, threads)
    return groups, min(threads // groups, pieces), -(-jobs // groups)
