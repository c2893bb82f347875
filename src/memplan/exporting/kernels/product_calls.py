"""The C calls of matrix products and of kernels that compute weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from memplan.exporting.kernels.call_writer import CallWriter
from memplan.exporting.kernels.frozen_weights import scales_are_by_column
from memplan.exporting.lowering.device_graph import first_output, refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref
from memplan.planning.graph.op_schema import arguments_of

FEWEST_TILED_ROWS = 3
"""Rows from which on a product or a convolution is computed in tiles of four; those with fewer go row by row."""
WriteCalls = Callable[[CallWriter, GraphOp], list[str]]
"""Returns the C statements that run an op."""


def gradient_kernel(
    w: CallWriter, op: GraphOp, kernel: str, macros: Mapping[str, str] | None = None
) -> tuple[str, str, tuple[Any, ...]]:
    """Add the kernel that computes a weight's gradient, an instance of template `kernel` with these macros defined.

    For a fused update each element goes to the optimizer's update at once; otherwise all are written to memory.

    Returns:
        Its C name; C for the arguments that it takes before its operands, where elements go; and those that it takes
        behind them, factor and addend of an input in bytes.
    """
    gradient, (suffix, input_macros, factor_and_addend) = first_output(op), w.byte_input(op)
    macros = input_macros | dict(macros or {})
    if gradient in w.update_calls:
        update = w.update_calls[gradient]
        name = w.instance(kernel, f"{kernel}_{update.function}{suffix}", update.macros | macros)
        return name, update.arguments, factor_and_addend
    to_memory = {"TARGET": "float *out", "EMIT(k, g)": "out[k] = (g)"}
    return w.instance(kernel, f"{kernel}{suffix}", to_memory | macros), w.pointer(gradient), factor_and_addend


def tile_kernel(w: CallWriter, weight_type: str = "float") -> str:
    """Add the kernel that multiplies a tile of a matrix of C type `weight_type` by a panel; return its name."""
    name = "tile" if weight_type == "float" else "tile_int8"
    return w.instance("tile", name, {"BODY": f"{name}_body", "FUSED": f"{name}_fma", "WEIGHT": weight_type})


class _ProductSizes(NamedTuple):
    """Members of the C struct of a product of a and b: sizes, then strides of the operands and of the bias."""

    rows: int
    columns: int
    inner: int
    a_row: int
    a_column: int
    b_row: int
    b_column: int
    bias_row: int = 0
    bias_column: int = 0

    @property
    def transposed(self) -> _ProductSizes:
        """Sizes of the product of b transposed and a transposed, whose result is the transpose."""
        return _ProductSizes(
            self.columns, self.rows, self.inner, a_row=self.b_column, a_column=self.b_row, b_row=self.a_column,
            b_column=self.a_row, bias_row=self.bias_column, bias_column=self.bias_row,
        )  # fmt: skip


def _sizes(w: CallWriter, a: Ref, b: Ref, bias: Any = None) -> _ProductSizes:
    """Return the sizes of a product over the last two dimensions, with a bias that is broadcast to the result."""
    (rows, inner), (a_row, a_column) = w.shape(a)[-2:], w.value(a).stride[-2:]
    columns, (b_row, b_column) = w.shape(b)[-1], w.value(b).stride[-2:]
    sizes = _ProductSizes(rows, columns, inner, a_row, a_column, b_row, b_column)
    if not isinstance(bias, Ref):
        return sizes
    value = w.value(bias)
    broadcast = [0 if size == 1 else stride for size, stride in zip(value.shape, value.stride, strict=True)]
    bias_row, bias_column = [0] * (2 - len(broadcast)) + broadcast
    return sizes._replace(bias_row=bias_row, bias_column=bias_column)


def _addmm(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a product with a bias. Raises RecordingError with alpha or beta."""
    arguments = arguments_of(op.target, op.args, op.kwargs)
    if (arguments.get("beta", 1), arguments.get("alpha", 1)) != (1, 1):
        raise refusal(op, " with alpha or beta", near="addmm without", do="Write beta * bias + alpha * (a @ b)")
    bias, a, b = op.args[:3]
    return [_matmul(w, op, a, b, bias)]


