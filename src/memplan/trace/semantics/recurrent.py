"""The LSTM of oneDNN: its workspace, which fake tensors give no size, and its temporaries.

torch calls it for one layer and direction at a time (ATen/native/mkldnn/RNN.cpp). The sizes are those of
oneDNN's reference LSTM, src/cpu/rnn/rnn_utils.cpp, `set_workspace_sizes`, `set_scratchpad_sizes` and
`get_good_ld`; measured with oneDNN 3.12 on AVX512 in float32. In bfloat16 its brgemm kernels run: approximate.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.layout import bytes_of, copied, padded

_PAGE = 4096
_FLOAT = 4
_LARGE_BATCH = 128
_POINTERS = 4664


def with_workspace(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Results of ``mkldnn_rnn_layer`` with oneDNN's workspace, where gradients are recorded."""
    output, hidden, cell, _ = result
    if not torch.is_grad_enabled():
        return result
    size = workspace_bytes(args[0].shape[0], args[0].shape[1], args[0].shape[2], args[10])
    return output, hidden, cell, torch.empty(size, dtype=torch.uint8)


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Bytes of the workspace: the gates, the new gate's hidden part, and five sets of states."""
    rows, states = steps * batch, 2 * (steps + 1) * batch
    parts = [rows * _leading(4 * hidden), rows * _leading(hidden)]
    parts += [states * _leading(max(inputs, hidden))] * 3 + [states * hidden] * 2
    return sum(padded(part * _FLOAT, _PAGE) for part in parts)


def _leading(size: int) -> int:
    """A row's length that avoids 4K aliasing: whole cache lines, but no multiple of 256."""
    length = padded(size, 64 // _FLOAT)
    return length + 64 // _FLOAT if length % 256 == 0 else length


def _scratch(steps: int, batch: int, hidden: int) -> int:
    """Gates of the steps whose products with the input are one, and two hidden states."""
    gates = steps * batch * _leading(4 * hidden) * _FLOAT
    return padded(gates, _PAGE) + 2 * padded(batch * _leading(hidden) * _FLOAT, _PAGE) + _POINTERS


def _weights(inputs: int, hidden: int) -> int:
    """Both weights, turned, in rows of all gates; and the sum of the biases."""
    return (inputs + hidden) * _leading(4 * hidden) * _FLOAT + 4 * hidden * _FLOAT


def forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``mkldnn_rnn_layer``: without gradients, another kernel runs, with another scratchpad."""
    (steps, batch, inputs), hidden = args[0].shape, args[10]
    if args[0].dtype is not torch.float32:
        return _weights(inputs, hidden) // 2 + _POINTERS
    if not torch.is_grad_enabled():
        return _inference(steps, batch, inputs, hidden)
    return _weights(inputs, hidden) + _scratch(1 if batch >= _LARGE_BATCH else steps, batch, hidden)


def _inference(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """A brgemm kernel, in blocks of 32 columns; the states' part is fitted to batches up to 64."""
    weights = 4 * (inputs + hidden) * padded(hidden, 32) * _FLOAT
    gates = padded(steps * batch * 4 * hidden * _FLOAT, _PAGE)
    return weights + gates + 16 * batch * hidden * _FLOAT + _POINTERS


def backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """``mkldnn_rnn_layer_backward``: weights for both directions, gradients contiguous or zero, and the scratchpad."""
    (steps, batch, inputs), hidden = args[0].shape, args[5].shape[-1]
    taken = _weights(inputs, hidden) + _scratch(steps, batch, hidden)
    for width in (inputs, hidden):
        if _leading(width) != width:
            taken += 4 * hidden * _leading(width) * _FLOAT
    for gradient, like in zip(args[10:13], (args[7], args[5], args[6]), strict=True):
        taken += bytes_of(like) if gradient is None else copied(gradient)
    return taken


FORMULAS = {"aten.mkldnn_rnn_layer.default": forward, "aten.mkldnn_rnn_layer_backward.default": backward}
