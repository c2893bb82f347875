"""oneDNN's convolution that supports every shape, x64:gemm: an im2col and a GEMM.

Source: src/cpu/gemm_convolution_utils.cpp of oneDNN 3.12, `init_conf`.
"""

from __future__ import annotations

import ctypes
import functools
from math import prod
from typing import NamedTuple

import torch

from memplan.trace.semantics.cpu.onednn import Shape, Work, booked
from memplan.trace.semantics.layout import level_2_cache, padded, simd

_FEW_NARROW = 8
"""Channels of the output below which a block is not split."""
_SMALL = 64 * 1024
"""Multiplications per thread below which threads had better split images and groups."""
_MOST_SCRATCH = 1 << 30
_TIMES_TENSORS = 15
"""The scratchpad is at most this many times the tensors, per thread."""
_SUM = 4
"""Bytes of an accumulator for 16-bit types."""
_LINE = 16
"""Accumulators in a cache line."""


class _Blocks(NamedTuple):
    narrow: int
    positions: int
    wide: int


def plain_forward(s: Shape) -> Work:
    """Return the buffers of a forward: the columns of a block per thread; in 16 bits also float32 accumulators."""
    threads = torch.get_num_threads()
    blocks = _best_blocks(s, threads)
    positions, narrow = _positions(s), s.narrow // s.groups
    if blocks:
        narrow, columns = blocks.narrow, blocks.wide * prod(s.kernel) * blocks.positions
        positions = blocks.positions
    else:
        threads = threads if _outer_forward(s, threads) else 1
        columns = s.wide // s.groups * prod(s.kernel) * positions
    columns = columns * s.itemsize if _unfolded(s) else 0
    sums = padded(narrow * positions, _LINE) * _SUM if s.bf16 else 0
    return Work(0, 0, s.narrow_bytes(), booked(threads * sums, threads * columns), by_columns=True)


def plain_data_gradient(s: Shape) -> Work:
    """Return the buffers of a data gradient: the columns of an image, or of a part of it, per thread."""
    threads = torch.get_num_threads()
    limit = _limit(s, threads)
    threads = threads if _outer_data_gradient(s, threads) else 1
    elements = s.wide // s.groups * prod(s.wide_space)
    sums = threads * padded(elements, _LINE) * _SUM if s.bf16 else 0
    columns = _columns(s, _SUM, threads, limit - booked(sums), 0.1)
    return Work(0, 0, s.wide_bytes(), booked(sums, columns), by_columns=True)


def plain_weight_gradient(s: Shape, last: bool = False) -> Work:
    """Return the buffers of a weight's gradient: the columns of one image, or of one per thread if images are small; an
    image in channels last is transposed first."""
    threads, weight = torch.get_num_threads(), s.weight_bytes()
    limit = _limit(s, threads)
    taps, accumulators = s.wide // s.groups * prod(s.kernel), 4 * weight if s.bf16 else 0
    least = 4 * threads * weight + accumulators + s.itemsize * threads * taps * _vector(s)
    outer = least < limit and _positions(s) // threads < 256 and (s.batch != 1 or s.groups > 2)
    images = threads if outer else 1
    sums = images * 4 * weight
    transposed = s.wide_bytes() // s.batch if last else 0
    room = _MOST_SCRATCH if last else limit - booked(sums, accumulators)
    columns = _columns(s, s.itemsize, images, room, 0.05)
    return Work(0, weight, 0, booked(columns, sums, images * transposed, accumulators), by_columns=True)


def _positions(s: Shape) -> int:
    """Return the number of output positions, for a volume those of one slice."""
    return prod(s.narrow_space[-2:])


def _vector(s: Shape) -> int:
    return simd() * 4 // s.itemsize


def _unfolded(s: Shape) -> bool:
    """Return whether an im2col is needed."""
    return not s.pointwise or s.strided


def _limit(s: Shape, threads: int) -> int:
    tensors = s.wide_bytes() + s.narrow_bytes() + s.weight_bytes()
    return min(_MOST_SCRATCH, _TIMES_TENSORS * threads * tensors)


