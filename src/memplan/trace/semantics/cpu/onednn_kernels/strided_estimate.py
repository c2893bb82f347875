"""How fast oneDNN expects its strided data gradient by brgemm to be, by the blocks that it takes at a time.

Source: src/cpu/x64/jit_brgemm_conv_bwd_utils.cpp of oneDNN 3.12, whose names stand in the docstrings, and
`brgemm_blocking_vmm` in src/cpu/x64/brgemm/brgemm_utils.cpp. There it is reckoned in float32, here in float64: the
choice differs only where two ways are equally fast to seven digits.
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
    """What one call of the kernel takes of the input's gradient, and how much of the kernel."""

    channels: int
    depth: int
    height: int
    width: int
    taps: tuple[int, int]
    """Of the kernel's depth and height."""


class _Loop(NamedTuple):
    """One loop of the kernel: what a turn touches of source, weight and result, in elements, and how often it comes
    back to it."""

    touched: tuple[int, int, int]
    again: tuple[int, int, int] = (1, 1, 1)
    overlap: int = 1
    """Of the source."""


class _Share(NamedTuple):
    """What one thread does."""

    parts: int
    """Blocks of channels."""
    lanes: int
    """Vectors of channels."""
    turns: tuple[int, int, int]
    """Blocks of depth, height and width."""
    extent: tuple[int, int, int]
    """The same in positions."""
    images: int

    @property
    def area(self) -> int:
        """Positions of an image."""
        return prod(self.extent)


