"""Losses of sequences whose lengths are known: predicted beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocator import measured_peak
from torch.nn import functional as F

import memplan

LENGTHS = {
    "lists": lambda: ([50] * 4, [10, 8, 6, 4]),
    "tensors": lambda: (torch.full((4,), 50), torch.tensor([10, 8, 6, 4])),
    "shorter": lambda: (torch.tensor([50, 40, 30, 20]), torch.tensor([3, 3, 3, 3])),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LENGTHS)
def test_ctc_keeps_as_much_as_its_longest_target_asks(name: str, reduction: str) -> None:
    def build() -> Callable[[], Any]:
        x, targets = torch.randn(50, 4, 20, requires_grad=True), torch.randint(1, 20, (4, 10))
        lengths = LENGTHS[name]()

        def step() -> None:
            x.grad = None
            F.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction).backward()

        return step

    predicted, measured = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated, measured_peak(build)
    assert predicted == measured
