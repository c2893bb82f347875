"""The ops of integer kernels in a graph, and the sizes that they are called with."""

from __future__ import annotations

from dataclasses import dataclass

QUANTIZE = "memplan.int8_quantize.default"
"""Floats as int8: args are the floats, the reciprocal of the scale, and the zero point."""
DEQUANTIZE = "memplan.int8_dequantize.default"
"""Int8 as floats: args are the integers, the scale, and the zero point."""
CONVOLUTIONS = "memplan.int8_convolutions.default"
"""Convolutions one behind another, row by row: args are the input and, for each of them, (weight, rescale, zero points
or None, table or None, Stage), as in `integer_layers.IntegerLayer`. The second result is the memory of the rows between
them: for each stage but the last a ring of as many rows as the next stage reads at once."""
LOOKUP = "memplan.int8_lookup.default"
"""A table's element for each element: args are the integers and the table."""
ADD = "memplan.int8_add.default"
"""Args: both operands, then (zero point, multiplier) of each, shift, zero point of the result, and its bounds."""
MULTIPLY = "memplan.int8_multiply.default"
"""Args: both operands, their zero points, multiplier, shift, zero point of the result, its bounds, and the number of
elements of the first operand for each of the second."""
AVERAGE_POOL = "memplan.int8_average.default"
"""Args: the integers, the sizes of a pool, zero point, multiplier, shift, zero point of the result, and its bounds."""
MAX_POOL = "memplan.int8_largest.default"
"""Args: the integers, and the sizes of a pool."""

INT8_OPS = (QUANTIZE, DEQUANTIZE, CONVOLUTIONS, LOOKUP, ADD, MULTIPLY, AVERAGE_POOL, MAX_POOL)


@dataclass(frozen=True)
class Stage:
    """The sizes of a convolution in a pipeline of rows."""

    in_channels: int
    in_height: int
    in_width: int
    out_channels: int
    out_height: int
    out_width: int
    groups: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    input_zero_point: int
    """The integer that stands for 0 in what it reads."""
    result_zero_point: int
    """The same in its result."""
    lowest_result: int
    highest_result: int
    rows_in_memory: int = 0
    """Rows of its result that are in memory at once; 0: all, as of the last stage."""
    ring_start: int = 0
    """Offset in bytes of these rows in the memory of all rows between stages."""

    @property
    def rows_per_window(self) -> int:
        """Rows of the input from the first to the last one that a row of the result reads."""
        return (self.kernel[0] - 1) * self.dilation[0] + 1

    @property
    def multiplications(self) -> int:
        """Multiplications."""
        products = self.out_channels * self.out_height * self.out_width * self.in_channels // self.groups
        return products * self.kernel[0] * self.kernel[1]
