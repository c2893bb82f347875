"""How memplan's own ops are made."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.planning.ops.custom_ops import define, elements_in_memory_order


def test_an_op_runs_with_data_and_without() -> None:
    define("test_doubled(Tensor self) -> Tensor", torch.empty_like)(lambda self: self * 2)
    doubled = torch.ops.memplan.test_doubled
    assert doubled(torch.tensor([1.0, 3.0])).tolist() == [2.0, 6.0]
    with FakeTensorMode():
        assert doubled(torch.empty(4, 5)).shape == (4, 5)


def test_elements_in_the_order_of_memory() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert elements_in_memory_order(x.permute(2, 0, 1)).tolist() == list(range(24))
