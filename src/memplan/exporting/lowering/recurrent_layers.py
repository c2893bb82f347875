"""nn.LSTM, nn.GRU and nn.RNN as ops that loop over time, in place of torch's fused ones.

A layer's input meets its weight in one product for all time steps; a loop adds the products with the state. Its op
keeps the activated gates (in the place of the gates), the states with the first one, and of an LSTM the cells, of a GRU
the state's part of the new gate. From these the gradient's op computes the gradients of all gates, which meet the
states in one product again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from memplan.planning.ops.custom_ops import define

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], tuple[Tensor, State, tuple[Tensor, ...]]]
"""From the input's and the state's part of the gates, and the state: the activated gates, the next state, and what else
the gradient reads."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer."""

    gates: int
    cell: Cell
    has_third_result: bool
    """Whether its op also returns what else the gradient reads of all steps: an LSTM's cells with the first one, or a
    GRU's state's part of the new gate."""


def _lstm(x: Tensor, h: Tensor, state: State) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    """A step of an LSTM, a `Cell`: x and h are the input's and the state's part of the gates, state is (h, c)."""
    i, f, g, o = (x + h).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * state[1] + i * g
    return torch.cat([i, f, g, o], 1), (o * cell.tanh(), cell), (cell,)


def _gru(x: Tensor, h: Tensor, state: State) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    """A step of a GRU, a `Cell`: x and h are the input's and the state's part of the gates (reset, update, new)."""
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return torch.cat([r, z, n], 1), (n + z * (state[0] - n),), (hn,)


def _tanh(x: Tensor, h: Tensor, state: State) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    y = (x + h).tanh()
    return y, (y,), ()


def _relu(x: Tensor, h: Tensor, state: State) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    y = (x + h).relu()
    return y, (y,), ()


KINDS: Mapping[str, Kind] = {
    "lstm": Kind(gates=4, cell=_lstm, has_third_result=True),
    "gru": Kind(gates=3, cell=_gru, has_third_result=True),
    "rnn_tanh": Kind(gates=1, cell=_tanh, has_third_result=False),
    "rnn_relu": Kind(gates=1, cell=_relu, has_third_result=False),
}
FORWARD = {f"memplan.{name}.default": name for name in KINDS}
"""Kinds by op: ``(gates, weight, bias, backwards, *state) -> (activated, states[, cells or gate])``."""
BACKWARD = {f"memplan.{name}_backward.default": name for name in KINDS}
"""Kinds by op: ``(activated, states, kept, weight, g, g_cells, backwards) -> (gates' gradients, those of the first
state...[, of the state's part of the new gate])``. ``kept``: the forward op's third result, None for an RNN."""


def _forward(name: str, gates: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool, *state: Tensor) -> State:
    """Run a direction of a layer over all time steps: the op's implementation in PyTorch.

    Args:
        name: kind of the layer, a key of `KINDS`.
        gates: the input's part of the gates, (steps, batch, gates * hidden).
        weight, bias: of the product with the state.
        backwards: whether time runs from the last step to the first.
        state: the first state: h, and c of an LSTM.

    Returns:
        The activated gates; the states, with the first state before (with `backwards` after) the others; of an LSTM
        the cells likewise, of a GRU the state's part of the new gate.
    """
    steps, kind = gates.shape[0], KINDS[name]
    activated, states, third = torch.empty_like(gates), *_empty_results(name, gates, state)
    order = range(steps - 1, -1, -1) if backwards else range(steps)
    # row of the first state; from the number of a step to the row of the state behind it
    first_row, shift = (steps, 0) if backwards else (0, 1)
    for rows, part in zip((states, third) if name == "lstm" else (states,), state, strict=True):
        rows[first_row] = part
    for t in order:
        state_gates = F.linear(state[0], weight, bias)
        activated[t], state, also_read = kind.cell(gates[t], state_gates, state)
        states[t + shift] = state[0]
        for value in also_read:
            third[t + shift if name == "lstm" else t] = value
    return (activated, states, third) if kind.has_third_result else (activated, states)


