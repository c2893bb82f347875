"""An encoder layer's fast path on a card: fused attention where nothing asks for scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

BATCH, LENGTH, WIDTH, HEADS = 2, 1024, 64, 2
UNIT = BATCH * LENGTH * WIDTH * 4
SCORES = BATCH * HEADS * LENGTH * LENGTH * 4


def peak(call: Callable[[nn.TransformerEncoderLayer, torch.Tensor], Any], card: str = "a100") -> int:
    """Bytes of tensors at the peak beside the model and its input."""

    def build() -> Callable[[], Any]:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True).eval()
        x = torch.randn(BATCH, LENGTH, WIDTH)

        def step() -> None:
            with torch.no_grad():
                call(layer, x)

        return step

    trace = memplan.record(build, device=card)
    workspaces = sum(s.bytes for s in trace.counted if s.cause == "workspace")
    built = sum(s.bytes for s in trace.counted if s.born <= trace.steps[0])
    return memplan.simulate(trace).peak_allocated - workspaces - built


def test_a_layer_without_a_mask_holds_no_scores() -> None:
    """attention.cu: queries, keys and values in one, what attention gives, and its projection."""
    assert abs(peak(lambda layer, x: layer(x)) - 5 * UNIT) < 8192
    assert abs(peak(lambda layer, x: layer.self_attn(x, x, x, need_weights=False)) - 5 * UNIT) < 8192


def test_masks_and_weights_take_the_scores() -> None:
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    assert peak(lambda layer, x: layer(x, src_mask=torch.zeros_like(mask))) > 2 * SCORES
    assert peak(lambda layer, x: layer.self_attn(x, x, x)) > SCORES


def test_a_head_size_that_no_kernel_takes_has_scores() -> None:
    def call(layer: nn.TransformerEncoderLayer, x: torch.Tensor) -> None:
        nn.MultiheadAttention(WIDTH, 16, batch_first=True).eval()(x, x, x, need_weights=False)

    assert peak(call) > 5 * SCORES


def test_only_math_allowed_holds_the_scores() -> None:
    def call(layer: nn.TransformerEncoderLayer, x: torch.Tensor) -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            layer(x)

    assert peak(call) > SCORES


@pytest.mark.parametrize("card", ["h100", "rtx4090", "t4"])
def test_other_cards_hold_none_either(card: str) -> None:
    assert peak(lambda layer, x: layer(x), card) < 6 * UNIT