class Estimate:
    """Of the calls of one convolution: three dimensions, the channels of one group.

    Args:
        s: of the convolution.
        vector: floats in a register: 16 of AVX-512's kernel, 8 of AVX2's.
        threads: that share the work.
    """

    def __init__(self, s: Shape, vector: int, threads: int) -> None:
        self.s, self.vector, self.threads = s, vector, threads
        self.lane = vector * 4 // s.itemsize
        self.wide, self.narrow = s.wide // s.groups, s.narrow // s.groups
        self.space, self.stride = _three(s.wide_space), _three(s.stride)
        self.narrow_space, self.kernel = _three(s.narrow_space), _three(s.kernel)
        self.row = padded(self.space[2], self.stride[2])
        self.pixel = s.pointwise
        self.taken = padded(self.narrow, 2) if s.bf16 and s.uneven else self.narrow
        positions, weight = prod(self.narrow_space), self.wide * prod(self.kernel)
        self.by_channels = positions < weight and not s.uneven

    def efficiency(self, b: Blocks) -> float:
        """Return a measure of the work done in a second (``est_eff``, ``est_eff_1x1``)."""
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
        share = self._share(b, counts, parts, job)
        cost = self._pixel_cost(b, share, rows) if self.pixel else self._kernel_cost(b, share, rows)
        pieces = 1 if self.pixel else prod(-(-k // taken) for k, taken in zip(self.kernel, b.taps, strict=False))
        area = self.s.batch * self.space[0] * self.space[1] * self.row * self.narrow * self.wide
        cache = area / (self.threads * (cost + job * self._chunks * pieces))
        return filled * kernel * even * cache * product

    def unrolled(self, b: Blocks) -> int:
        """Return the rows of a matrix product that are taken at a time (``brgemm_blocking_vmm``)."""
        lines = max(1, min(b.channels, self.wide) // self.vector)
        one_load = self.vector < _LONG and lines == 4
        free = 2 * self.vector - (1 if one_load else lines + 1)
        most = min(free // (lines + one_load), 2 * self.vector // lines)
        rows = -(-b.width // self.stride[2])
        best, chosen = 0.0, most
        for n in range(most, 0, -1):
            speed = _single(_single(rows / padded(rows, n)) * _single(lines * n / ((lines + n) * most)))
            if self.s.itemsize * n * self.taken <= level_1_cache() and speed > best:
                best, chosen = speed, n
        return chosen

    @property
    def _chunks(self) -> int:
        return -(-self.narrow // self.taken)

    def _counts(self, b: Blocks) -> tuple[int, int, int]:
        depth, height, width = (-(-n // m) for n, m in zip(self.space, (b.depth, b.height, b.width), strict=True))
        return depth, height, width

    def _evenness(self, b: Blocks, counts: Sequence[int], parts: int, work: int) -> float:
        """Return how evenly threads are at work where there are fewer calls than threads; it goes on two places, not
        one, after each, as oneDNN does."""
        places = (self.s.batch, self.space[0], self.space[1], counts[2], self.s.groups, parts)
        plain = (0, 1, 2, 3, 4, 5)
        order = (0, 4, 5, 1, 2, 3) if self.by_channels else plain
        jobs = [0] * self.threads
        start = 0
        for thread in range(self.threads):
            calls = work // self.threads + (thread < work % self.threads)
            at = _place(start, places, order)
            start += calls
            for _ in range(calls):
                width = min(self.row - at[3] * b.width, b.width)
                jobs[thread] += width * min(self.wide - at[5] * b.channels, b.channels)
                _step(at, places, plain)
                _step(at, places, order)
        return sum(jobs) / (max(jobs) * self.threads) if max(jobs) else 1.0

    def _share(self, b: Blocks, counts: tuple[int, int, int], parts: int, job: int) -> _Share:
        of_parts = min(parts, -(-job // (prod(counts) if self.by_channels else 1)))
        lanes = -(-min(self.wide, of_parts * b.channels) // self.lane)
        calls = 1 if self.by_channels else self.s.groups * parts
        turns, extent = [0, 0, 0], [0, 0, 0]
        sizes, blocks = (*self.space[:2], self.row), (b.depth, b.height, b.width)
        for i in (2, 1, 0):
            turns[i] = min(counts[i], -(-job // calls))
            extent[i] = min(sizes[i], turns[i] * blocks[i])
            calls *= counts[i]
        images = min(self.s.batch, -(-job // (prod(counts) * self.s.groups * parts)))
        return _Share(of_parts, lanes, (turns[0], turns[1], turns[2]), (extent[0], extent[1], extent[2]), images)

    def _read(self, out: int) -> int:
        """``inp_w``."""
        k = self.kernel[2]
        return min(self.narrow_space[2], (out - 1) * min(k, self.stride[2]) + k)

    def _lines(self, out: int, channels: int) -> int:
        """``rnd_inp_simd``."""
        if self.stride[2] == 1 and channels >= self.narrow:
            return padded(self._read(out) * channels, self.lane)
        return self._read(out) * padded(channels, self.lane)

    def _kernel_cost(self, b: Blocks, share: _Share, rows: int) -> float:
        width, taps, lane, narrow = self.kernel[2], prod(self.kernel[:2]), self.lane, self.narrow
        piece, block = prod(b.taps), b.channels * self.taken
        pieces = prod(-(-k // taken) for k, taken in zip(self.kernel, b.taps, strict=False))
        source, result = self._lines(rows, self.taken), b.width * b.channels
        whole = self._lines(b.width, self.taken)
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
        (depths, heights, rows_of), (_, high, wide) = share.turns, share.extent
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

    def _pixel_cost(self, b: Blocks, share: _Share, rows: int) -> float:
        lane, narrow, taken, block = self.lane, self.narrow, self.taken, b.channels * self.taken
        whole, result, lanes = padded(taken, lane), b.width * b.channels, b.channels // self.vector
        weights = lanes * narrow * lane
        loops = [
            _Loop((rows * lane, b.channels, 0), overlap=self.vector),
            _Loop((rows * whole, block, rows * b.channels), (1, -(-b.width // rows), 1)),
            _Loop((b.width * taken, block, result), (1, 1, self._chunks)),
        ]
        if not self.by_channels:
            source = b.width * padded(self.wide, lane)
            loops.append(_Loop((source, b.channels * self.wide, result), (share.parts, 1, 1)))
            lanes = share.lanes
            weights = lanes * self.wide * lane
        (depths, heights, rows_of), (_, high, wide) = share.turns, share.extent
        loops.append(_Loop((b.width * taken, weights, b.width * lanes * lane), (1, rows_of, 1)))
        cells = b.height * wide
        loops.append(_Loop((cells * whole, weights, cells * lanes * lane), (1, heights, 1)))
        cells = b.depth * high * wide
        loops.append(_Loop((cells * whole, weights, cells * lanes * lane), (1, depths, 1)))
        if self.by_channels:
            source = share.extent[0] * high * padded(wide * taken, lane)
            loops.append(_Loop((source, b.channels * narrow, b.channels * share.area), (share.parts, 1, 1)))
        return self._costs(loops, share, share.area * whole, share.lanes * narrow, share.images * share.area * taken)

    def _costs(self, loops: list[_Loop], share: _Share, source: int, weight: int, sources: int) -> float:
        """Add the loop of the images and all of the work, then go over the loops from the outermost one (``io_k``).

        Args:
            loops: within an image, from the innermost one.
            share: of one thread.
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
            amount = sum(loop.touched) * self.s.itemsize + (4 * loop.touched[2] if self.s.bf16 else 0)
            beyond = _LEVEL_2 if amount < level_2_cache() else _BEYOND
            near = _LEVEL_1 if loop.touched[0] * self.s.itemsize < level_1_cache() else beyond
            for i, again in enumerate(loop.again):
                n, each = (again * loop.overlap, near) if i == 0 else (again, beyond)
                costs[i] = (costs[i] + each * (n - 1)) / n
                operations[i] *= again
        return sum(cost * n for cost, n in zip(costs, operations, strict=True))


def _single(x: float) -> float:
    """Round to float32, in which ways that are equally fast on paper are not."""
    return ctypes.c_float(x).value


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    depth, height, width = (1, *sizes)[-3:]
    return depth, height, width


def _place(index: int, places: Sequence[int], order: Sequence[int]) -> list[int]:
    """``nd_iterator_init``."""
    at = [0] * len(places)
    for i in reversed(order):
        index, at[i] = divmod(index, places[i])
    return at


def _step(at: list[int], places: Sequence[int], order: Sequence[int]) -> None:
    """``nd_iterator_step``."""
    for i in reversed(order):
        at[i] = (at[i] + 1) % places[i]
        if at[i]:
            return
