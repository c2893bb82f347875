"""Attention written out against the fused call: bytes as the latter's recording has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memplan

ID = "math-attention"


class Attention(nn.Module):
    def __init__(self, fused: bool = False, softmax: bool = True) -> None:
        super().__init__()
        self.qkv, self.fused, self.softmax = nn.Linear(64, 192), fused, softmax

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        scores = q @ k.transpose(-1, -2) / 4
        return (torch.softmax(scores, -1) if self.softmax else scores.sigmoid()) @ v


def found(make: object, shape: str, device: str) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(make, shape, device=device) if finding.id == ID]


def test_the_bytes_are_those_that_the_fused_call_spares() -> None:
    shape = "4x512x64"
    (finding,) = found(Attention, shape, device="cpu")
    assert finding.details["kind"] == "written out"
    assert finding.details["sizes"] == [[512, 512]]
    out, fused = (
        memplan.explain(lambda f=f: Attention(f), shape, device="cpu").timeline.peak_allocated for f in (False, True)
    )
    assert finding.bytes == pytest.approx(out - fused, rel=0.05)  # fused backward has scratch of its own, on the CPU
    assert found(lambda: Attention(True), shape, device="cpu") == []


def test_no_softmax_is_no_attention() -> None:
    assert found(lambda: Attention(softmax=False), "4x512x64", device="cpu") == []


def test_on_a_card_the_reason_is_told() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(257, 3 * 257).double()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.double()).chunk(3, -1)
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])

    (finding,) = found(Wide, "4x512x257", device="h100")
    assert finding.details["kind"] == "math kernel"
    assert "heads of 257" in finding.message
