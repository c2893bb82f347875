"""The LSTM of oneDNN: its workspace is a result of the op, which fake tensors give no size."""

from __future__ import annotations

from typing import Any

import torch

_PAGE = 4096
_FLOAT = 4


def with_workspace(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Results of ``mkldnn_rnn_layer`` with a workspace of the size that oneDNN asks for, in training.

    Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, `set_workspace_sizes` and `get_good_ld`, for one layer and direction in
    fp32 (torch calls it so); each part begins on a page.
    """
    output, hidden, cell, _ = result
    train = args[15] if len(args) > 15 else kwargs.get("train", False)
    if not train:
        return result
    size = workspace_bytes(args[0].shape[0], args[0].shape[1], args[0].shape[2], args[10])
    return output, hidden, cell, output.new_empty(size, dtype=torch.uint8)


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Bytes of the workspace: the gates, the new gate's hidden part, and five sets of states."""
    rows, states = steps * batch, 2 * (steps + 1) * batch
    parts = [rows * _leading(4 * hidden), rows * _leading(hidden)]
    parts += [states * _leading(max(inputs, hidden))] * 3 + [states * hidden] * 2
    return sum(-(-part * _FLOAT // _PAGE) * _PAGE for part in parts)


def _leading(size: int) -> int:
    """A row's length that avoids 4K aliasing: whole cache lines, but no multiple of 256."""
    line = 64 // _FLOAT
    padded = -(-size // line) * line
    return padded + line if padded % 256 == 0 else padded
