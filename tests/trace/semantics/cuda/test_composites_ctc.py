"""CTC on a card with lengths on the host: the same loss as torch's, and no tensor read from the other side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memplan
from memplan.trace.semantics.cuda.composites import installed


def given(lengths_as: Callable[[list[int]], Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, targets = torch.randn(50, 4, 20, requires_grad=True), torch.randint(1, 20, (4, 10))
    return x, targets, lengths_as([50, 48, 40, 50]), lengths_as([10, 7, 1, 3])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_that_of_torch(reduction: str) -> None:
    found: list[list[torch.Tensor]] = []
    for on_card in (False, True):
        x, targets, steps, lengths = given(torch.tensor)
        with installed(lambda tensor, on_card=on_card: on_card and tensor.is_floating_point(), (9, 0), lambda *_: None):
            loss = F.ctc_loss(x.log_softmax(-1), targets, steps, lengths, reduction=reduction)
            loss.sum().backward()
        found.append([loss.detach(), x.grad])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("lengths_as", [torch.tensor, list], ids=["tensors", "lists"])
def test_lengths_on_the_host_are_no_mistake(lengths_as: Callable[[list[int]], Any]) -> None:
    def build() -> Callable[[], None]:
        x, targets, steps, lengths = given(lengths_as)
        x, targets = x.detach().cuda().requires_grad_(), targets.cuda()
        return lambda: F.ctc_loss(x.log_softmax(-1), targets, steps, lengths).backward()

    assert not memplan.record(build, device="h100").assumptions
