"""Which tensors a call changes, beside their values before and behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memplan import _torch
from memplan.planning.capture.changed_tensors import ChangedTensors, updated_statistics

CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (torch.Tensor.mul_, (torch.ones(3), torch.full((3,), 2.0)), {}),
    (torch.Tensor.__setitem__, (torch.ones(3), 0, torch.tensor(2.0)), {}),
    (torch.add, (torch.ones(3), torch.ones(3)), {"out": torch.zeros(3)}),
    (torch.frexp, (torch.ones(3),), {"out": (torch.zeros(3), torch.zeros(3, dtype=torch.int32))}),
    (F.leaky_relu, (-torch.ones(3), 0.5, True), {}),
    (F.relu, (-torch.ones(3),), {"inplace": True}),
    (F.dropout, (torch.ones(64), 0.5, True, True), {}),
    (torch.ops.aten.mul_.Tensor, (torch.ones(3), torch.full((3,), 2.0)), {}),
    (torch.add, (torch.ones(3), torch.ones(3)), {}),
    (F.leaky_relu, (-torch.ones(3), 0.5), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=lambda part: getattr(part, "__name__", ""))
def test_tensors_whose_values_change(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    values = [tensor.clone() for tensor in tensors]
    before = ChangedTensors(func, args, kwargs)
    func(*args, **kwargs)
    changed = {id(tensor) for tensor, value in zip(tensors, values, strict=True) if not torch.equal(tensor, value)}
    assert {id(tensor) for tensor in before.changed_operands()} == changed


def test_tensors_of_inference_mode_have_no_version() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        before = ChangedTensors(torch.Tensor.mul_, (x, 2), {})
        x.mul_(2)
        assert before.changed_operands() == [x]


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("trains", [False, True])
def test_running_statistics_that_a_norm_updates(norm: Callable[..., Any], trains: bool) -> None:
    """By position, as its layer gives them, and by name."""
    x, mean, variance = torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)
    name = "training" if norm is F.batch_norm else "use_input_stats"
    updated = updated_statistics(norm, (x, mean, variance, None, None, trains), {})
    assert updated == updated_statistics(norm, (x,), {"running_mean": mean, "running_var": variance, name: trains})
    norm(x, mean, variance, None, None, trains)
    assert bool(mean.any()) == bool(updated) == trains
