"""Tensors that are split by values: known ones exactly, others as unevenly as can be."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from environment import thinned
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.recording.symbolic_scalars import ScalarPolicy, fitted
from memplan.trace.recording.values.bounds import Shares
from memplan.trace.recording.values.scalars import symbolic
from memplan.trace.records import loud

SPLITS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "list": lambda h, sizes: h.split(sizes.tolist()),
    "function": lambda h, sizes: torch.split(h, sizes.tolist(), dim=0),
    "tensor": lambda h, sizes: h.tensor_split(sizes[:-1].cumsum(0)),
    "tensor by name": lambda h, sizes: h.tensor_split(tensor_indices_or_sections=sizes[:-1].cumsum(0), dim=0),
    "function of a tensor": lambda h, sizes: torch.tensor_split(h, sizes[:-1].cumsum(0), 0),
}


@pytest.mark.parametrize("name", thinned(SPLITS, 2))
@pytest.mark.parametrize("known", [True, False])
def test_parts_by_value(name: str, known: bool) -> None:
    def build() -> Callable[[], None]:
        layer, x = nn.Linear(16, 16), torch.randn(120, 16)
        experts = torch.tensor([0, 1, 2]).repeat(40) if known else torch.randint(0, 3, (120,))
        sizes = torch.zeros(3, dtype=torch.long).scatter_add(0, experts, torch.ones(120, dtype=torch.long))

        def step() -> None:
            layer.zero_grad()
            torch.cat([part * 2 for part in SPLITS[name](layer(x), sizes)]).sum().backward()

        return step

    trace = memplan.record(build)
    predicted, measured = memplan.simulate(trace).peak_allocated, measured_peak(build)
    assert predicted == pytest.approx(measured, rel=0.001) if known else measured <= predicted < 1.2 * measured
    assert bool(loud(trace.assumptions)) is not known


@pytest.mark.parametrize("seed", thinned(range(100), 5))
def test_parts_add_up_and_none_is_empty(seed: int) -> None:
    drawn = random.Random(seed)
    whole, parts = drawn.randint(1, 300), drawn.randint(1, 20)
    sizes = fitted([drawn.randint(1, 300) for _ in range(parts)], whole)
    assert len(sizes) == parts
    assert sum(sizes) == whole
    assert min(sizes) >= int(parts <= whole)


def test_largest_sizes_fill_the_first_part_and_smallest_sizes_the_last() -> None:
    assert fitted([100, 100, 100], 100) == [98, 1, 1]
    assert fitted([60, 90, 90], 100) == [60, 39, 1]
    assert fitted([0, 0, 0], 100) == [0, 0, 100]


def test_no_part_is_larger_than_it_can_be() -> None:
    policy = ScalarPolicy(Shares({}))
    assert fitted([symbolic(5, policy, (5, 39)) for _ in range(8)], 100) == [5, 5, 5, 5, 5, 5, 31, 39]