def _matmul(w: CallWriter, op: GraphOp, a: Ref, b: Ref, bias: Any) -> str:
    """Return the call of the product's kernel, in the variant for int8 where `b` is a quantized weight."""
    output, scales = Ref(first_output(op)), w.scales_of(b)
    if "bytes" in op.kwargs:
        suffix, macros, factor_and_addend = w.byte_input(op)
        table = w.table("product", *_sizes(w, a, b, bias))
        kernel = w.instance("matmul_bytes", f"matmul{suffix}", macros)
        return w.call(kernel, output, a, *factor_and_addend, b, bias, table)
    if scales is None:
        return _product(w, [w.pointer(ref) for ref in (output, a, b)], bias, _sizes(w, a, b, bias))
    by_columns = bool(scales_are_by_column(w.graph, w.value(b)))
    table = w.table("product", *_sizes(w, a, b, bias))
    return w.call(w.kernel("matmul_int8"), output, a, b, scales, by_columns, bias, table)


def _product(w: CallWriter, pointers: Sequence[str], bias: Any, sizes: _ProductSizes) -> str:
    """Return the call of a product in float32, in tiles unless it has few rows or columns.

    `pointers` are C for pointers to result, `a` and `b`.
    """
    if min(sizes.rows, sizes.columns) < FEWEST_TILED_ROWS:
        return w.call(w.kernel("matmul"), *pointers, bias, w.table("product", *sizes))
    tile_kernel(w)
    _fill_panel(w, suffix="", input_macros={"INPUT": "float", "CONSTANTS": "", "VALUE(v, channel)": "(v)"})
    y, a, b = pointers
    y_row, y_column = sizes.columns, 1
    if sizes.rows >= sizes.columns:
        return w.call(w.kernel("matmul_tiles"), y, a, b, bias, w.table("product", *sizes), y_row, y_column)
    # tiles share a panel along rows: of a wide result the transpose is computed, into the same memory
    return w.call(w.kernel("matmul_tiles"), y, b, a, bias, w.table("product", *sizes.transposed), y_column, y_row)


def _fill_panel(w: CallWriter, suffix: str, input_macros: Mapping[str, str]) -> str:
    """Add the kernel that lays columns of a matrix in a panel; return its name."""
    macros = {name: body for name, body in input_macros.items() if name != "FLOATS"}  # which it has no use for
    return w.instance("fill_panel", f"fill_panel{suffix}", macros)


def _mm(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a product; of a weight's gradient, the one that updates the weight if that is fused."""
    a, b = op.args
    if op.phase == "backward" and (op.outputs[0] in w.update_calls or "bytes" in op.kwargs):
        suffix, input_macros, _ = w.byte_input(op)
        tile_kernel(w)
        fill = _fill_panel(w, suffix, input_macros)
        constants = "gain, offset, " if suffix else ""
        fill_macro = {
            "FILL(to, b, deep, count, from, step, p)": f"{fill}(to, b, {constants}deep, count, from, step, p)"
        }
        name, target, factor_and_addend = gradient_kernel(w, op, "matmul_gradient", fill_macro)
        return [w.call(name, target, a, b, *factor_and_addend, w.table("product", *_sizes(w, a, b)))]
    return [_matmul(w, op, a, b, bias=None)]


def _bmm(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of a product in a loop over the batch."""
    a, b = op.args[:2]
    sizes = _sizes(w, a, b)
    batch_strides = (sizes.rows * sizes.columns, w.value(a).stride[0], w.value(b).stride[0])
    refs = (Ref(first_output(op)), a, b)
    pointers = [f"{w.pointer(ref)} + i * {stride}" for ref, stride in zip(refs, batch_strides, strict=True)]
    call = _product(w, pointers, bias=None, sizes=sizes)
    return [f"for (int i = 0; i < {w.shape(a)[0]}; i++)", f"    {call}"]


PRODUCTS: dict[str, WriteCalls] = {"aten.addmm.default": _addmm, "aten.mm.default": _mm, "aten.bmm.default": _bmm}
