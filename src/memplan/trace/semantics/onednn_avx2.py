"""Temporaries of oneDNN's convolutions on AVX2: channels in blocks of 8, in the weight's gradient those of few too."""

from __future__ import annotations

import functools
from math import prod

import torch

from memplan.trace.semantics.onednn import Shape, Work, plain_weight_gradient

_BLOCK = 8
_PICTURE = 3
"""Channels that the weight's gradient reads plain."""
_BUFFER = 1 << 21
"""Most numbers that the threads of a group have for their sums."""
_WIDEST_PADDING = 3
"""Positions that a row of results has in registers: what is padded more goes by im2col."""
BARRIERS = 12_288
"""Bytes for the threads that add up their sums, of the weight and of the bias each."""


def goes_by_columns(s: Shape) -> bool:
    """Whether only an im2col takes so much padding."""
    return s.groups == 1 and s.most_padding > _WIDEST_PADDING


def weight_gradient(s: Shape, last: bool = False) -> Work:
    """Of one group. Volumes take no padding here, and nothing is dilated.

    Source: jit_avx2_conv_kernel_f32.cpp and jit_avx2_1x1_convolution.cpp, ``init_conf``.
    """
    if s.dilated or (s.volumetric and s.padding):
        return plain_weight_gradient(s, last)
    flat = s.wide == _PICTURE and not s.simple
    weight = s.weight_bytes(1 if flat else _BLOCK, _BLOCK)
    shared = _sums(s, _PICTURE if flat else _BLOCK, torch.get_num_threads())
    scratch = shared * s.itemsize + BARRIERS if shared else 0
    if s.simple and s.strided:  # reduces to unit stride, an image a thread
        scratch += (
            torch.get_num_threads() * s.wide_bytes(_BLOCK) // prod(s.wide_space) * prod(s.narrow_space) // s.batch
        )
    return Work(s.narrow_bytes(_BLOCK), weight, 0, scratch, other=0 if flat else s.wide_bytes(_BLOCK))


@functools.lru_cache(maxsize=4096)
def _sums(s: Shape, block: int, threads: int) -> int:
    """Numbers of the sums that threads have beside the result, which share the images and slices of one weight.

    Source: cpu_reducer.cpp, ``reduce_balancer_t::balance``: jobs are blocks of the weight, a group of threads
    shares some.
    """
    job = prod(s.kernel) * block * _BLOCK
    jobs = -(-s.wide // block) * -(-s.narrow // _BLOCK)
    pieces = s.batch * (s.narrow_space[0] if s.volumetric else 1)
    least = max(1, jobs // threads)

    def shared(each: int) -> tuple[int, int, int]:
        groups = min(jobs // each, threads)
        return groups, min(threads // groups, pieces), -(-jobs // groups)

    groups, sharing, most = shared(least)
    cost = jobs * job * pieces
    for each in range(least, jobs):
        found = shared(each)
        if found[1] > 1 and found[2] > max(1, _BUFFER // (threads * job)):
            continue
        bill = job * found[2] * (-(-pieces // found[1]) + (found[1] != 1))
        if bill < cost:
            (groups, sharing, most), cost = found, bill
    return groups * (sharing - 1) * most * job
