"""Max pools of a piece, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.planning.graph.op_schema import overload
from memplan.planning.tiles.pools import POOLS_WITH_DERIVATIVE, POOLS_WITHOUT_DERIVATIVE

CASES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "2d": ((2, 16, 12, 13), ([3, 3], [2, 2], [1, 1])),
    "one_number": ((2, 16, 12, 13), ([2],)),
    "dilated": ((1, 9, 14, 11), ([2, 3], [2, 1], [1, 1], [2, 2])),
    "far_apart": ((1, 9, 14, 11), ([2, 2], [5, 4])),
    "ceil": ((1, 8, 11, 11), ([2, 2], [2, 2], [0, 0], [1, 1], True)),
    "few_channels": ((1, 2, 11, 11), ([3, 3], [1, 1], [1, 1])),
    "no_batch": ((16, 11, 11), ([3, 3], [2, 2], [1, 1])),
    "3d": ((2, 8, 6, 7, 9), ([2, 2, 2], [2, 2, 2])),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torchs_op(case: str, dtype: torch.dtype) -> None:
    """Many elements are equal, as behind a ReLU, so that the first of these counts; one is not a number."""
    torch.manual_seed(0)
    shape, options = CASES[case]
    x = torch.randint(3, shape).to(dtype).relu()
    x.view(-1)[7] = torch.nan
    target = f"aten.max_pool{len(options[0]) if len(shape) == 5 else 2}d_with_indices.default"
    whole = x.clone().requires_grad_()
    expected, _ = overload(target)(whole, *options)
    dy = torch.randn(expected.shape).to(dtype)
    values = POOLS_WITHOUT_DERIVATIVE[target](x, *options)
    values = values if isinstance(values, torch.Tensor) else values[0]
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert values.is_contiguous()
    leaf = x.clone().requires_grad_()
    result = POOLS_WITH_DERIVATIVE[target](leaf, *options)
    result = result if isinstance(result, torch.Tensor) else result[0]
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    (computed,) = torch.autograd.grad(result, leaf, dy)
    assert torch.equal(computed, torch.autograd.grad(expected, whole, dy)[0])


def test_integers_and_arguments_by_name() -> None:
    """Integers have no infinity to pad with, and rules pass arguments by name."""
    x = torch.randint(9, (1, 8, 6, 6))
    result = POOLS_WITHOUT_DERIVATIVE["aten.max_pool2d_with_indices.default"](
        self=x, kernel_size=[2, 2], stride=[2, 2], padding=[0, 0]
    )
    assert torch.equal(result[0], torch.nn.functional.max_pool2d(x, 2))
