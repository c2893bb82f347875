"""Speed that oneDNN estimates for its strided data gradient by brgemm, as a function of the blocks.

Source: src/cpu/x64/jit_brgemm_conv_bwd_utils.cpp of oneDNN 3.12, whose names the docstrings give, and
`brgemm_blocking_vmm` in src/cpu/x64/brgemm/brgemm_utils.cpp. It computes in float32, this module in float64: the choice
differs only between blocks whose speeds agree to seven digits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from memplan.trace.semantics.cpu.onednn import Shape
from memplan.trace.semantics.layout import level_1_cache, level_2_cache, padded

_LEVEL_1, _LEVEL_2, _BEYOND = 1, 3, 15
"""Relative costs of reading from a cache (``L1_k``, ``L2_k``, ``L3_k`` and ``mem_k``)."""
_LONG = 16
"""Floats in a vector of AVX-512, which has 32 registers of them; AVX2 has half of each."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block of the input's gradient, and the part of the kernel, that one call computes."""

    channels: int
    depth: int
    height: int
    width: int
    taps: tuple[int, int]
    """Of the kernel's depth and height."""


class _Loop(NamedTuple):
    """One loop of the kernel: elements of source, weight and result that an iteration touches, and how often each is
    reread."""

    footprint: tuple[int, int, int]
    rereads: tuple[int, int, int] = (1, 1, 1)
    overlap: int = 1
    """Of the source."""


class _ThreadWork(NamedTuple):
    """The work of one thread."""

    parts: int
    """Blocks of channels."""
    lanes: int
    """Vectors of channels."""
    iterations: tuple[int, int, int]
    """Blocks of depth, height and width."""
    extent: tuple[int, int, int]
    """Positions in depth, height and width."""
    images: int

    @property
    def area(self) -> int:
        """Positions of an image."""
        return prod(self.extent)


