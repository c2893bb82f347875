"""The calls of matrix products, and what writes a gradient element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.exporting.kernels.call_writer import CallWriter
from memplan.exporting.kernels.frozen_weights import by_column
from memplan.exporting.lowering.device_graph import refusal
from memplan.planning.graph.joint_graph import GraphOp, Ref
from memplan.planning.graph.op_schema import arguments_of

Emit = Callable[[CallWriter, GraphOp], list[str]]


def result_of(op: GraphOp) -> int:
    """Return an op's first result."""
    assert op.outputs[0] is not None, "somebody reads it"
    return op.outputs[0]


def emitting(w: CallWriter, op: GraphOp, source: str, name: str) -> tuple[str, str]:
    """Return a kernel that hands on each element, and its first arguments: what applies a gradient, or its memory."""
    gradient = op.outputs[0]
    assert gradient is not None, "somebody reads it"
    if gradient in w.emits:
        function, first = w.emits[gradient]
        state = first.partition(",")[0].strip()
        defines = {"TARGET": f"STATE *{state}, int at", "EMIT(k, g)": f"{function}({state}, at + (k), g)"}
        return w.instance(source, f"{name}_{function}", defines), first
    defines = {"TARGET": "float *out", "EMIT(k, g)": "out[k] = (g)"}
    return w.instance(source, name, defines), w.at(gradient)


def _product(w: CallWriter, a: Ref, b: Ref, bias: Any = None) -> tuple[int, ...]:
    (rows, inner), (a_row, a_column) = w.shape(a)[-2:], w.value(a).stride[-2:]
    columns, (b_row, b_column) = w.shape(b)[-1], w.value(b).stride[-2:]
    steps = (0, 0)
    if isinstance(bias, Ref):
        found = w.value(bias)
        own = [0 if size == 1 else step for size, step in zip(found.shape, found.stride, strict=True)]
        steps = tuple([0] * (2 - len(own)) + own)
    return rows, columns, inner, a_row, a_column, b_row, b_column, *steps


def _addmm(w: CallWriter, op: GraphOp) -> list[str]:
    given = arguments_of(op.target, op.args, op.kwargs)
    if (given.get("beta", 1), given.get("alpha", 1)) != (1, 1):
        raise refusal(op, " with alpha or beta", near="addmm without")
    bias, a, b = op.args[:3]
    table = w.table("product", *_product(w, a, b, bias))
    return [_matmul(w, Ref(result_of(op)), a, b, bias, table)]


def _matmul(w: CallWriter, made: Ref, a: Ref, b: Ref, bias: Any, table: str) -> str:
    scales = w.scales_of(b)
    if scales is None:
        return w.call(w.kernel("matmul"), made, a, b, bias, table)
    return w.call(w.kernel("matmul_int8"), made, a, b, scales, bool(by_column(w.graph, w.value(b))), bias, table)


def _mm(w: CallWriter, op: GraphOp) -> list[str]:
    a, b = op.args
    table = w.table("product", *_product(w, a, b))
    if op.phase == "backward" and op.outputs[0] in w.emits:
        name, first = emitting(w, op, "matmul_gradient", "matmul_gradient")
        return [w.call(name, first, a, b, table)]
    return [_matmul(w, Ref(result_of(op)), a, b, None, table)]


def _bmm(w: CallWriter, op: GraphOp) -> list[str]:
    a, b = op.args[:2]
    rows, columns, *_ = sizes = _product(w, a, b)
    table = w.table("product", *sizes)
    name, made, count = w.kernel("matmul"), Ref(result_of(op)), w.shape(a)[0]
    steps = (rows * columns, w.value(a).stride[0], w.value(b).stride[0])
    to, one, two = (f"{w.at(ref)} + i * {step}" for ref, step in zip((made, a, b), steps, strict=True))
    return [f"for (int i = 0; i < {count}; i++)", f"    {w.call(name, to, one, two, None, table)}"]


PRODUCTS: dict[str, Emit] = {"aten.addmm.default": _addmm, "aten.mm.default": _mm, "aten.bmm.default": _bmm}
