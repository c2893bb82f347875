"""The C calls of integer kernels."""

from __future__ import annotations

import math
from typing import Any

from memplan.exporting.int8.int8_ops import (
    ADD,
    AVERAGE_POOL,
    CONVOLUTIONS,
    DEQUANTIZE,
    LOOKUP,
    MAX_POOL,
    MULTIPLY,
    QUANTIZE,
    Stage,
)
from memplan.exporting.kernels.call_writer import C_BYTES, CallWriter
from memplan.exporting.kernels.product_calls import WriteCalls
from memplan.exporting.lowering.device_graph import first_output
from memplan.planning.graph.joint_graph import GraphOp, Ref


def _elementwise(kernel: str) -> WriteCalls:
    """Return the function that writes the call of a kernel with the op's result, arguments and number of elements."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        output = Ref(first_output(op))
        return [w.call(w.kernel(kernel), output, *op.args, math.prod(w.shape(output)))]

    return emit


def _pool(kernel: str) -> WriteCalls:
    """Return the function that writes the call of an integer pool's kernel."""

    def emit(w: CallWriter, op: GraphOp) -> list[str]:
        x, pool_sizes, *rescaling = op.args
        return [w.call(w.kernel(kernel), Ref(first_output(op)), x, w.table("pool", *pool_sizes), *rescaling)]

    return emit


def _convolutions(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a linear layer, or that of a chain of convolutions.

    The op's second output is the memory for the rows between the convolutions, None for a single one.
    """
    x, *stages = op.args
    output, rings = (None if value is None else Ref(value) for value in op.outputs)
    input_type = {"INPUT": C_BYTES[w.value(x).dtype]}
    suffix = "_of_uint8" if input_type["INPUT"].startswith("unsigned") else ""
    structs = w.array("int8_stage", [_stage_members(w, *stage) for stage in stages])
    first: Stage = stages[0][-1]
    batch = math.prod(w.shape(x)) // (first.in_channels * first.in_height * first.in_width)
    is_linear = (first.out_height, first.out_width, *first.kernel) == (1, 1, 1, 1) and first.groups == 1
    if len(stages) == 1 and is_linear:
        name = w.instance("int8_linear", f"int8_linear{suffix}", input_type)
        return [w.call(name, output, x, structs, batch)]
    row_kernels = {
        "FIRST_ROW": _row_kernel(w, suffix, input_type),
        "ROW": _row_kernel(w, suffix="", input_type={"INPUT": "signed char"}),  # of later stages, which read int8
    }
    name = w.instance("int8_convolutions", f"int8_convolutions{suffix}", input_type | row_kernels)
    return [w.call(name, output, rings, x, structs, len(stages), batch)]


def _row_kernel(w: CallWriter, suffix: str, input_type: dict[str, str]) -> str:
    """Add the kernel that computes a row of a convolution, and those for four elements and for one that it calls.

    Return its C name. `input_type` has the macro for the type of the input, `suffix` tells the variants apart.
    """
    parts = {
        part: w.instance(f"int8_{part.lower()}", f"int8_{part.lower()}{suffix}", input_type) for part in ("FOUR", "ONE")
    }
    return w.instance("int8_row", f"int8_row{suffix}", input_type | parts)


def _stage_members(
    w: CallWriter, weight: Ref, rescale: Ref, zeros: Ref | None, table: Ref | None, stage: Stage
) -> list[Any]:
    """Return the members of the C struct of a convolution in a chain: pointers to its constants, and its sizes.

    Constants that are None become null pointers.
    """
    groups = stage.groups
    return [
        *map(w.pointer, (weight, rescale, zeros, table)), stage.in_channels // groups, stage.in_height, stage.in_width,
        stage.out_channels, stage.out_channels // groups, stage.out_height, stage.out_width, *stage.kernel,
        *stage.stride, *stage.padding, *stage.dilation, stage.input_zero_point, stage.result_zero_point,
        stage.lowest_result, stage.highest_result, stage.rows_in_memory or stage.out_height, stage.ring_start,
        stage.in_channels * stage.in_height * stage.in_width,
    ]  # fmt: skip


INT8: dict[str, WriteCalls] = {
    QUANTIZE: _elementwise("int8_quantize"),
    DEQUANTIZE: _elementwise("int8_dequantize"),
    LOOKUP: _elementwise("int8_lookup"),
    ADD: _elementwise("int8_add"),
    MULTIPLY: _elementwise("int8_multiply"),
    AVERAGE_POOL: _pool("int8_average"),
    MAX_POOL: _pool("int8_largest"),
    CONVOLUTIONS: _convolutions,
}
