"""Recordings and measurements one after the other, in one process: nothing stays that is not held."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan


def build() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


@pytest.fixture(autouse=True, scope="module")
def _older_objects_frozen(older_objects_frozen: None) -> None:
    """The collector tracks what the tests make, not what thousands of files imported."""


def objects_more(call: Callable[[], Any], times: int) -> int:
    """Return how many more objects the collector tracks after calls than before, which come after a first few."""
    for _ in range(3):
        call()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(times):
        call()
    gc.collect()
    return len(gc.get_objects()) - before


@pytest.mark.parametrize(
    ("call", "times"),
    [
        pytest.param(lambda: memplan.record(build, device="cpu"), 20, id="record"),
        pytest.param(lambda: memplan.record(build, device="h100"), 20, id="on a card", marks=pytest.mark.slow),
        pytest.param(lambda: memplan.explain(build, device="cpu"), 20, id="explain", marks=pytest.mark.slow),
        pytest.param(lambda: memplan.measure(build), 20, id="measure", marks=pytest.mark.slow),
    ],
)
def test_nothing_of_a_recording_stays(call: Callable[[], Any], times: int) -> None:
    assert objects_more(call, times) < times / 2  # the collector's own ups and downs


@pytest.mark.slow
def test_a_recording_that_is_held_is_seen() -> None:
    held: list[Any] = []
    assert objects_more(lambda: held.append(memplan.record(build, device="cpu")), 20) > 20 * 10
