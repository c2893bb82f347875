from __future__ import annotations

import pytest
import torch

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import recomputable_values
from memplan.planning.passes.split_dropout import DRAW_MASK, DROPOUT

ATEN = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_mask_and_product_are_torchs_dropout_bit_for_bit(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(300, 77).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    torch.manual_seed(3)
    expected, expected_mask = ATEN.native_dropout(x, p, True)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    mask = torch.ops.memplan.dropout_mask(x, p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    whole = dtype in (torch.float32, torch.float64)
    found = ATEN.mul.Tensor(ATEN.mul.Tensor(x, mask), scale) if whole else torch.ops.memplan.dropout(x, mask, scale)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(mask, expected_mask)
    assert torch.equal(found.view(bits), expected.view(bits))


def test_the_mask_is_drawn_once_and_the_result_can_be_made_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 8))
    graph = capture(model, call_of((torch.randn(4, 8),), {})).graph
    masks = [op for op in graph.ops if op.target == DRAW_MASK]
    assert [op.random for op in masks] == [True]
    assert not any(op.target == DROPOUT for op in graph.ops)
    scaled = next(op for op in graph.forward_ops if op.target == "aten.mul.Tensor" and op.args[1:] == (1 / 0.9,))
    assert set(scaled.makes) <= recomputable_values(graph)
    assert not set(masks[0].makes) & recomputable_values(graph)


def test_a_mask_whose_product_nothing_reads_is_drawn_alone() -> None:
    class Masked(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            y = super().forward(input)
            return y * torch.native_dropout(y.detach(), 0.5, True)[1]

    graph = capture(Masked(8, 8), call_of((torch.randn(4, 8),), {})).graph
    assert [op.target for op in graph.ops if op.random] == [DRAW_MASK]
    (mask,) = (op for op in graph.ops if op.random)
    assert graph.values[mask.makes[0]].dtype == "bool"
    assert mask.scratch == 0
