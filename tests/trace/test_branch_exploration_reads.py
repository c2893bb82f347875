"""A scalar that is read from a tensor counts as the largest and as the smallest it can be, or the recording says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow, thinned
from models import steps_by_reads
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.records import loud

Body = Callable[[Any], Any]


def by_number(body: Body, low: int, high: int) -> Callable[[], Callable[[], None]]:
    """A step of a drawn number from ``low`` to ``high - 1``."""

    def build() -> Callable[[], None]:
        def step() -> None:
            body(torch.randint(low, high, ()).item())

        return step

    return build


def listed() -> list[Tensor]:
    return [torch.ones(16, 256) for _ in range(12)]


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.ones(1)


def counted_down(number: Any) -> Tensor:
    rest = 12
    while rest > number:
        rest -= 1
    return torch.ones(16, 100 * (12 - rest) + 1) * 2


MONOTONE: dict[str, Body] = {
    "a size": lambda n: torch.ones(n, 256) * 2,
    "what a size leaves": lambda n: torch.ones(12 - n, 256) * 2,
    "a list until": lambda n: joined(listed()[:n]),
    "a list from": lambda n: joined(listed()[n:]),
    "a loop": lambda n: [torch.ones(16, 256) for _ in range(n)],
    "a loop down": counted_down,
    "below a float": lambda n: torch.ones(64, int(256 / (1 + n))) * 2,
    "a power": lambda n: torch.ones(64, 2**n) * 2,
    "a growing table": lambda n: torch.ones(16, [10 * k + 1 for k in range(12)][n]) * 2,
}


@pytest.mark.parametrize("name", thinned(MONOTONE, 3))
def test_the_prediction_is_the_largest_peak_of_all_values(name: str) -> None:
    trace = memplan.record(by_number(MONOTONE[name], 0, 12))
    peaks = [measured_peak(by_number(MONOTONE[name], value, value + 1)) for value in range(12)]
    assert memplan.simulate(trace).peak_allocated == max(peaks)
    assert loud(trace.assumptions)
    assert all("test_branch_exploration_reads.py" in (row.where or "") for row in trace.assumptions)


LOGGED: dict[str, Body] = {
    "printed": lambda n: print(n),
    "a text": lambda n: f"{n}/12, {n / 12:.2f}",
    "in a list": lambda n: [].append(n),
    "a sum": lambda n: [sum([n, n, n]) / 3, n + 3],
    "a best": lambda n: max(n, 5),
    "rounded": lambda n: round(n / 7, 3),
}


@pytest.mark.parametrize("name", LOGGED)
def test_of_what_is_only_logged_nothing_is_reported(name: str) -> None:
    build = by_number(lambda n: (torch.ones(64, 64) * 2, LOGGED[name](n)), 0, 100)
    trace = memplan.record(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build)
    assert not loud(trace.assumptions)


@pytest.mark.parametrize("draws", [1, *slow(3)])
@pytest.mark.parametrize("build", thinned(steps_by_reads.STEPS, 3), ids=lambda build: build.__name__)
def test_a_step_that_reads_numbers_is_bounded(build: Callable[[], Any], draws: int) -> None:
    predicted = memplan.simulate(memplan.record(build)).peak_allocated
    for seed in range(draws):
        torch.manual_seed(seed)
        # kernels' own tables, of some hundred bytes, are not counted
        assert measured_peak(build) <= 1.001 * predicted, seed


def test_a_largest_value_that_does_not_fit_is_replaced_by_the_smallest() -> None:
    build = by_number(lambda n: torch.ones(12, 256)[n] * 2, 0, 13)
    trace = memplan.record(build)
    assert memplan.simulate(trace).peak_allocated == measured_peak(
        by_number(lambda n: torch.ones(12, 256)[n] * 2, 0, 1)
    )
    (row,) = loud(trace.assumptions)
    assert "as the largest it can be" in row.text
    assert "IS NOT BOUNDED" in row.text


def test_recordings_are_bounded() -> None:
    built = list[int]()

    def build() -> Callable[[], None]:
        built.append(0)

        def step() -> None:
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)
            torch.ones(int(torch.randint(0, 16, ())), 9)

        return step

    trace = memplan.record(build)
    assert len(built) == 1 + 8
    assert any("IS NOT BOUNDED" in row.text for row in loud(trace.assumptions))


def test_an_array_keeps_the_memory_of_its_tensor() -> None:
    def build() -> Callable[[], None]:
        kept = list[Any]()
        return lambda: kept.append(torch.ones(64, 64).mul(2).numpy())

    assert memplan.simulate(memplan.record(build)).peak_allocated == measured_peak(build)


def test_layers_that_a_loop_reads_are_taken_in_turn() -> None:
    """As any one of these alone the step takes the same; one after the other, it has the optimizer's states of all."""

    def build() -> Callable[[], None]:
        experts = nn.ModuleDict({f"expert_{at}": nn.Linear(64, 64) for at in range(4)})
        optimizer, x, hit = torch.optim.AdamW(experts.parameters()), torch.randn(8, 64), torch.randperm(4)

        def step() -> None:
            optimizer.zero_grad()
            torch.stack([experts[f"expert_{one}"](x).sum() for one in hit]).sum().backward()
            optimizer.step()

        return step

    assert memplan.simulate(memplan.record(build)).peak_allocated == pytest.approx(measured_peak(build), rel=0.01)
