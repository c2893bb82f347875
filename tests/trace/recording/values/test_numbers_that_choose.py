"""Numbers that pick from a table where no method of theirs is called: recorded as each of few, never in silence."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.records import loud

TABLE = [2, 400, 1]
NAMED = SimpleNamespace(of_0=2, of_1=400, of_2=1)
Repeats = Callable[[Any], Any]
"""Of a drawn tensor, how often something is repeated."""


def picked(table: Any, number: Any) -> Any:
    return table[number]


def kept(drawn: Tensor) -> int:
    place = SimpleNamespace(number=drawn.item())
    return picked(TABLE, place.number)


CHOOSING: dict[str, Repeats] = {
    "a list in a function": lambda drawn: picked(TABLE, drawn.item()),
    "a list by an attribute": kept,
    "a list that pops": lambda drawn: list(TABLE).pop(drawn.item()),
    "a dictionary": lambda drawn: dict(enumerate(TABLE))[drawn.item()],
    "a dictionary of texts": lambda drawn: {"0": 2, "1": 400, "2": 1}[str(drawn.item())],
    "a set": lambda drawn: 400 if drawn.item() in {1} else 1,
    "an attribute": lambda drawn: getattr(NAMED, f"of_{drawn.item()}"),
    "an array": lambda drawn: int(picked(numpy.array(TABLE), drawn.item())),
    "a tensor by a number": lambda drawn: int(torch.tensor(TABLE)[drawn.item()]),
    "a tensor by a tensor": lambda drawn: int(torch.tensor(TABLE)[drawn]),
    "a tensor by a tensor, in Python": lambda drawn: torch.tensor(TABLE)[drawn].item(),
    "a seed": lambda drawn: random.Random(drawn.item()).choice(TABLE),
}
FOLLOWED: dict[str, Repeats] = {
    "a size": lambda drawn: drawn.item() + 1,
    "an operand": lambda drawn: torch.ones(2) * drawn.item(),
    "a branch": lambda drawn: 1 if drawn.item() == 1 else 2,
    "an argument": lambda drawn: torch.full((2,), drawn.item()),
    "an element": lambda drawn: torch.randn(3)[drawn.item()] * 2,
    "an element, by a tensor": lambda drawn: torch.randn(3)[drawn] * 2,
}


def by_value(repeats: Repeats, low: int, high: int) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        x = torch.ones(32, 64)

        def step() -> None:
            times = repeats(torch.randint(low, high, ()))
            if not isinstance(times, Tensor):
                x.repeat(1, times).exp()

        return step

    return build


@pytest.mark.parametrize("name", CHOOSING)
def test_what_picks_from_a_table_is_recorded_with_each(name: str) -> None:
    repeats = CHOOSING[name]
    trace = memplan.record(by_value(repeats, 0, 3))
    peaks = [measured_peak(by_value(repeats, one, one + 1)) for one in range(3)]
    assert max(peaks) > min(peaks)
    assert memplan.simulate(trace).peak_allocated == max(peaks)
    told = [one for one in trace.assumptions if one.kind == "bound" and "decides sizes" in one.text]
    assert loud(told)
    assert "test_numbers_that_choose.py" in (told[0].where or "")


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_not_told_to_pick(name: str) -> None:
    trace = memplan.record(by_value(FOLLOWED[name], 0, 3))
    assert not [one for one in trace.assumptions if "MAY CHOOSE" in one.text]


def test_text_of_one_of_many_is_no_choice() -> None:
    """Such as a count that is printed."""
    trace = memplan.record(by_value(lambda drawn: len(f"{drawn.item()}") * 0 + 1, 0, 100))
    assert not loud(trace.assumptions)