class Estimate:
    """Estimate for one convolution, in three dimensions and for the channels of one group.

    Args:
        s: the convolution.
        vector: floats in a register: 16 of AVX-512's kernel, 8 of AVX2's.
        threads: number of threads that share the work.
    """

    def __init__(self, s: Shape, vector: int, threads: int) -> None:
        self.s, self.vector, self.threads = s, vector, threads
        self.lane = vector * 4 // s.itemsize
        self.wide, self.narrow = s.wide // s.groups, s.narrow // s.groups
        self.space, self.stride = _three(s.wide_space), _three(s.stride)
        self.narrow_space, self.kernel = _three(s.narrow_space), _three(s.kernel)
        self.row = padded(self.space[2], self.stride[2])
        self.pointwise = s.pointwise
        self.narrow_block = padded(self.narrow, 2) if s.bf16 and s.uneven else self.narrow
        positions, weight = prod(self.narrow_space), self.wide * prod(self.kernel)
        self.by_channels = positions < weight and not s.uneven

    def efficiency(self, b: Blocks) -> float:
        """Return a measure of speed, larger is faster (``est_eff``, ``est_eff_1x1``)."""
        lines, rows = b.channels // self.vector, self.unrolled(b)
        counts = self._counts(b)
        parts = -(-self.wide // b.channels)
        work = self.s.batch * self.s.groups * parts * prod(counts)
        job = -(-work // self.threads)
        even = work / padded(work, self.threads) if job >= self.threads else self._evenness(b, counts, parts, work)
        kernel = lines * rows / ((rows + lines) * 2 * self.vector)
        product = (1 + rows * (2 - min(1.9, rows / b.width)) / 64) / 2
        filled = self.wide / padded(self.wide, b.channels) * self.row / padded(self.row, b.width)
        filled *= b.width / padded(b.width, rows)
        share = self._thread_work(b, counts, parts, job)
        cost = self._pointwise_cost(b, share, rows) if self.pointwise else self._kernel_cost(b, share, rows)
        pieces = 1 if self.pointwise else prod(-(-k // part) for k, part in zip(self.kernel, b.taps, strict=False))
        area = self.s.batch * self.space[0] * self.space[1] * self.row * self.narrow * self.wide
        cache = area / (self.threads * (cost + job * self._chunks * pieces))
        return filled * kernel * even * cache * product

    def unrolled(self, b: Blocks) -> int:
        """Return the rows of the matrix product that are computed at a time (``brgemm_blocking_vmm``)."""
        lines = max(1, min(b.channels, self.wide) // self.vector)
        single_load = self.vector < _LONG and lines == 4
        free = 2 * self.vector - (1 if single_load else lines + 1)
        max_rows = min(free // (lines + single_load), 2 * self.vector // lines)
        rows = -(-b.width // self.stride[2])
        best_speed, best_rows = 0.0, max_rows
        for n in range(max_rows, 0, -1):
            speed = _single(_single(rows / padded(rows, n)) * _single(lines * n / ((lines + n) * max_rows)))
            if self.s.itemsize * n * self.narrow_block <= level_1_cache() and speed > best_speed:
                best_speed, best_rows = speed, n
        return best_rows

    @property
    def _chunks(self) -> int:
        return -(-self.narrow // self.narrow_block)

    def _counts(self, b: Blocks) -> tuple[int, int, int]:
        depth, height, width = (-(-n // m) for n, m in zip(self.space, (b.depth, b.height, b.width), strict=True))
        return depth, height, width

    def _evenness(self, b: Blocks, counts: Sequence[int], parts: int, work: int) -> float:
        """Return the load balance of threads if there are fewer calls than threads; like oneDNN, it advances two
        iterators rather than one after each call."""
        sizes = (self.s.batch, self.space[0], self.space[1], counts[2], self.s.groups, parts)
        plain = (0, 1, 2, 3, 4, 5)
        order = (0, 4, 5, 1, 2, 3) if self.by_channels else plain
        jobs = [0] * self.threads
        start = 0
        for thread in range(self.threads):
            calls = work // self.threads + (thread < work % self.threads)
            index = _place(start, sizes, order)
            start += calls
            for _ in range(calls):
                width = min(self.row - index[3] * b.width, b.width)
                jobs[thread] += width * min(self.wide - index[5] * b.channels, b.channels)
                _step(index, sizes, plain)
                _step(index, sizes, order)
        return sum(jobs) / (max(jobs) * self.threads) if max(jobs) else 1.0

    def _thread_work(self, b: Blocks, counts: tuple[int, int, int], parts: int, job: int) -> _ThreadWork:
        of_parts = min(parts, -(-job // (prod(counts) if self.by_channels else 1)))
        lanes = -(-min(self.wide, of_parts * b.channels) // self.lane)
        calls = 1 if self.by_channels else self.s.groups * parts
        iterations, extent = [0, 0, 0], [0, 0, 0]
        sizes, blocks = (*self.space[:2], self.row), (b.depth, b.height, b.width)
        for i in (2, 1, 0):
            iterations[i] = min(counts[i], -(-job // calls))
            extent[i] = min(sizes[i], iterations[i] * blocks[i])
            calls *= counts[i]
        images = min(self.s.batch, -(-job // (prod(counts) * self.s.groups * parts)))
        extents = extent[0], extent[1], extent[2]
        return _ThreadWork(of_parts, lanes, (iterations[0], iterations[1], iterations[2]), extents, images)

    def _read(self, out: int) -> int:
        """``inp_w``."""
        k = self.kernel[2]
        return min(self.narrow_space[2], (out - 1) * min(k, self.stride[2]) + k)

    def _lines(self, out: int, channels: int) -> int:
        """``rnd_inp_simd``."""
        if self.stride[2] == 1 and channels >= self.narrow:
            return padded(self._read(out) * channels, self.lane)
        return self._read(out) * padded(channels, self.lane)

    def _kernel_cost(self, b: Blocks, share: _ThreadWork, rows: int) -> float:
        width, taps, lane, narrow = self.kernel[2], prod(self.kernel[:2]), self.lane, self.narrow
        piece, block = prod(b.taps), b.channels * self.narrow_block
        pieces = prod(-(-k // part) for k, part in zip(self.kernel, b.taps, strict=False))
        source, result = self._lines(rows, self.narrow_block), b.width * b.channels
        whole = self._lines(b.width, self.narrow_block)
        weight = taps * width * b.channels * narrow
        loops = [
            _Loop((self._read(rows) * lane, b.channels, 0), overlap=self.vector),
            _Loop((source, block, 0), overlap=width),
            _Loop((source, width * block, 0)),
            _Loop((piece * source, piece * width * block, rows * b.channels), (1, -(-b.width // rows), 1)),
            _Loop((piece * whole, piece * width * block, result), (1, 1, pieces)),
            _Loop((taps * whole, taps * width * block, result), (1, 1, self._chunks)),
        ]
        source, lanes = taps * self._lines(b.width, narrow), b.channels // self.vector
        if not self.by_channels:
            loops.append(_Loop((source, weight, result), (share.parts, 1, 1)))
            lanes = share.lanes
        (depths, heights, rows_of), (_, high, wide) = share.iterations, share.extent
        weights = taps * width * lanes * narrow * lane
        loops.append(_Loop((source, weights, b.width * lanes * lane), (1, rows_of, 1)))
        source = taps * self._lines(wide, narrow)
        loops.append(_Loop((b.height * source, weights, wide * lanes * lane), (1, heights, 1)))
        loops.append(_Loop((b.depth * high * source, weights, high * wide * lanes * lane), (1, depths, 1)))
        source *= share.extent[0] * high
        if self.by_channels:
            loops.append(_Loop((source, weight, b.channels * share.area), (share.parts, 1, 1)))
        operations = share.images * share.area * taps * width * narrow
        return self._costs(loops, share, source, taps * width * share.lanes * narrow, operations)

    def _pointwise_cost(self, b: Blocks, share: _ThreadWork, rows: int) -> float:
        lane, narrow, narrow_block, block = self.lane, self.narrow, self.narrow_block, b.channels * self.narrow_block
        whole, result, lanes = padded(narrow_block, lane), b.width * b.channels, b.channels // self.vector
        weights = lanes * narrow * lane
        loops = [
            _Loop((rows * lane, b.channels, 0), overlap=self.vector),
            _Loop((rows * whole, block, rows * b.channels), (1, -(-b.width // rows), 1)),
            _Loop((b.width * narrow_block, block, result), (1, 1, self._chunks)),
        ]
        if not self.by_channels:
            source = b.width * padded(self.wide, lane)
            loops.append(_Loop((source, b.channels * self.wide, result), (share.parts, 1, 1)))
            lanes = share.lanes
            weights = lanes * self.wide * lane
        (depths, heights, rows_of), (_, high, wide) = share.iterations, share.extent
        loops.append(_Loop((b.width * narrow_block, weights, b.width * lanes * lane), (1, rows_of, 1)))
        cells = b.height * wide
        loops.append(_Loop((cells * whole, weights, cells * lanes * lane), (1, heights, 1)))
        cells = b.depth * high * wide
        loops.append(_Loop((cells * whole, weights, cells * lanes * lane), (1, depths, 1)))
        if self.by_channels:
            source = share.extent[0] * high * padded(wide * narrow_block, lane)
            loops.append(_Loop((source, b.channels * narrow, b.channels * share.area), (share.parts, 1, 1)))
        operations = share.images * share.area * narrow_block
        return self._costs(loops, share, share.area * whole, share.lanes * narrow, operations)

    def _costs(self, loops: list[_Loop], share: _ThreadWork, source: int, weight: int, sources: int) -> float:
        """Add the loop over images and the loop over everything, then cost the loops from the outermost inwards
        (``io_k``).

        Args:
            loops: within an image, from the innermost outwards.
            share: the work of one thread.
            source: elements that one image touches.
            weight: operations on the weight, in vectors.
            sources: operations on the source.
        """
        results, lane = share.area * share.lanes, self.lane
        loops = [
            *loops,
            _Loop((source, weight * lane, results * lane), (1, share.images, 1)),
            _Loop((sources, weight * lane, share.images * results * lane)),
        ]
        costs, operations = [float(_BEYOND)] * 3, [sources, weight, share.images * results]
        for loop in reversed(loops):
            amount = sum(loop.footprint) * self.s.itemsize + (4 * loop.footprint[2] if self.s.bf16 else 0)
            beyond = _LEVEL_2 if amount < level_2_cache() else _BEYOND
            near = _LEVEL_1 if loop.footprint[0] * self.s.itemsize < level_1_cache() else beyond
            for i, rereads in enumerate(loop.rereads):
                n, each = (rereads * loop.overlap, near) if i == 0 else (rereads, beyond)
                costs[i] = (costs[i] + each * (n - 1)) / n
                operations[i] *= rereads
        return sum(cost * n for cost, n in zip(costs, operations, strict=True))


def _single(x: float) -> float:
    """Round to float32, which decides between candidates that are equally fast in exact arithmetic."""
    return ctypes.c_float(x).value


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    depth, height, width = (1, *sizes)[-3:]
    return depth, height, width


def _place(index: int, sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """``nd_iterator_init``."""
    coordinates = [0] * len(sizes)
    for i in reversed(order):
        index, coordinates[i] = divmod(index, sizes[i])
    return coordinates


def _step(index: list[int], sizes: Sequence[int], order: Sequence[int]) -> None:
    """``nd_iterator_step``."""
    for i in reversed(order):
        index[i] = (index[i] + 1) % sizes[i]
        if index[i]:
            return