def _empty_results(name: str, gates: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return memory for the second and the third result of `_forward`: an LSTM's cells have a row more, for the
    first."""
    steps, size = gates.shape[0], tuple(state[0].shape)
    third_rows = steps + 1 if name == "lstm" else steps
    return gates.new_empty((steps + 1, *size)), gates.new_empty((third_rows, *size))


def _fake_forward(
    name: str, gates: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool, *state: Tensor
) -> State:  # fmt: skip
    states, third = _empty_results(name, gates, state)
    return (gates.new_empty(gates.shape), states, *([third] if KINDS[name].has_third_result else []))


def _fake_backward(
    name: str, activated: Tensor, states: Tensor, kept: Tensor | None, weight: Tensor, g: Tensor,
    g_cells: Tensor | None, backwards: bool,
) -> State:  # fmt: skip
    state = states.shape[1:]
    third_result = {"lstm": [state], "gru": [g.shape]}.get(name, [])  # gradient of the first cell; see `BACKWARD`
    return tuple(g.new_empty(shape) for shape in (activated.shape, state, *third_result))


def _not_run(*args: Any) -> State:
    raise NotImplementedError("gradients of recurrent layers are computed on devices")


for _name in KINDS:
    _state = "Tensor h, Tensor c" if _name == "lstm" else "Tensor h"
    _results = ", ".join(["Tensor"] * (3 if KINDS[_name].has_third_result else 2))
    _schema = f"{_name}(Tensor gates, Tensor weight, Tensor? bias, bool backwards, {_state}) -> ({_results})"
    define(_schema, partial(_fake_forward, _name))(partial(_forward, _name))
    # the backward op of the same kinds has a third result
    _schema = (
        f"{_name}_backward(Tensor activated, Tensor states, Tensor? kept, Tensor weight, Tensor g, Tensor? g_cells, "
        f"bool backwards) -> ({_results})"
    )
    define(_schema, partial(_fake_backward, _name))(_not_run)


class _Recurrence(torch.autograd.Function):
    """One direction of one layer: from the input's part of the gates and the first state, the states of all steps and,
    of an LSTM, the cells."""

    @staticmethod
    def forward(
        ctx: Any, name: str, backwards: bool, gates: Tensor, weight: Tensor, bias: Tensor | None, *state: Tensor
    ) -> State:  # fmt: skip
        """Compute all steps of a layer, and save what their derivative reads."""
        activated, states, *third = getattr(torch.ops.memplan, name)(gates, weight, bias, backwards, *state)
        ctx.save_for_backward(activated, states, weight, *third)
        ctx.name, ctx.backwards = name, backwards
        ctx.set_materialize_grads(False)
        first_step_row, steps = 0 if backwards else 1, gates.shape[0]  # without the row of the first state
        cells = third if name == "lstm" else []
        return tuple(rows.narrow(0, first_step_row, steps) for rows in (states, *cells))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        g, g_cells = (*gradients, None)[:2]  # only an LSTM returns cells
        activated, states, weight, *third = ctx.saved_tensors
        steps, batch, hidden = activated.shape[0], *states.shape[1:]
        g = states.new_zeros((steps, batch, hidden)) if g is None else g
        backward_op = getattr(torch.ops.memplan, f"{ctx.name}_backward")
        gates_gradient, *first_state_gradients = backward_op(
            activated, states, third[0] if third else None, weight, g, g_cells, ctx.backwards
        )
        state_gates_gradient = gates_gradient  # the gates are the sum of the input's and the state's part
        if ctx.name == "gru":  # except the new gate, in which the reset gate multiplies the state's part
            new_gate_gradient = first_state_gradients.pop()
            state_gates_gradient = torch.cat([gates_gradient[..., : 2 * hidden], new_gate_gradient], 2)
        state_gates_gradient = state_gates_gradient.reshape(steps * batch, -1)
        states_before = states.narrow(0, 1 if ctx.backwards else 0, steps).reshape(steps * batch, hidden)
        _, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight_gradient = torch.mm(state_gates_gradient.t(), states_before) if needs_weight else None
        bias_gradient = state_gates_gradient.sum(0) if needs_bias else None
        return None, None, gates_gradient, weight_gradient, bias_gradient, *first_state_gradients


def recurrent_functions() -> dict[str, Callable[..., Any]]:
    """Return functions with the arguments and results of ``torch._VF.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``."""
    return {name: partial(_layers, name) for name in KINDS}


def _layers(
    name: str, x: Tensor, state: Any, weights: Sequence[Tensor], bias: bool, layers: int, dropout: float,
    training: bool, both: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Run a recurrent module: return the outputs of its last layer, and the last state (h, and c of an LSTM).

    Arguments are those of ``torch._VF``'s functions, `both` for bidirectional. NotImplemented for an LSTM with
    projections, whose number of weights differs.
    """
    tensors_per_direction = 4 if bias else 2
    directions = 2 if both else 1
    first_state = tuple(state) if name == "lstm" else (state,)  # each of shape (layers * directions, batch, hidden)
    if len(weights) != layers * directions * tensors_per_direction:
        return NotImplemented
    x = x.transpose(0, 1) if batch_first else x
    last_states = list[State]()
    for layer in range(layers):
        if layer and dropout:
            x = F.dropout(x, dropout, training)
        outputs = list[Tensor]()
        for direction in range(directions):
            row = layer * directions + direction
            w_input, w_state, *biases = weights[row * tensors_per_direction : (row + 1) * tensors_per_direction]
            b_input, b_state = biases or (None, None)
            steps, batch = x.shape[:2]
            gates = F.linear(x.reshape(steps * batch, -1), w_input, b_input).view(steps, batch, -1)
            begin = [part[row] for part in first_state]
            states: State = _Recurrence.apply(name, bool(direction), gates, w_state, b_state, *begin)
            outputs.append(states[0])
            last_step = 0 if direction else -1  # the second direction ends at step 0
            last_states.append(tuple(rows[last_step] for rows in states))
        x = torch.cat(outputs, 2) if both else outputs[0]
    stacked = tuple(torch.stack(parts) for parts in zip(*last_states, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *stacked)
