"""The ops of integer kernels in a graph, and the sizes that they are called with."""

from __future__ import annotations

from dataclasses import dataclass

QUANTIZE = "memplan.int8_quantize.default"
"""Floats as int8: args are the floats, the reciprocal of the scale, and the zero."""
DEQUANTIZE = "memplan.int8_dequantize.default"
"""Int8 as floats: args are the integers, the scale, and the zero."""
CONVOLUTIONS = "memplan.int8_convolutions.default"
"""Convolutions one behind another, row by row: args are the input and, for each of them, (weight, rescale, zeros or
None, table or None, Stage). The second result holds the rows between them."""
LOOKUP = "memplan.int8_lookup.default"
"""A table's element for each element: args are the integers and the table."""
ADD = "memplan.int8_add.default"
"""Args: both operands, then (zero, multiplier) of each, shift, zero of the result, and its bounds."""
MULTIPLY = "memplan.int8_multiply.default"
"""Args: both operands, their zeros, multiplier, shift, zero of the result, its bounds, and the number of elements of
the first operand for each of the second."""
AVERAGE = "memplan.int8_average.default"
"""Args: the integers, the sizes of a pool, zero, multiplier, shift, zero of the result, and its bounds."""
LARGEST = "memplan.int8_largest.default"
"""Args: the integers, and the sizes of a pool."""

INT8_OPS = (QUANTIZE, DEQUANTIZE, CONVOLUTIONS, LOOKUP, ADD, MULTIPLY, AVERAGE, LARGEST)


@dataclass(frozen=True)
class Stage:
    """The sizes of a convolution in a pipeline of rows."""

    channels: int
    """Of what it reads; `height` and `width` likewise."""
    height: int
    width: int
    wide: int
    """Channels of its result; `rows` and `columns` likewise."""
    rows: int
    columns: int
    groups: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    zero: int
    """The integer that stands for 0 in what it reads."""
    result_zero: int
    """The same in its result."""
    low: int
    high: int
    """Bounds of the result's integers."""
    kept: int = 0
    """Rows of its result that are in memory at once; 0: all, as of the last stage."""
    start: int = 0
    """Where these begin, in bytes from the first one."""

    @property
    def reach(self) -> int:
        """Rows from the first to the last one that a row of the result reads."""
        return (self.kernel[0] - 1) * self.dilation[0] + 1

    @property
    def work(self) -> int:
        """Multiplications."""
        products = self.wide * self.rows * self.columns * self.channels // self.groups
        return products * self.kernel[0] * self.kernel[1]
