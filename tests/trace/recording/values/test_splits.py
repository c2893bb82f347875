"""Tensors that are split by values: known ones exactly, others as unevenly as can be."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan.trace.recording.values.splits import uneven

SPLITS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "list": lambda h, sizes: h.split(sizes.tolist()),
    "function": lambda h, sizes: torch.split(h, sizes.tolist(), dim=0),
    "tensor": lambda h, sizes: h.tensor_split(sizes[:-1].cumsum(0)),
    "tensor by name": lambda h, sizes: h.tensor_split(tensor_indices_or_sections=sizes[:-1].cumsum(0), dim=0),
    "function of a tensor": lambda h, sizes: torch.tensor_split(h, sizes[:-1].cumsum(0), 0),
}


@pytest.mark.parametrize("name", SPLITS)
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
    assert any("IS SPLIT BY VALUES" in one.text for one in trace.assumptions) is not known


@pytest.mark.parametrize("seed", range(100))
def test_parts_add_up_and_none_is_empty(seed: int) -> None:
    drawn = random.Random(seed)
    whole = drawn.randint(1, 300)
    ranges = [drawn.choice([None, (drawn.randint(0, 9), drawn.randint(9, 90))]) for _ in range(drawn.randint(1, 20))]
    sizes = uneven(whole, ranges)
    assert len(sizes) == len(ranges)
    assert sum(sizes) == whole
    assert min(sizes) >= int(len(sizes) <= whole and sum(max(1, one[0]) for one in ranges if one) <= whole // 2)


def test_the_first_part_is_as_large_as_can_be() -> None:
    assert uneven(100, [None, None, None]) == [98, 1, 1]
    assert uneven(100, [(0, 60), (10, 90), (0, 90)]) == [60, 39, 1]
    assert uneven(100, [(0, 60), (10, 90), None], fewest=0) == [60, 40, 0]
