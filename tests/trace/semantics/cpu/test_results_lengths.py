"""Losses of sequences whose lengths are known: predicted beside what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

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


def test_ctc_of_known_lengths_is_recorded_for_a_card_and_of_unknown_ones_bounded() -> None:
    def build(lengths: Callable[[], Any]) -> Callable[[], Callable[[], None]]:
        def made() -> Callable[[], None]:
            x, targets = torch.randn(50, 4, 20, requires_grad=True), torch.randint(1, 20, (4, 10))
            return lambda: F.ctc_loss(x.log_softmax(-1), targets, *lengths()).backward()

        return made

    known = memplan.record(build(LENGTHS["lists"]), device="h100")
    alpha = 4 * 50 * (2 * 10 + 1) * 4
    assert [storage.bytes for storage in known.storages].count(alpha) == 4  # forward and backward, in two steps
    assert not known.assumptions
    unknown = memplan.record(build(lambda: ([50] * 4, torch.randint(1, 11, (4,)))), device="h100")
    assert "ctc_loss is AS LARGE AS VALUES SAY: 10 elements of 10 at most" in unknown.assumptions[0].text
    assert [storage.bytes for storage in unknown.storages].count(alpha) == 4
