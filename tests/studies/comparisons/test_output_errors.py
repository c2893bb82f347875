"""Results held against each other: what is equal, what cannot be compared, what overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import StepError
from memplan.studies.comparisons import output_errors
from memplan.trace.step import StepOptions

INFERENCE = StepOptions(inputs=(torch.ones(2, 3),), train=False)


def linear(scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight.mul_(scale)
        layer.bias.mul_(scale)
    return layer


def test_twice_as_large_is_off_by_its_whole_norm() -> None:
    (row,) = output_errors.result_differences(linear(), linear(2.0), INFERENCE, INFERENCE)
    assert (row.what, row.tensors) == ("outputs", 1)
    assert row.relative == pytest.approx(1.0, rel=1e-6)
    assert row.largest == pytest.approx(linear()(torch.ones(2, 3)).abs().max().item(), rel=1e-6)


def test_equal_ones_are_0_apart_and_gradients_come_with_training() -> None:
    training = StepOptions(inputs=INFERENCE.inputs)
    found = output_errors.result_differences(linear(), linear(), training, training)
    assert [(row.what, row.tensors, row.relative, row.largest) for row in found] == [
        ("outputs", 1, 0.0, 0.0),
        ("gradients", 2, 0.0, 0.0),
    ]


@pytest.mark.parametrize(("one", "other"), [(0.0, 1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_what_has_no_ratio_has_none(one: float, other: float) -> None:
    (row,) = output_errors.result_differences(linear(one), linear(other), INFERENCE, INFERENCE)
    assert row.relative is None


def test_drawn_numbers_are_the_same_for_both() -> None:
    drops = [nn.Sequential(linear(), nn.Dropout(0.5)) for _ in range(2)]
    training = StepOptions(inputs=INFERENCE.inputs)
    assert output_errors.result_differences(drops[0], drops[1], training, training)[0].relative == 0


@pytest.mark.parametrize(
    ("other", "inputs", "said"),
    [
        (linear(2.0), INFERENCE, None),
        (nn.Linear(3, 5), INFERENCE, "other networks"),
        (None, INFERENCE, "a build makes its own"),
        (linear(), StepOptions(inputs=(torch.ones(4, 3),), train=False), "other inputs"),
        (linear(), StepOptions(inputs=(torch.zeros(2, 3),), train=False), "other inputs"),
        (linear(), StepOptions(inputs=(torch.ones(2, 3).bfloat16(),), train=False), None),
    ],
)
def test_what_can_be_compared(other: nn.Module | None, inputs: StepOptions, said: str | None) -> None:
    found = output_errors.why_not_comparable(linear(), other, INFERENCE, inputs)
    assert found is None if said is None else said in str(found)


def test_what_the_maker_raises_is_told_with_its_line() -> None:
    def broken() -> Any:
        raise KeyError("no weights")

    with pytest.raises(
        StepError, match=r"making the model raised KeyError: 'no weights' \(at .*test_output_errors.py:\d+\)"
    ):
        output_errors.make_model(broken)


def test_random_numbers_are_as_they_were() -> None:
    before = torch.get_rng_state()
    output_errors.make_model(lambda: nn.Linear(3, 4))
    output_errors.result_differences(linear(), linear(), INFERENCE, INFERENCE)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    output_errors.seconds_of(lambda: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
