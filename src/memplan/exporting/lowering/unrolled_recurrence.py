"""LSTM and GRU written step by step in ops that have kernels, in place of torch's fused ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Tensor, Tensor | None], State]
"""From the input's part of the gates, the state, and weight and bias of the state's part: the next state, whose first
tensor is the output."""


def unrolled_lstm(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], bias: bool, layers: int, dropout: float,
    training: bool, both: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Return what ``torch.lstm`` returns: outputs, and the last hidden and cell states."""
    if len(weights) != layers * (1 + both) * (2 + 2 * bias) or state[0].shape[2] != state[1].shape[2]:
        return NotImplemented  # with a projection
    return _unrolled(_lstm_cell, x, state, weights, bias, layers, dropout, training, both, batch_first)


def unrolled_gru(
    x: Tensor, state: Tensor, weights: Sequence[Tensor], bias: bool, layers: int, dropout: float, training: bool,
    both: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Return what ``torch.gru`` returns: outputs, and the last hidden state."""
    return _unrolled(_gru_cell, x, (state,), weights, bias, layers, dropout, training, both, batch_first)


def _lstm_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell = state
    i, f, g, o = (gates + F.linear(hidden, weight, bias)).chunk(4, 1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    xr, xz, xn = gates.chunk(3, 1)
    hr, hz, hn = F.linear(hidden, weight, bias).chunk(3, 1)
    new, kept = torch.tanh(xn + torch.sigmoid(xr + hr) * hn), torch.sigmoid(xz + hz)
    return (new + kept * (hidden - new),)


def _unrolled(
    cell: Cell, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], bias: bool, layers: int, dropout: float,
    training: bool, both: bool, batch_first: bool,
) -> State:  # fmt: skip
    if batch_first:
        x = x.transpose(0, 1)
    last, each = list[State](), 2 + 2 * bias
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
            now, found = tuple(part[at] for part in state), dict[int, Tensor]()
            for t in reversed(range(steps)) if direction else range(steps):
                now = cell(gates[t], now, w_state, b_state)
                found[t] = now[0]
            outputs.append(torch.stack([found[t] for t in range(steps)]))
            last.append(now)
        x = torch.cat(outputs, 2) if both else outputs[0]
    ends = tuple(torch.stack([one[k] for one in last]) for k in range(len(state)))
    return (x.transpose(0, 1) if batch_first else x, *ends)
