"""Own decompositions beside the ops themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.exporting.lowering.own_decompositions import own_decompositions

FLOATS = torch.tensor([[1.7, -0.4, 0.0], [0.2, -3.9, 2.0]])
FLAGS = FLOATS > 0
COPIES = {
    "float to integer": (torch.zeros(2, 3, dtype=torch.int64), FLOATS),
    "float to flag": (torch.zeros(2, 3, dtype=torch.bool), FLOATS),
    "flag to float, expanded": (torch.zeros(2, 3), FLAGS[0]),
}
SUMS = {"floats": (FLOATS, 1), "flags in float": (FLAGS, 0, torch.float32)}
SLICES = [(1, 3), (-2, None), (0, 0), (2, 1)]


def check(target: Any, *args: Any, **kwargs: Any) -> None:
    decomposed = own_decompositions()[target](*args, **kwargs)
    torch.testing.assert_close(decomposed, target(*args, **kwargs))  # compares dtypes, too


@pytest.mark.parametrize("name", COPIES)
def test_copy_converts_to_the_dtype_of_its_first_operand(name: str) -> None:
    check(torch.ops.aten.copy.default, *COPIES[name])


@pytest.mark.parametrize(("start", "end"), SLICES)
def test_a_slice_is_replaced_also_an_empty_one(start: int, end: int | None) -> None:
    source = torch.full_like(FLOATS[:, start:end], 7.0)
    check(torch.ops.aten.slice_scatter.default, FLOATS, source, 1, start, end)


@pytest.mark.parametrize("name", SUMS)
def test_cumulative_sums_are_of_the_dtype_asked_for(name: str) -> None:
    x, dim, *dtype = SUMS[name]
    check(torch.ops.aten.cumsum.default, x, dim, **({"dtype": dtype[0]} if dtype else {}))
