"""Kernels that select by value: to the byte, forward alone, against the allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from truth.cpu_allocator import measured_peak

import memplan

N = 3000


def all_of(*shape: int) -> Tensor:
    """A mask that selects everything and that a recording does not know."""
    return torch.rand(*shape) > -1


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "masked_select": (lambda: (torch.randn(N, 4), all_of(N, 4)), lambda given: given[0].masked_select(given[1])),
    "masked_select, broadcast": (
        lambda: (torch.randn(N, 4), all_of(N, 1)), lambda given: given[0].masked_select(given[1]),
    ),
    "masked_select, transposed": (
        lambda: (torch.randn(N, 4), all_of(4, N).t()), lambda given: given[0].masked_select(given[1]),
    ),
    "masked_select, double": (
        lambda: (torch.randn(N).double(), all_of(N)), lambda given: given[0].masked_select(given[1]),
    ),
    "unique": (lambda: torch.randperm(N).float(), torch.unique),
    "unique of integers": (lambda: torch.randperm(N), torch.unique),
    "unique, transposed": (lambda: torch.randperm(N).view(4, -1).t(), torch.unique),
    "unique with inverse": (lambda: torch.randperm(N), lambda x: torch.unique(x, return_inverse=True)),
    "unique with counts": (lambda: torch.randperm(N), lambda x: torch.unique(x, return_counts=True)),
    "unique with both": (lambda: torch.randperm(N), lambda x: torch.unique(x, return_inverse=True, return_counts=True)),
    "unique, as derivatives call it": (lambda: torch.randperm(N), torch.ops.aten._unique.default),
    "rows": (lambda: torch.rand(N, 4), lambda x: torch.unique(x, dim=0)),
    "columns": (lambda: torch.rand(4, N), lambda x: torch.unique(x, dim=1)),
    "consecutive": (lambda: torch.rand(N), torch.unique_consecutive),
    "index by a mask": (lambda: (torch.rand(N, 4), all_of(N)), lambda given: given[0][given[1]]),
    "index by a mask of two": (lambda: (torch.rand(N, 4), all_of(N, 4)), lambda given: given[0][given[1]]),
    "put at a mask": (
        lambda: (torch.rand(N, 4), all_of(N, 4), torch.ones(4 * N)),
        lambda given: given[0].index_put_((given[1],), given[2]),
    ),
    "put a number at a mask": (
        lambda: (torch.rand(N, 4), all_of(N, 4), torch.tensor(1.0)),
        lambda given: given[0].index_put_((given[1],), given[2]),
    ),
    "put a row at a mask": (
        lambda: (torch.rand(N, 4), all_of(N), torch.ones(4)),
        lambda given: given[0].index_put_((given[1],), given[2]),
    ),
    "add a number at a mask": (
        lambda: (torch.rand(N, 4), all_of(N, 4), torch.ones(1)),
        lambda given: given[0].index_put_((given[1],), given[2], accumulate=True),
    ),
    "scatter what does not lie in order": (
        lambda: (torch.rand(N, 4), all_of(N, 4), torch.ones(1).expand(4 * N)),
        lambda given: given[0].masked_scatter_(given[1], given[2]),
    ),
    "places": (lambda: all_of(N, 4), torch.nonzero),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_where_everything_is_selected(name: str) -> None:
    make, run = CASES[name]

    def build() -> Callable[[], None]:
        given = make()
        return lambda: (run(given), None)[1]

    assert memplan.simulate(memplan.record(build, steps=1)).peak_allocated == measured_peak(build, 1)


def test_masks_that_are_known() -> None:
    def build() -> Callable[[], None]:
        x, mask = torch.randn(N, 4), torch.arange(N) % 3 == 0
        return lambda: (x.masked_select(mask[:, None]), x[mask], None)[2]

    trace = memplan.record(build, steps=1)
    assert memplan.simulate(trace).peak_allocated == measured_peak(build, 1)
    assert not trace.assumptions
