"""Checkpoints that save nothing, against the same step without, and with one for each block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from environment import slow
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan

ID = "idle-checkpoint"
Kind = Literal["none", "whole", "method", "blocks", "reentrant"]
BLOCKS = 4


class Net(nn.Module):
    def __init__(self, kind: Kind, rows: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(BLOCKS)]
        )
        self.head, self.kind = nn.Linear(32, 4), kind

    def body(self, x: torch.Tensor, each: bool = False) -> torch.Tensor:
        for block in self.blocks:
            h: Any = checkpoint(block, x, use_reentrant=False) if each else block(x)
            x = h
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("none", "blocks"):
            return self.head(self.body(x, self.kind == "blocks"))
        function = (lambda h: self.body(h)) if self.kind == "whole" else self.body
        hidden: Any = checkpoint(function, x, use_reentrant=self.kind == "reentrant")
        return self.head(hidden)


def build_of(kind: Kind, rows: int = 1024) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        model, x = Net(kind), torch.randn(rows, 32, requires_grad=kind == "reentrant")
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    return build


def found(kind: Kind, device: str = "cpu", rows: int = 1024) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build_of(kind, rows), device=device) if finding.id == ID]


def peak(kind: Kind, device: str = "cpu") -> int:
    return memplan.simulate(memplan.record(build_of(kind), device=device), workspace="low").peak_allocated


@pytest.mark.parametrize(
    ("kind", "device"), [("whole", "h100"), ("method", "cpu"), *slow(("whole", "cpu"), ("method", "h100"))]
)
def test_one_around_the_whole_model(kind: Kind, device: str) -> None:
    (finding,) = found(kind, device)
    assert (finding.severity, finding.details["blocks"]) == ("warning", BLOCKS)
    assert (finding.details["with"], finding.details["without"]) == (peak(kind, device), peak("none", device))
    assert finding.bytes == pytest.approx(peak(kind, device) - peak("blocks", device), rel=0.01)
    assert f"each of the {BLOCKS} blocks" in finding.advice[0]


def test_a_reentrant_one_around_the_whole_model() -> None:
    (finding,) = found("reentrant")
    assert finding.bytes == pytest.approx(peak("reentrant") - peak("blocks"), rel=0.05)


def test_where_the_peak_is_elsewhere_it_is_a_note() -> None:
    """Two rows: weights and optimizer states are all there is."""
    (finding,) = found("blocks", rows=2)
    assert (finding.severity, finding.bytes) == ("info", 0)
    assert "faster without" in finding.advice[0]


@pytest.mark.parametrize("kind", ["none", "blocks"])
def test_none_and_one_for_each_block(kind: Kind) -> None:
    assert found(kind) == []
