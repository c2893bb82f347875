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
    keeps: bool
    """Whether its op has a third result: cells with the first one, or the state's part of a gate."""


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
    "lstm": Kind(gates=4, cell=_lstm, keeps=True),
    "gru": Kind(gates=3, cell=_gru, keeps=True),
    "rnn_tanh": Kind(gates=1, cell=_tanh, keeps=False),
    "rnn_relu": Kind(gates=1, cell=_relu, keeps=False),
}
FORWARD = {f"memplan.{name}.default": name for name in KINDS}
"""Kinds by op: ``(gates, weight, bias, backwards, *state) -> (activated, states[, cells or gate])``."""
BACKWARD = {f"memplan.{name}_backward.default": name for name in KINDS}
"""Kinds by op: ``(activated, states, kept, weight, g, g_cells, backwards) -> (gates' gradients, those of the first
state...[, of the state's part of the new gate])``."""


def _forward(name: str, gates: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool, *state: Tensor) -> State:
    """Run a direction of a layer over all time steps: the op's implementation in PyTorch.

    Args:
        name: kind of the layer, a key of `KINDS`.
        gates: the input's part of the gates, (steps, batch, gates * hidden).
        weight, bias: of the product with the state.
        backwards: whether time runs from the last step to the first.
        state: the first state: h, and c of an LSTM.

    Returns:
        The activated gates; the states, with the first state before (with `backwards` after) the others; and, if the
        kind keeps more for its gradient, that: an LSTM's cells likewise, a GRU's state's part of the new gate.
    """
    steps, kind = gates.shape[0], KINDS[name]
    activated, states, kept = torch.empty_like(gates), *_stores(name, gates, state)
    order = range(steps - 1, -1, -1) if backwards else range(steps)
    first, shift = (steps, 0) if backwards else (0, 1)
    now = state
    for store, part in zip((states, kept) if name == "lstm" else (states,), state, strict=True):
        store[first] = part
    for t in order:
        activated[t], now, more = kind.cell(gates[t], F.linear(now[0], weight, bias), now)
        states[t + shift] = now[0]
        for value in more:
            kept[t + shift if name == "lstm" else t] = value
    return (activated, states, kept) if kind.keeps else (activated, states)


def _stores(name: str, gates: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return memory for the states of all steps and the first one, and for the third result of the op, which an LSTM
    also has of the first state."""
    steps, size = gates.shape[0], tuple(state[0].shape)
    return gates.new_empty((steps + 1, *size)), gates.new_empty((steps + (name == "lstm"), *size))


def _fake_forward(
    name: str, gates: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool, *state: Tensor
) -> State:  # fmt: skip
    stores = _stores(name, gates, state)
    return (gates.new_empty(gates.shape), *stores[: 1 + KINDS[name].keeps])


def _fake_backward(
    name: str, activated: Tensor, states: Tensor, kept: Tensor | None, weight: Tensor, g: Tensor,
    g_cells: Tensor | None, backwards: bool,
) -> State:  # fmt: skip
    state, more = states.shape[1:], {"lstm": [states.shape[1:]], "gru": [g.shape]}.get(name, [])
    return tuple(g.new_empty(shape) for shape in (activated.shape, state, *more))


def _not_run(*args: Any) -> State:
    raise NotImplementedError("gradients of recurrent layers are computed on devices")


for _name in KINDS:
    _state = "Tensor h, Tensor c" if _name == "lstm" else "Tensor h"
    _results = ", ".join(["Tensor"] * (2 + KINDS[_name].keeps))
    _schema = f"{_name}(Tensor gates, Tensor weight, Tensor? bias, bool backwards, {_state}) -> ({_results})"
    define(_schema, partial(_fake_forward, _name))(partial(_forward, _name))
    _results = ", ".join(["Tensor"] * (2 if _name.startswith("rnn") else 3))
    _schema = (
        f"{_name}_backward(Tensor activated, Tensor states, Tensor? kept, Tensor weight, Tensor g, Tensor? g_cells, "
        f"bool backwards) -> ({_results})"
    )
    define(_schema, partial(_fake_backward, _name))(_not_run)


class _Recurrence(torch.autograd.Function):
    """One direction of one layer: from the input's part of the gates the outputs of all steps and, of an LSTM, the
    cells."""

    @staticmethod
    def forward(
        ctx: Any, name: str, backwards: bool, gates: Tensor, weight: Tensor, bias: Tensor | None, *state: Tensor
    ) -> State:  # fmt: skip
        """Compute all steps of a layer, and save what their derivative reads."""
        activated, states, *kept = getattr(torch.ops.memplan, name)(gates, weight, bias, backwards, *state)
        ctx.save_for_backward(activated, states, weight, *kept)
        ctx.name, ctx.backwards = name, backwards
        ctx.set_materialize_grads(False)
        begin, steps = int(not backwards), gates.shape[0]
        return tuple(store.narrow(0, begin, steps) for store in (states, *(kept if name == "lstm" else ())))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        g, g_cells = (*gradients, None)[:2]
        activated, states, weight, *kept = ctx.saved_tensors
        steps, batch, hidden = activated.shape[0], *states.shape[1:]
        g = states.new_zeros((steps, batch, hidden)) if g is None else g
        call = getattr(torch.ops.memplan, f"{ctx.name}_backward")
        gates, *first = call(activated, states, kept[0] if kept else None, weight, g, g_cells, ctx.backwards)
        of_state = gates
        if ctx.name == "gru":
            of_state = torch.cat([gates[..., : 2 * hidden], first.pop()], 2)
        of_state = of_state.reshape(steps * batch, -1)
        before = states.narrow(0, int(ctx.backwards), steps).reshape(steps * batch, hidden)
        _, _, _, weighed, biased, *_ = ctx.needs_input_grad
        of_weight = torch.mm(of_state.t(), before) if weighed else None
        return None, None, gates, of_weight, of_state.sum(0) if biased else None, *first


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
    each, first = 2 + 2 * bias, tuple(state) if name == "lstm" else (state,)
    if len(weights) != layers * (1 + both) * each:
        return NotImplemented
    x = x.transpose(0, 1) if batch_first else x
    last = list[State]()
    for layer in range(layers):
        if layer and dropout:
            x = F.dropout(x, dropout, training)
        outputs = list[Tensor]()
        for direction in range(1 + both):
            at = layer * (1 + both) + direction
            w_input, w_state, *biases = weights[at * each : (at + 1) * each]
            b_input, b_state = biases or (None, None)
            steps, batch = x.shape[:2]
            gates = F.linear(x.reshape(steps * batch, -1), w_input, b_input).view(steps, batch, -1)
            begin = [part[at] for part in first]
            states: State = _Recurrence.apply(name, bool(direction), gates, w_state, b_state, *begin)
            outputs.append(states[0])
            last.append(tuple(store[0 if direction else -1] for store in states))  # the second direction ends at step 0
        x = torch.cat(outputs, 2) if both else outputs[0]
    ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *ends)
