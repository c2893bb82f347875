"""Casts of expanded tensors, against a step that casts first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

ID = "expanded-cast"
ROWS, MANY_ROWS, WIDTH = 2048, 1 << 16, 128


def by_hand(first: bool) -> Callable[[], Any]:
    """One row for all: cast to half precision after it was expanded, or before."""

    def build() -> Callable[[], Any]:
        row, x = nn.Parameter(torch.randn(1, WIDTH)), torch.randn(ROWS, WIDTH).bfloat16()

        def step() -> None:
            row.grad = None
            half = row.bfloat16().expand(ROWS, WIDTH) if first else row.expand(ROWS, WIDTH).bfloat16()
            (half * x).sum().backward()

        return step

    return build


def under_autocast(first: bool) -> Callable[[], Any]:
    """Queries that are the same for each sample of a batch, as of DETR; autocast casts them where a layer reads
    them."""

    def build() -> Callable[[], Any]:
        queries, layer = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, 8)

        def step() -> None:
            queries.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                given = (queries.bfloat16() if first else queries).expand(MANY_ROWS, WIDTH)
                layer(given).sum().backward()

        return step

    return build


def found(build: Callable[[], Any], device: str = "cpu") -> list[memplan.Finding]:
    return [finding for finding in memplan.check(build, device=device) if finding.id == ID]


def peak(build: Callable[[], Any], device: str) -> int:
    return memplan.simulate(memplan.record(build, device=device), workspace="low").peak_allocated


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_the_bytes_are_those_of_a_cast_before(device: str) -> None:
    (finding,) = found(by_hand(False), device)
    assert finding.severity == "warning"
    assert finding.bytes == pytest.approx(peak(by_hand(False), device) - peak(by_hand(True), device), rel=0.01)
    assert found(by_hand(True), device) == []


def test_under_autocast() -> None:
    """For a card: what a CPU's own kernels take for a product in bfloat16 depends on the processor."""
    (finding,) = found(under_autocast(False), "h100")
    spared = peak(under_autocast(False), "h100") - peak(under_autocast(True), "h100")
    assert finding.bytes == pytest.approx(spared, rel=0.01)
    assert spared > 0.9 * MANY_ROWS * WIDTH * 2
    assert found(under_autocast(True), "h100") == []


def test_as_published() -> None:
    """pytorch#116142: 100 numbers in half precision, expanded to 100 x 10000 and cast, take 4 MB; cast first, 400 B."""

    def of(first: bool) -> Callable[[], Any]:
        def build() -> Callable[[], Any]:
            y = torch.randn(100).half()

            def step() -> None:
                (y.float().unsqueeze(-1).expand(-1, 10000) if first else y.unsqueeze(-1).expand(-1, 10000).float())

            return step

        return build

    (finding,) = found(of(False), "h100")
    assert finding.bytes == 4_000_256 - 512  # in blocks of 512 bytes
    assert found(of(True), "h100") == []


def test_what_is_expanded_and_not_cast() -> None:
    def build() -> Callable[[], Any]:
        row, x = nn.Parameter(torch.randn(1, WIDTH)), torch.randn(ROWS, WIDTH)
        return lambda: (row.expand(ROWS, WIDTH) * x.double().float()).sum().backward()

    assert found(build) == []
