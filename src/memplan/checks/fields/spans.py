"""Receptive fields along one dimension: exact, and not clipped at the border.

A position ``o`` of a tensor sees the positions ``low(o) ... high(o)`` of a dimension of the input. Both are whole
numbers that repeat: ``low(o + period) = low(o) + advance``. A convolution, a pool or a crop has the period 1; a
transposed convolution or an interpolation by s multiplies it by s. So every composition is exact, in whole numbers,
also beyond the border of the input, where fields reach into padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 4096
"""Fields with a longer period count as unknown (interpolations between sizes without a common factor)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Fields along a dimension. ``lows`` and ``highs`` are those of the positions ``0 ... period - 1``.

    Example:
        >>> conv3 = IDENTITY.window(3)
        >>> conv3.low(5), conv3.high(5)
        (5, 7)
    """

    advance: int
    lows: tuple[int, ...]
    highs: tuple[int, ...]

    @property
    def period(self) -> int:
        """Positions after which the field repeats, moved by ``advance``."""
        return len(self.lows)

    @property
    def stride(self) -> Fraction:
        """Positions of the input from one field to the next, on average."""
        return Fraction(self.advance, self.period)

    def low(self, position: int) -> int:
        """Return the first input position that a position sees; it moves by `advance` every `period` positions."""
        periods, phase = divmod(position, self.period)
        return self.lows[phase] + periods * self.advance

    def high(self, position: int) -> int:
        """Return the last position of the input that a position sees. It repeats as `low` does."""
        periods, phase = divmod(position, self.period)
        return self.highs[phase] + periods * self.advance

    @property
    def first_low(self) -> Fraction:
        """Value at position 0 of the line fitted through the lows."""
        return self._line(self.lows)

    @property
    def first_high(self) -> Fraction:
        """Value at position 0 of the line fitted through the highs."""
        return self._line(self.highs)

    def _line(self, values: tuple[int, ...]) -> Fraction:
        """Return the value at position 0 of the line through these lows (or highs) whose slope is the stride."""
        offsets = [value - self.stride * position for position, value in enumerate(values)]
        return sum(offsets, Fraction(0)) / len(offsets)

    @property
    def size(self) -> int:
        """Positions of the input in the widest field."""
        return max(high - low + 1 for low, high in zip(self.lows, self.highs, strict=True))

    def through(self, period: int, advance: int, seen: Callable[[int], Sequence[int]]) -> Span | None:
        """Return the fields of a result whose position ``o`` sees the positions ``seen(o)`` of this tensor.

        ``seen(o + period)`` must be ``seen(o)`` moved by ``advance``. A position that sees nothing (between the taps of
        a transposed convolution) gets the field of its predecessor. None if the period becomes too long.
        """
        if advance == 0:
            return None
        repeat = self.period // math.gcd(advance, self.period)  # so that `repeat * advance` is whole periods of this
        if period * repeat > _LONGEST:
            return None
        lows, highs = list[int](), list[int]()
        for position in range(period * repeat):
            periods, phase = divmod(position, period)
            taps = [tap + periods * advance for tap in seen(phase)]
            if taps:
                lows.append(min(map(self.low, taps)))
                highs.append(max(map(self.high, taps)))
            elif lows:
                lows.append(lows[-1])
                highs.append(highs[-1])
        if not lows:
            return None
        missing = period * repeat - len(lows)  # the first positions see nothing: they get the first field
        lows, highs = lows[:1] * missing + lows, highs[:1] * missing + highs
        return _simplest(advance * repeat * self.advance // self.period, tuple(lows), tuple(highs))

    def through_window(self, window: Span) -> Span | None:
        """Return the fields of a result whose positions see the range ``window`` of this tensor; None if the period
        becomes too long."""
        return self.through(
            window.period, window.advance, lambda position: range(window.low(position), window.high(position) + 1)
        )

    def window(self, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> Span | None:
        """Return the receptive fields after a convolution or a pool."""
        taps = list(range(kernel))
        if kernel > 2 * self.period:  # the inner taps of a long kernel never decide a low or a high
            taps = [*taps[: self.period], *taps[-self.period :]]
        return self.through(period=1, advance=stride, seen=lambda _: [tap * dilation - padding for tap in taps])

    def transposed(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> Span | None:
        """Return the receptive fields after a transposed convolution. Its output ``o`` sees each position ``i`` with
        ``i * stride - padding + tap * dilation = o`` for some tap."""

        def seen(position: int) -> list[int]:
            targets = (position + padding - tap * dilation for tap in range(kernel))
            return [target // stride for target in targets if target % stride == 0]

        return self.through(stride, advance=1, seen=seen)

    def moved(self, offset: int, step: int = 1) -> Span | None:
        """Return the fields of a result whose position ``o`` is this tensor's position ``offset + step * o``."""
        return self.through(period=1, advance=step, seen=lambda _: [offset])

    def union(self, other: Span) -> Span | None:
        """Return the receptive fields of positions that see what both see, as after a sum; None if the period becomes
        too long. Both must have the same stride."""
        assert self.stride == other.stride, "spans of different strides are not joined"
        period = math.lcm(self.period, other.period)
        if period > _LONGEST:
            return None
        positions = range(period)
        return _simplest(
            self.advance * period // self.period,
            tuple(min(self.low(position), other.low(position)) for position in positions),
            tuple(max(self.high(position), other.high(position)) for position in positions),
        )


def _simplest(advance: int, lows: tuple[int, ...], highs: tuple[int, ...]) -> Span:
    """Return ``Span(advance, lows, highs)``, with a shorter period if one describes the same fields."""
    length = len(lows)
    for period in range(1, length):
        if length % period or advance * period % length:
            continue
        step = advance * period // length
        shifted = [
            all(values[i + period] == values[i] + step for i in range(length - period)) for values in (lows, highs)
        ]
        if all(shifted):
            return Span(step, lows[:period], highs[:period])
    return Span(advance, lows, highs)


IDENTITY = Span(1, (0,), (0,))
"""Every position sees itself only."""
