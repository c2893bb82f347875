"""The C calls of recurrent layers."""

from __future__ import annotations

from memplan.exporting.kernels.call_writer import CallWriter
from memplan.exporting.kernels.product_calls import WriteCalls
from memplan.exporting.lowering.recurrent_layers import BACKWARD, FORWARD
from memplan.planning.graph.joint_graph import GraphOp, Ref

_MACROS = {
    "rnn_tanh": {"ACTIVATED(a)": "tanhf(a)", "SLOPE(y)": "(1 - (y) * (y))"},
    "rnn_relu": {"ACTIVATED(a)": "((a) > 0 ? (a) : 0)", "SLOPE(y)": "(float)((y) > 0)"},
}


def _kernel(w: CallWriter, kind: str, suffix: str = "") -> str:
    """Add the kernel of a kind of layer ("lstm", "gru", "rnn_tanh", "rnn_relu") to the program; return its C name.
    The suffix "_backward" selects the gradient's kernel."""
    if kind in _MACROS:
        return w.instance(f"rnn{suffix}", f"{kind}{suffix}", _MACROS[kind])
    w.element_function("sigmoid")
    return w.kernel(f"{kind}{suffix}")


def _forward(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of one direction of a layer."""
    gates, _, _, _, state, *_ = op.args
    sizes = (w.shape(gates)[0], *w.shape(state))  # steps, batch, hidden
    results = [Ref(output) for output in op.outputs if output is not None]
    return [w.call(_kernel(w, FORWARD[op.target]), *results, *op.args, *sizes)]


def _backward(w: CallWriter, op: GraphOp) -> list[str]:
    """Call the kernel of the gradient of one direction of a layer. Each kind reads other results of the forward
    pass."""
    kind = BACKWARD[op.target]
    activated, states, third_result, weight, g, g_cells, backwards = op.args
    operands = {
        "lstm": (activated, third_result, weight, g, g_cells), "gru": (activated, states, third_result, weight, g),
    }.get(kind, (activated, weight, g))  # fmt: skip
    results = [Ref(output) for output in op.outputs if output is not None]
    return [w.call(_kernel(w, kind, "_backward"), *results, *operands, backwards, *w.shape(g))]


RECURRENT: dict[str, WriteCalls] = {**dict.fromkeys(FORWARD, _forward), **dict.fromkeys(BACKWARD, _backward)}
