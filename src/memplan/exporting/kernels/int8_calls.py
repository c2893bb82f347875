"""The C calls of integer kernels."""

from __future__ import annotations

import math
from typing import Any

from memplan.exporting.int8.int8_ops import (
    ADD,
    AVERAGE,
    CONVOLUTIONS,
    DEQUANTIZE,
    LARGEST,
    LOOKUP,
    MULTIPLY,
    QUANTIZE,
    Stage,
)
from memplan.exporting.kernels.call_writer import C_BYTES, CallWriter
from memplan.exporting.kernels.product_calls import Emit
from memplan.exporting.lowering.device_graph import output_of
from memplan.planning.graph.joint_graph import GraphOp, Ref


def _each(kernel: str) -> Emit:
    """Return the function that writes the call of a kernel with the op's result, arguments and number of elements."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        output = Ref(output_of(op))
        return [w.call(w.kernel(kernel), output, *op.args, math.prod(w.shape(output)))]

    return emit


def _pool(kernel: str) -> Emit:
    """Return the function that writes the call of an integer pool's kernel."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        x, sizes, *numbers = op.args
        return [w.call(w.kernel(kernel), Ref(output_of(op)), x, w.table("pool", *sizes), *numbers)]

    return emit


def _convolutions(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a linear layer, or that of a chain of convolutions.

    The op's second output is the memory for the rows between the convolutions, None for a single one.
    """
    x, *stages = op.args
    output, rings = (None if value is None else Ref(value) for value in op.outputs)
    define = {"INPUT": C_BYTES[w.value(x).dtype]}
    suffix = "_of_uint8" if define["INPUT"].startswith("unsigned") else ""
    rows = [_row(w, *stage) for stage in stages]
    first: Stage = stages[0][-1]
    batch = math.prod(w.shape(x)) // (first.channels * first.height * first.width)
    if len(stages) == 1 and (first.rows, first.columns, *first.kernel) == (1, 1, 1, 1) and first.groups == 1:
        name = w.instance("int8_linear", f"int8_linear{suffix}", define)
        return [w.call(name, output, x, w.array("int8_stage", rows), batch)]
    first_row = _row_kernel(w, suffix, define)
    macros = define | {"FIRST_ROW": first_row, "ROW": _row_kernel(w, suffix="", define={"INPUT": "signed char"})}
    name = w.instance("int8_convolutions", f"int8_convolutions{suffix}", macros)
    return [w.call(name, output, rings, x, w.array("int8_stage", rows), len(stages), batch)]


def _row_kernel(w: CallWriter, suffix: str, define: dict[str, str]) -> str:
    """Add the kernel that computes a row of a convolution, and those for four elements and for one that it calls.

    Return its C name. `define` has the macros for the type of the input, `suffix` tells the variants apart.
    """
    parts = {
        part: w.instance(f"int8_{part.lower()}", f"int8_{part.lower()}{suffix}", define) for part in ("FOUR", "ONE")
    }
    return w.instance("int8_row", f"int8_row{suffix}", define | parts)


def _row(w: CallWriter, weight: Ref, rescale: Ref, zeros: Ref | None, table: Ref | None, stage: Stage) -> list[Any]:
    """Return the members of the C struct of a convolution in a chain: pointers to its constants, and its sizes."""
    groups = stage.groups
    return [
        *map(w.pointer, (weight, rescale, zeros, table)), stage.channels // groups, stage.height, stage.width,
        stage.wide, stage.wide // groups, stage.rows, stage.columns, *stage.kernel, *stage.stride, *stage.padding,
        *stage.dilation, stage.zero, stage.result_zero, stage.low, stage.high, stage.kept or stage.rows, stage.start,
        stage.channels * stage.height * stage.width,
    ]  # fmt: skip


INT8: dict[str, Emit] = {
    QUANTIZE: _each("int8_quantize"),
    DEQUANTIZE: _each("int8_dequantize"),
    LOOKUP: _each("int8_lookup"),
    ADD: _each("int8_add"),
    MULTIPLY: _each("int8_multiply"),
    AVERAGE: _pool("int8_average"),
    LARGEST: _pool("int8_largest"),
    CONVOLUTIONS: _convolutions,
}
