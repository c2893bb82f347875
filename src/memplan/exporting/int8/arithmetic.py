"""Integers in place of real numbers: affine types of eight bits, and products with a real number by multiply and shift.

As in Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference
(CVPR 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LOWEST, HIGHEST = -128, 127
LARGEST_WEIGHT = 127
"""Largest magnitude of a weight; -128 is not used."""


@dataclass(frozen=True, slots=True)
class Affine:
    """The real numbers ``scale * (q - zero_point)`` of integers q from -128 to 127."""

    scale: float
    """Exact in float32."""
    zero_point: int
    """The integer that stands for 0."""

    @classmethod
    def of_range(cls, low: float, high: float) -> Affine:
        """Return the type that covers a range and has an integer for 0."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = float(np.float32((high - low) / (HIGHEST - LOWEST)))
        if not scale > 0:  # a range of 0 alone, or one that is 0 in float32
            return cls(1.0, 0)
        return cls(scale, int(np.clip(round(LOWEST - low / scale), LOWEST, HIGHEST)))

    def integers(self, real: np.ndarray) -> np.ndarray:
        """Return real numbers rounded to int8, half to even."""
        return np.clip(np.rint(real / self.scale) + self.zero_point, LOWEST, HIGHEST).astype(np.int8)

    def integer_at(self, real: float) -> int:
        """Return the integer that stands for a real number, the lowest or highest for one outside of the range."""
        return int(np.clip(np.rint(real / self.scale) + self.zero_point, LOWEST, HIGHEST))

    def rounded_inputs(self, floats: np.ndarray) -> np.ndarray:
        """Return inputs in float32 as int8, bit for bit as the device's kernel does: it multiplies by the reciprocal of
        the scale and rounds half away from 0."""
        scaled = np.clip(
            floats.astype(np.float32) * self.reciprocal, LOWEST - self.zero_point, HIGHEST - self.zero_point
        )
        truncated = np.trunc(scaled)
        fraction = scaled - truncated
        rounded = truncated + (fraction >= 0.5) - (fraction <= -0.5).astype(np.float32)
        return (rounded + self.zero_point).astype(np.int8)

    @property
    def reciprocal(self) -> np.float32:
        """1 / scale in float32."""
        return np.float32(1.0 / self.scale)

    def floats(self, integers: np.ndarray) -> np.ndarray:
        """Return int8 as float32, as the device computes it."""
        return np.float32(self.scale) * (integers.astype(np.int32) - self.zero_point).astype(np.float32)


def multiplier(real: float) -> tuple[int, int]:
    """Return (m, shift) with ``m / 2 ** shift`` near a non-negative number below 2 ** 30; m < 2 ** 31, 0 < shift < 63.

    Raises:
        OverflowError: the number is larger.

    Example:
        >>> multiplier(0.75)
        (1610612736, 31)
    """
    if real <= 0:
        return 0, 1
    fraction, exponent = math.frexp(real)  # fraction from 0.5 to below 1
    m, shift = round(fraction * 2**31), 31 - exponent
    if m == 2**31:  # the fraction was rounded up to 1
        m, shift = 2**30, shift - 1
    if shift > 62:  # so small a number has fewer digits
        m, shift = m >> min(shift - 62, 31), 62
    if shift <= 0:
        raise OverflowError(f"{real} is not below 2 ** 30")
    return m, shift


def shifted_right(products: np.ndarray, shifts: np.ndarray | int) -> np.ndarray:
    """Return int64 products over ``2 ** shift``, rounded half up."""
    shifts = np.asarray(shifts, np.int64)
    return (products + (np.int64(1) << (shifts - 1))) >> shifts
