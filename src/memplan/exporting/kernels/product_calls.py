"""The C calls of matrix products and of kernels that compute weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memplan.exporting.kernels.call_writer import CallWriter
from memplan.exporting.kernels.frozen_weights import by_column
from memplan.exporting.lowering.device_graph import output_of, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref
from memplan.planning.graph.op_schema import arguments_of

FEWEST_ROWS = 3
"""Rows from which on a product or a convolution is computed in tiles of four; those with fewer go row by row."""
Emit = Callable[[CallWriter, GraphOp], list[str]]
"""Returns the C statements that run an op."""


def gradient_kernel(
    w: CallWriter, op: GraphOp, kernel: str, macros: Mapping[str, str] | None = None
) -> tuple[str, str, tuple[Any, ...]]:
    """Return the kernel that computes a weight's gradient, its first arguments in C, and those behind the input.

    For a fused update each element goes to the optimizer's update at once; otherwise all are written to memory.
    """
    gradient, (suffix, of_input, constants) = output_of(op), w.byte_input(op)
    of_input = of_input | dict(macros or {})
    if gradient in w.update_calls:
        update = w.update_calls[gradient]
        name = w.instance(kernel, f"{kernel}_{update.function}{suffix}", update.macros | of_input)
        return name, update.first, constants
    defines = {"TARGET": "float *out", "EMIT(k, g)": "out[k] = (g)"} | of_input
    return w.instance(kernel, f"{kernel}{suffix}", defines), w.pointer(gradient), constants


def tile(w: CallWriter, weight: str = "float") -> str:
    """Add the kernel of a tile for weights of a C type; return its name."""
    name = "tile" if weight == "float" else "tile_int8"
    return w.instance("tile", name, {"BODY": f"{name}_body", "FUSED": f"{name}_fma", "WEIGHT": weight})


def _sizes(w: CallWriter, a: Ref, b: Ref, bias: Any = None) -> tuple[int, ...]:
    """Return rows, columns and inner size of a product, then the two strides of a, of b and of the bias."""
    (rows, inner), (a_row, a_column) = w.shape(a)[-2:], w.value(a).stride[-2:]
    columns, (b_row, b_column) = w.shape(b)[-1], w.value(b).stride[-2:]
    steps = [0, 0]
    if isinstance(bias, Ref):
        value = w.value(bias)
        broadcast = [0 if size == 1 else step for size, step in zip(value.shape, value.stride, strict=True)]
        steps = [0] * (2 - len(broadcast)) + broadcast
    return rows, columns, inner, a_row, a_column, b_row, b_column, *steps


def _addmm(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a product with a bias."""
    arguments = arguments_of(op.target, op.args, op.kwargs)
    if (arguments.get("beta", 1), arguments.get("alpha", 1)) != (1, 1):
        raise refusal(op, " with alpha or beta", near="addmm without", do="Write beta * bias + alpha * (a @ b)")
    bias, a, b = op.args[:3]
    return [_matmul(w, op, a, b, bias)]


def _matmul(w: CallWriter, op: GraphOp, a: Ref, b: Ref, bias: Any) -> str:
    """Return the call of the product's kernel, in the variant for int8 where `b` is a quantized weight."""
    output, scales = Ref(output_of(op)), w.scales_of(b)
    if "bytes" in op.kwargs:
        suffix, defines, constants = w.byte_input(op)
        table = w.table("product", *_sizes(w, a, b, bias))
        return w.call(w.instance("matmul_bytes", f"matmul{suffix}", defines), output, a, *constants, b, bias, table)
    if scales is None:
        return _product(w, [w.pointer(ref) for ref in (output, a, b)], bias, _sizes(w, a, b, bias))
    by_columns = bool(by_column(w.graph, w.value(b)))
    table = w.table("product", *_sizes(w, a, b, bias))
    return w.call(w.kernel("matmul_int8"), output, a, b, scales, by_columns, bias, table)


def _product(w: CallWriter, pointers: Sequence[str], bias: Any, sizes: Sequence[int]) -> str:
    """Return the call of a product in float32, in tiles unless it has few rows or columns.

    Args:
        w: the writer.
        pointers: C for pointers to result, `a` and `b`.
        bias: of the product, or None.
        sizes: see `_sizes`.
    """
    rows, columns, inner, a_row, a_column, b_row, b_column, bias_row, bias_column = sizes
    if min(rows, columns) < FEWEST_ROWS:
        return w.call(w.kernel("matmul"), *pointers, bias, w.table("product", *sizes))
    tile(w)
    _fill_panel(w, suffix="", of_input={"INPUT": "float", "CONSTANTS": "", "VALUE(v, channel)": "(v)"})
    y, a, b = pointers
    if rows >= columns:
        return w.call(w.kernel("matmul_tiles"), y, a, b, bias, w.table("product", *sizes), columns, 1)
    transposed = (columns, rows, inner, b_column, b_row, a_column, a_row, bias_column, bias_row)
    return w.call(w.kernel("matmul_tiles"), y, b, a, bias, w.table("product", *transposed), 1, columns)


def _fill_panel(w: CallWriter, suffix: str, of_input: Mapping[str, str]) -> str:
    """Add the kernel that lays columns of a matrix in a panel; return its name."""
    return w.instance("fill_panel", f"fill_panel{suffix}", {k: v for k, v in of_input.items() if k != "FLOATS"})


def _mm(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a product; of a weight's gradient, the one that updates the weight if that is fused."""
    a, b = op.args
    if op.phase == "backward" and (op.outputs[0] in w.update_calls or "bytes" in op.kwargs):
        suffix, of_input, _ = w.byte_input(op)
        tile(w)
        fill = _fill_panel(w, suffix, of_input)
        given = "gain, offset, " if suffix else ""
        fills = {"FILL(to, b, deep, count, from, step, p)": f"{fill}(to, b, {given}deep, count, from, step, p)"}
        name, first, constants = gradient_kernel(w, op, "matmul_gradient", fills)
        return [w.call(name, first, a, b, *constants, w.table("product", *_sizes(w, a, b)))]
    return [_matmul(w, op, a, b, bias=None)]


def _bmm(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a product in a loop over the batch."""
    a, b = op.args[:2]
    rows, columns, *_ = sizes = _sizes(w, a, b)
    batch_strides = (rows * columns, w.value(a).stride[0], w.value(b).stride[0])
    refs = (Ref(output_of(op)), a, b)
    pointers = [f"{w.pointer(ref)} + i * {stride}" for ref, stride in zip(refs, batch_strides, strict=True)]
    call = _product(w, pointers, bias=None, sizes=sizes)
    return [f"for (int i = 0; i < {w.shape(a)[0]}; i++)", f"    {call}"]


PRODUCTS: dict[str, Emit] = {"aten.addmm.default": _addmm, "aten.mm.default": _mm, "aten.bmm.default": _bmm}
