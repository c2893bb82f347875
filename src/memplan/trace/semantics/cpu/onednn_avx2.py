"""Temporaries of oneDNN's convolutions on AVX2: channels in blocks of 8, in the weight's gradient those of few too.

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
_PICTURE = 3
"""Channels that the weight's gradient reads plain."""
_BUFFER = 1 << 21
"""Most numbers that the threads of a group have for their sums."""
_ROW, _WIDE_KERNEL, _WIDEST_KERNEL = 3, 7, 13
"""Positions of a row that are in registers at once, and the widths of a kernel from which on the kernels don't run."""
_PAGE = 4096
_BARRIERS_1X1 = 8_320
"""Bytes for the threads that wait for each other to add up their sums; else a page for each group of threads."""
_MOST_NARROW_BLOCKS = 32
"""Of the output's channels, that the weight's gradient of a 1x1 kernel takes at a time, roughly."""


def goes_by_columns(s: Shape) -> bool:
    """Return whether the forward goes by im2col, for its padding."""
    across = s.padding[-1]
    wider = s.kernel[-1] > _WIDE_KERNEL and s.strided and across > 0
    return across > min(_ROW, s.narrow_space[-1]) or wider or s.padded_beyond


def weight_gradient(s: Shape, last: bool = False) -> Work:
    """Return the bytes of the weight's gradient, of any layers but those of which every channel stays by itself."""
    if s.dilated or s.kernel[-1] > _WIDEST_KERNEL or s.padded_beyond or _is_larger(s) or _pads_depth(s):
        return plain_weight_gradient(s, last)
    scratch = _threads_sums(s) + weight_gradient_to_unit_stride(s, _BLOCK)
    if s.groups > 1:
        return Work(s.narrow_bytes(), s.weight_bytes(), 0, scratch, other=s.wide_bytes())
    flat = s.wide == _PICTURE and not s.simple
    weight = s.weight_bytes(1 if flat else _BLOCK, _BLOCK)
    return Work(s.narrow_bytes(_BLOCK), weight, 0, scratch, other=0 if flat else s.wide_bytes(_BLOCK))


def bias_gradient(s: Shape) -> int:
    """Return what comes on top for the bias's gradient: sums of the threads, and its padded channels."""
    filled = booked(padded(s.narrow, _BLOCK) * s.itemsize) if s.narrow % _BLOCK else 0
    return bias_sums(s, _BLOCK) + filled


def bias_sums(s: Shape, block: int) -> int:
    """Return the bytes of the threads' sums of the bias's gradient, of so many channels at a time."""
    jobs = s.groups * -(-(s.narrow // s.groups) // block)
    sums, _, groups = _sums(jobs, block, s.batch, torch.get_num_threads(), _BUFFER)
    return booked(sums * s.itemsize, groups * _PAGE, aligned=_PAGE) if sums else 0


def _is_larger(s: Shape) -> bool:
    """Return whether the kernel is larger than the image, in any dimension but the last."""
    return any(size > space for size, space in zip(s.kernel[:-1], s.wide_space[:-1], strict=True))


def _pads_depth(s: Shape) -> bool:
    return s.volumetric and s.padding[0] > 0


def _blocks(channels: int) -> int:
    return -(-channels // _BLOCK)


def _threads_sums(s: Shape) -> int:
    """Return the bytes of the weight's sums of threads that share it."""
    threads = torch.get_num_threads()
    wide, narrow = _blocks(s.wide // s.groups), _blocks(s.narrow // s.groups)
    if not s.simple:
        block = _PICTURE if s.groups == 1 and s.wide == _PICTURE else _BLOCK
        job = prod(s.kernel) * block * _BLOCK
        pieces = s.batch * (s.narrow_space[0] if s.volumetric else 1)
        sums, _, groups = _sums(s.groups * wide * narrow, job, pieces, threads, _BUFFER)
        return booked(sums * s.itemsize, groups * _PAGE, aligned=_PAGE) if sums else 0
    some_wide, some_narrow = divided(wide, MOST_WIDE_BLOCKS), divided(narrow, _MOST_NARROW_BLOCKS)
    job = some_wide * some_narrow * _BLOCK * _BLOCK
    jobs = s.groups * -(-wide // some_wide) * -(-narrow // some_narrow)
    sums, all_sums, _ = _sums(jobs, job, s.batch * prod(s.narrow_space), threads, 8 * threads * job)
    return all_sums * s.itemsize + _BARRIERS_1X1 if sums else 0


@functools.lru_cache(maxsize=4096)
def _sums(jobs: int, job: int, pieces: int, threads: int, buffer: int) -> tuple[int, int, int]:
    """Numbers of the sums of threads that share jobs, beside the result and with it, and the groups of threads; (0,
    ...) where none does.

    As ``reduce_balancer_t::balance`` weighs it: groups of threads take jobs, the threads of a group share the pieces of
    each and add up at the end.

    Args:
        jobs: blocks of the weight.
        job: numbers of one.
        pieces: images, slices or positions that each is summed over.
        threads: how many there are.
        buffer: most numbers of a group that shares.
    """
    least = max(1, jobs // threads)
    best, cost = _shared(jobs, least, pieces, threads), jobs * job * pieces
    for each in range(least, jobs):
        groups, sharing, most = _shared(jobs, each, pieces, threads)
        if sharing > 1 and most > max(1, buffer // (threads * job)):
            continue
        bill = job * most * (-(-pieces // sharing) + (sharing != 1))
        if bill < cost:
            best, cost = (groups, sharing, most), bill
    groups, sharing, most = best
    return groups * (sharing - 1) * most * job, groups * sharing * most * job, groups


def _shared(jobs: int, each: int, pieces: int, threads: int) -> tuple[int, int, int]:
    """Groups, threads of each, and the most jobs that one has, where a group is to take ``each``."""
    groups = min(jobs // each, threads)
    return groups, min(threads // groups, pieces), -(-jobs // groups)
