"""The layers of the frozen part, with their real weights: each becomes one integer kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memplan.planning.graph.joint_graph import GraphOp


@dataclass
class Layer:
    """Ops of the graph that one integer kernel computes."""

    ops: list[GraphOp]
    operands: tuple[int, ...]
    """Values of the graph that it reads."""
    output: int
    """The value that it computes."""
    lower_bound: float = field(default=-math.inf, kw_only=True)
    """Of the result, set by an activation such as ReLU6."""
    upper_bound: float = field(default=math.inf, kw_only=True)

    BOUNDS: ClassVar[bool] = True
    """Whether its kernel can bound the result."""

    @property
    def can_bound(self) -> bool:
        """Whether an activation that bounds the result can be merged into the layer."""
        return self.BOUNDS

    def merge_bounds(self, op: GraphOp, low: float, high: float) -> None:
        """Merge an activation that bounds the result."""
        self.lower_bound, self.upper_bound = (
            min(max(self.lower_bound, low), high),
            max(min(self.upper_bound, high), low),
        )
        self.merge(op)

    def merge(self, op: GraphOp) -> None:
        """Merge an op that reads the result and nothing else of the graph: its result becomes that of the layer."""
        self.ops.append(op)
        assert op.outputs[0] is not None, "somebody reads it"
        self.output = op.outputs[0]


@dataclass
class ByteInput:
    """An input of eight bits that is read as ``factor * x + addend``, with a factor and an addend for each channel."""

    dtype: str
    factor: np.ndarray
    """float64, (channels,)."""
    addend: np.ndarray
    """float64, (channels,)."""


@dataclass
class Convolution(Layer):
    """A convolution over planes; a linear layer is one over planes of 1 x 1."""

    weight: np.ndarray
    """float64: (output channels, input channels of a group, kernel height, kernel width)."""
    bias: np.ndarray
    """float64: (output channels,)."""
    input_size: tuple[int, int]
    """Height and width."""
    output_size: tuple[int, int]
    """Height and width."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    byte_input: ByteInput | None = None
    """The input that it reads, if that is one of eight bits."""
    value_before_table: int | None = None
    """The operand of the activation that its kernel computes by table; None without such an activation."""

    @property
    def can_bound(self) -> bool:
        """Whether an activation that bounds the result can be merged: not behind a table."""
        return self.value_before_table is None

    @property
    def activation(self) -> GraphOp | None:
        """The op that is applied to the result by table."""
        return None if self.value_before_table is None else self.ops[-1]

    def merge_scale(self, op: GraphOp, factor: np.ndarray, addend: np.ndarray) -> None:
        """Merge an op that multiplies each channel by a factor and adds an addend."""
        self.weight = self.weight * factor.reshape(-1, 1, 1, 1)
        self.bias = self.bias * factor + addend
        self.merge(op)

    @property
    def scalable(self) -> bool:
        """Whether a factor and an addend can be folded into its weights."""
        return self.value_before_table is None and (self.lower_bound, self.upper_bound) == (-math.inf, math.inf)


@dataclass
class Add(Layer):
    """The first operand plus `factor` times the second."""

    factor: float


@dataclass
class Multiply(Layer):
    """A product; the second operand may have one element for each channel of the first one."""

    elements_per_factor: int
    """Elements of the first operand for each of the second one's."""


@dataclass
class Pool(Layer):
    """A pool over planes."""

    planes: int
    """Number of planes of all samples."""
    input_size: tuple[int, int]
    """Height and width."""
    output_size: tuple[int, int]
    """Height and width."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass
class AveragePool(Pool):
    """The sum of each window over a divisor."""

    divisor: int


@dataclass
class MaxPool(Pool):
    """The largest element of each window."""

    BOUNDS: ClassVar[bool] = False


@dataclass
class Activation(Layer):
    """A function of each element, by table."""

    BOUNDS: ClassVar[bool] = False


@dataclass
class View(Layer):
    """The same elements in another shape."""

    BOUNDS: ClassVar[bool] = False