def _columns(s: Shape, size: int, threads: int, room: int, part: float) -> int:
    """Return the bytes of all threads' columns, for a part of the positions if all do not fit into `room`."""
    if not _unfolded(s):
        return 0
    taps, positions = s.wide // s.groups * prod(s.kernel), _positions(s)
    if threads * taps * positions * size > room:
        positions = max(_vector(s), int(room // (size * threads * taps) * part))
    return threads * taps * positions * size


def _balance(work: int, threads: int) -> float:
    return work / padded(work, threads)


def _outer_data_gradient(s: Shape, threads: int) -> bool:
    """Return whether threads split images and groups rather than the columns of one image."""
    wide, narrow, area = s.wide // s.groups, s.narrow // s.groups, prod(s.wide_space[-2:])
    if (s.batch == 1 and s.groups <= 2) or (_positions(s) // threads >= 512 and prod(s.kernel) >= 64):
        return False
    pieces = -(-area // _vector(s)) * -(-wide // _vector(s))
    balanced = _balance(s.groups * s.batch, threads) >= _balance(pieces, threads)
    return balanced or area * wide * narrow // threads < _SMALL


def _outer_forward(s: Shape, threads: int) -> bool:
    """As `_outer_data_gradient`, for a forward that is not blocked."""
    wide, narrow, depth = s.wide // s.groups, s.narrow // s.groups, s.narrow_space[0] if s.volumetric else 1
    positions = _positions(s)
    if positions // threads >= 512 or (depth == 1 and s.batch == 1 and s.groups <= 2):
        return False
    pieces = -(-positions // _vector(s)) * -(-narrow // _vector(s))
    balanced = _balance(s.groups * s.batch * depth, threads) >= _balance(pieces, threads)
    return balanced or positions * wide * narrow // threads < _SMALL


@functools.lru_cache(maxsize=4096)
def _best_blocks(s: Shape, threads: int) -> _Blocks | None:
    """Return the blocks of a forward with the best estimated speed, or None if it is not blocked."""
    wide, narrow, positions = s.wide // s.groups, s.narrow // s.groups, _positions(s)
    taps, all_positions = prod(s.kernel), s.batch * s.groups * positions
    if s.volumetric:
        return None
    if _unfolded(s):
        sparse = s.stride[-1] == 1 and wide * taps <= 0.05 * narrow
        if not (all_positions >= threads * _vector(s) or positions < s.batch * s.groups or sparse):
            return None
    elif wide // narrow >= 42 or wide * narrow * prod(s.wide_space) >= 1024:
        return None
    search = _Search(s, threads)
    for of_narrow in range(1, threads + 1):
        search.go(of_narrow)
    return search.best


class _Search:
    """Search for the fastest blocks by oneDNN's estimate, which weighs caches and load balance."""

    def __init__(self, s: Shape, threads: int) -> None:
        self.s, self.threads, self.vector = s, threads, _vector(s)
        self.cache = level_2_cache() // s.itemsize
        self.wide, self.narrow = s.wide // s.groups, s.narrow // s.groups
        self.taps, self.positions = prod(s.kernel), _positions(s)
        self.all_positions = s.batch * s.groups * self.positions
        self.step = s.stride[-2] * s.stride[-1]
        self.best, self.speed = _Blocks(1, 1, self.wide), 0.0

    def go(self, of_narrow: int) -> None:
        """Try blocks with `of_narrow` threads for the output channels."""
        most_narrow, most = -(-self.narrow // of_narrow), -(-self.all_positions // (self.threads // of_narrow))
        wide, taps, cache, vector = self.wide, self.taps, self.cache, self.vector
        if not _unfolded(self.s):
            self._around(of_narrow, most_narrow, (cache - taps * wide) // (self.step * wide))
            return
        self._try(of_narrow, most_narrow, most)
        if self.best == (most_narrow, most, wide):
            return
        a, b = self.step + taps, taps * most_narrow
        narrow = max(_FEW_NARROW, min(most_narrow, (cache - a * wide * vector - b * wide) // vector))
        self._around(of_narrow, narrow, max(vector, min(most, (cache - b * wide) // (a * wide + narrow))))
        least = max(1, cache // (2 * _FEW_NARROW * a + 2 * b))
        if least < wide:
            wide_part = wide // max(1, wide // least)
            positions = max(1, (cache - 2 * b * wide_part) // (2 * wide_part * a))
            narrow = cache // 2 // positions
            if narrow > most_narrow:
                narrow = most_narrow
                positions = max(vector, min(most, (cache - b * wide_part) // (a * wide_part + narrow)))
            elif positions > most:
                positions = most
                room = (cache - a * wide_part * positions - b * wide_part) // positions
                narrow = max(_FEW_NARROW, min(most_narrow, room))
            self._around(of_narrow, narrow, positions)
        positions = max(vector, (cache - b * wide) // (a * wide + most_narrow) // vector * vector)
        self._around(of_narrow, most_narrow, positions)

    def _around(self, of_narrow: int, narrow: int, positions: int) -> None:
        """Try these blocks and, near them, multiples of 8 channels and 48 positions."""
        self._try(of_narrow, narrow, positions)
        self._try(of_narrow, narrow // 8 * 8, positions // 48 * 48)
        for near in (positions // 48 * 48, padded(positions, self.vector), padded(positions, 48)):
            self._try(of_narrow, padded(narrow, 8), near)

    def _try(self, of_narrow: int, narrow: int, positions: int) -> None:
        most_narrow, most = -(-self.narrow // of_narrow), -(-self.all_positions // (self.threads // of_narrow))
        block_limit = min(self.positions, most)
        narrow = min(most_narrow, max(_FEW_NARROW, min(most_narrow, narrow)))
        positions = min(block_limit, max(self.vector, min(most, positions)))
        room = self._room(narrow, positions, most_narrow, most)
        cost = 20 if room < 1 else 1
        wide = max(1, self.wide // -(-self.wide // max(1, room)))
        speed = self._speed(_Blocks(narrow, positions, wide), most_narrow, most, cost)
        speed = ctypes.c_float((speed * self._evenness(of_narrow) ** 8) ** (1 / 14.5)).value
        if speed > self.speed:
            self.best, self.speed = _Blocks(narrow, positions, wide), speed

    def _evenness(self, of_narrow: int) -> float:
        """Return the least work of a thread divided by the most."""
        position_threads = self.threads // of_narrow, -(-self.threads // of_narrow)
        most_narrow, least_narrow = -(-self.narrow // of_narrow), max(1, self.narrow // of_narrow)
        narrow_remainder, thread_remainder = self.narrow % of_narrow, self.threads % of_narrow
        most = most_narrow * -(-self.all_positions // position_threads[0])
        if narrow_remainder <= thread_remainder:
            most = max(
                most_narrow * -(-self.all_positions // position_threads[1]),
                least_narrow * -(-self.all_positions // position_threads[0]),
            )
        least_positions = max(1, self.all_positions // position_threads[1])
        least = least_narrow * least_positions
        if thread_remainder <= narrow_remainder:
            least = min(most_narrow * least_positions, least_narrow * (self.all_positions // position_threads[0]))
        return least / most

    def _room(self, narrow: int, positions: int, most_narrow: int, most: int) -> int:
        """Return the number of input channels that fit into the cache."""
        source, cache, out = self.step * positions, self.cache, narrow * positions
        columns = self.taps * positions if _unfolded(self.s) else 0
        within = (cache - out if columns else cache) // (source + columns + self.taps * most_narrow)
        room = within
        if positions >= most:
            room = cache // (source + columns)
            if columns and narrow < most_narrow:
                room = min(room, (cache - out) // (columns + self.taps * narrow))
        return within if room < self.wide and columns else room

    def _speed(self, b: _Blocks, most_narrow: int, most: int, cost: int) -> float:
        vector, taps, all_taps = self.vector, self.taps, self.wide * self.taps
        pieces, block = -(-self.wide // b.wide), b.wide * taps
        out = cost * most_narrow * padded(most, vector) * (1 if b.wide == self.wide else 2 * pieces - 1)
        read = cost * taps * self.wide * padded(most * self.step, vector)
        filled = padded(b.positions, vector)
        columns = 2 * read * filled / b.positions if _unfolded(self.s) else 0
        columns *= 8 if self.s.stride[-1] != 1 else 1
        moved = read + columns + cost * most_narrow * padded(all_taps, vector) + out
        block_limit = min(self.positions, most)
        speed = most_narrow / padded(most_narrow, b.narrow) * block_limit / padded(block_limit, b.positions)
        speed *= self.wide / padded(self.wide, b.wide) * b.positions / padded(b.positions, 3 * vector)
        speed *= most / vector * most_narrow * all_taps / moved
        speed *= (b.positions * b.narrow * block / (most_narrow * most * all_taps)) ** 0.5
        product = filled * block + b.narrow * padded(block, vector) + b.narrow * filled
        return speed * (b.positions / vector * b.narrow * block) / product
