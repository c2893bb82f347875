"""Convolutions a few samples at a time: the same numbers, and the scratch that the graph is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan.planning.ops.piecewise  # noqa: F401  # registers the op
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.op_schema import CHUNKED
from memplan.planning.graph.precision import Precision
from memplan.planning.levers.chunk_convolutions import CONVOLUTION, MIN_WORKSPACE
from memplan.verification.measurement.peak_and_time import measure_step


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pieces_are_what_the_whole_is(bias: bool, pieces: int, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 3, 20, 20).contiguous(memory_format=layout), torch.randn(5, 3, 3, 3)
    rest = (w, torch.randn(5) if bias else None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    whole = torch.ops.aten.convolution(x, *rest)
    made = torch.ops.memplan.convolution_chunks(x, *rest, pieces)
    assert made.stride() == whole.stride()
    torch.testing.assert_close(made, whole)


def test_a_stem_in_bfloat16_holds_less_than_its_result_beside_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU()), torch.randn(16, 3, 96, 96)
    exact = capture(model, call_of((x,), {})).graph
    assert [op.target for op in exact.forward_ops if "conv" in op.target] == [CONVOLUTION]
    graph = capture(model, call_of((x,), {}), Precision("bfloat16")).graph
    (op,) = (op for op in graph.forward_ops if "conv" in op.target)
    made = graph.values[op.makes[0]]
    rest: tuple[Any, ...] = (next(model.parameters()).detach().bfloat16(), *op.args[2:9])
    low, kept = x.bfloat16(), list[torch.Tensor]()
    whole = measure_step(lambda: kept.append(torch.ops.aten.convolution(low, *rest))).growth_peak - made.bytes
    if op.target == CONVOLUTION:  # a machine whose kernel holds little
        assert whole < max(made.bytes, MIN_WORKSPACE)
        return
    assert op.target == CHUNKED
    taken = measure_step(lambda: kept.append(torch.ops.memplan.convolution_chunks(low, *rest, op.args[9]))).growth_peak
    assert op.scratch <= made.bytes / 2 < whole
    assert abs(taken - made.bytes - op.scratch) < 0.05 * taken
