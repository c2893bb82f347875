"""oneDNN's LSTM, really run against ``transient_bytes``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow

from memplan.trace.semantics.cpu import lstm as recurrent

_spec = importlib.util.spec_from_file_location("measured", Path(__file__).with_name("test_table.py"))
assert _spec is not None
assert _spec.loader is not None
_measured: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_measured)
compare = _measured.compare

aten = torch.ops.aten


def lstm(steps: int, batch: int, inputs: int, hidden: int, reverse: bool) -> tuple[Any, ...]:
    weights = [torch.randn(4 * hidden, n) for n in (inputs, hidden)] + [torch.randn(4 * hidden)] * 2
    states = [torch.zeros(batch, hidden), torch.zeros(batch, hidden)]
    x = torch.randn(batch, steps, inputs).transpose(0, 1)
    return x, *weights, *states, reverse, [], 2, hidden, 1, True, False, False, True


@pytest.mark.parametrize(
    "sizes",
    [(50, 16, 64, 96), (20, 8, 100, 100), (10, 200, 64, 96), *slow(((100, 20, 300, 512),), ((64, 32, 256, 256),))],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_lstm(sizes: tuple[int, int, int, int], reverse: bool) -> None:
    given = lstm(*sizes, reverse)
    compare(aten.mkldnn_rnn_layer.default, *given)
    y, h, c, workspace = aten.mkldnn_rnn_layer(*given)
    for gradients in ((torch.randn_like(y), h, c), (torch.ones(()).expand_as(y), None, None)):
        rest = (reverse, 2, sizes[3], 1, True, True, False, [], False, workspace)
        compare(aten.mkldnn_rnn_layer_backward.default, *given[:7], y, h, c, *gradients, *rest)


@pytest.mark.parametrize("sizes", [(100, 20, 300, 512), (64, 32, 256, 256)])
def test_lstm_without_gradients(sizes: tuple[int, int, int, int]) -> None:
    with torch.no_grad():
        compare(aten.mkldnn_rnn_layer.default, *lstm(*sizes, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 16, 128, 64), (32, 8, 100, 100), (100, 20, 300, 512), (7, 3, 20, 256)])
def test_workspace_is_as_large_as_the_one_that_onednn_asks_for(sizes: tuple[int, int, int, int], dtype: Any) -> None:
    try:
        given = [t.to(dtype) if isinstance(t, torch.Tensor) else t for t in lstm(*sizes, False)]
        workspace = aten.mkldnn_rnn_layer(*given)[3]
    except RuntimeError as error:
        pytest.skip(f"this processor has no such LSTM: {error}")
    assert recurrent.workspace_bytes(*sizes, dtype.itemsize) == workspace.numel()
