"""Positions beyond their table: refused while recording where the real step refuses them, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from environment import thinned
from torch import Tensor, nn

import memplan
from memplan.errors import StepError

ROWS = 8
POSITIONS: dict[str, Callable[[int], Tensor]] = {
    "plain": lambda length: torch.arange(length),
    "of a batch": lambda length: torch.arange(0, length).unsqueeze(0).expand(2, length),
    "backwards": lambda length: torch.arange(length - 1, -1, -1),
    "every second": lambda length: torch.arange(0, length, 2),
    "a slice of more": lambda length: torch.arange(20)[:length],
    "a later slice": lambda length: torch.arange(20)[length - 3 : length],
    "shifted": lambda length: torch.arange(length)[1:] + 2,
    "shifted back": lambda length: torch.arange(2, length) - 2,
    "multiplied": lambda length: torch.arange(length) * 1,
    "changed in place": lambda length: torch.arange(length).clamp_(max=ROWS - 1),
    "halved": lambda length: torch.arange(2 * length) // 4,
}


class Net(nn.Module):
    def __init__(self, positions: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(ROWS, 4), positions

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.positions(x.shape[1]))


@pytest.mark.parametrize(
    ("length", "kind"), thinned(itertools.product([ROWS - 1, ROWS, ROWS + 1, ROWS + 2, ROWS + 3], POSITIONS), 7)
)
def test_what_the_real_step_refuses_is_refused(kind: str, length: int) -> None:
    model, unknown = Net(POSITIONS[kind]), kind == "multiplied"
    try:
        model(torch.zeros(2, length))
    except IndexError:
        if unknown:
            memplan.explain(model, f"2x{length}", device="cpu")
            return
        with pytest.raises(StepError, match=r"out of range of a table of 8 rows.*table"):
            memplan.explain(model, f"2x{length}", device="cpu")
    else:
        memplan.explain(model, f"2x{length}", device="cpu")


def test_values_that_are_not_known_are_not_refused() -> None:
    class Drawn(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.table(torch.arange(x.shape[1]) % ROWS)

    memplan.explain(Drawn(torch.arange), "2x40", device="cpu")
