"""oneDNN's LSTM: its workspace, which fake tensors leave empty, and its temporaries.

torch calls it per layer and direction (ATen/native/mkldnn/RNN.cpp). The sizes are those of oneDNN's reference LSTM,
src/cpu/rnn/rnn_utils.cpp, `set_workspace_sizes`, `set_scratchpad_sizes` and `get_good_ld`; measured with oneDNN 3.12 on
AVX512 in float32. In bfloat16 its brgemm kernels run: approximate.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes, padded

_PAGE = 4096
_FLOAT = 4
_LARGE_BATCH = 128
_POINTERS = 4664


def with_workspace(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Return the results of ``mkldnn_rnn_layer`` with oneDNN's workspace if gradients are enabled."""
    if not torch.is_grad_enabled():
        return result
    x, hidden_size = args[0], args[10]
    output, hidden, cell, _ = result
    steps, batch, inputs = x.shape
    workspace = workspace_bytes(steps, batch, inputs, hidden_size, x.element_size())
    return output, hidden, cell, output.new_empty(workspace, dtype=torch.uint8)


def with_both_biases(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Return the results of ``mkldnn_rnn_layer_backward`` with two bias gradients, which are the same tensor in the
    fake results."""
    *before, bias, _, hidden, cell = result
    return *before, bias, torch.empty_like(bias), hidden, cell


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int, itemsize: int = _FLOAT) -> int:
    """Return the bytes of the workspace: the gates, the hidden part of the new gate, and five sets of states.

    Three of the states are in float32 whatever the dtype: two of gradients, and the cell's.
    """
    rows, states, widest = steps * batch, 2 * (steps + 1) * batch, max(inputs, hidden)
    parts = [
        rows * _leading_dimension(4 * hidden, itemsize) * itemsize,
        rows * _leading_dimension(hidden, itemsize) * itemsize,
        states * _leading_dimension(widest, itemsize) * itemsize,
        states * _leading_dimension(widest) * _FLOAT,
        states * _leading_dimension(widest) * _FLOAT,
        states * hidden * itemsize,
        states * hidden * _FLOAT,
    ]
    return sum(padded(part, _PAGE) for part in parts)


def _leading_dimension(size: int, itemsize: int = _FLOAT) -> int:
    """Return the elements of a padded row that avoid 4K aliasing: whole cache lines, but no multiple of 256."""
    length = padded(size, 64 // itemsize)
    return length + 64 // itemsize if length % 256 == 0 else length


def _scratchpad(steps: int, batch: int, hidden: int) -> int:
    """Return the scratchpad bytes: gates of ``steps`` time steps, whose input products are a single GEMM, and two
    hidden states."""
    gates = steps * batch * _leading_dimension(4 * hidden) * _FLOAT
    return padded(gates, _PAGE) + 2 * padded(batch * _leading_dimension(hidden) * _FLOAT, _PAGE) + _POINTERS


def _weights(inputs: int, hidden: int) -> int:
    """Return the bytes of both weights transposed, with all gates in a row, and of the sum of the biases."""
    return (inputs + hidden) * _leading_dimension(4 * hidden) * _FLOAT + 4 * hidden * _FLOAT


def forward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``mkldnn_rnn_layer``. With gradients disabled, another kernel runs."""
    x, hidden = args[0], args[10]
    steps, batch, inputs = x.shape
    if x.dtype is not torch.float32:
        return _weights(inputs, hidden) // 2 + _POINTERS
    if torch.is_grad_enabled():
        merged_steps = 1 if batch >= _LARGE_BATCH else steps
        return _weights(inputs, hidden) + _scratchpad(merged_steps, batch, hidden)
    # the brgemm kernel, in blocks of 32 columns; the 16 of the states was fitted to batches up to 64
    weights = 4 * (inputs + hidden) * padded(hidden, 32) * _FLOAT
    gates = padded(steps * batch * 4 * hidden * _FLOAT, _PAGE)
    return weights + gates + 16 * batch * hidden * _FLOAT + _POINTERS


def backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the temporary bytes of ``mkldnn_rnn_layer_backward``: the weights, transposed and with padded rows; the
    gradients, made contiguous or zero; and the scratchpad."""
    x, (hidden_state, cell, output), gradients = args[0], args[5:8], args[10:13]
    (steps, batch, inputs), hidden = x.shape, hidden_state.shape[-1]
    # Half precision computes the gates of one step at a time: measured on one shape, so approximate.
    merged_steps = steps if x.dtype is torch.float32 else 1
    total = _weights(inputs, hidden) + _scratchpad(merged_steps, batch, hidden)
    for width in (inputs, hidden):
        if _leading_dimension(width) != width:
            total += 4 * hidden * _leading_dimension(width) * _FLOAT
    for gradient, like in zip(gradients, (output, hidden_state, cell), strict=True):
        total += bytes_of(like) if gradient is None else copy_bytes(gradient)
    return total


FORMULAS = {"aten.mkldnn_rnn_layer.default": forward, "aten.mkldnn_rnn_layer_backward.default": backward}
