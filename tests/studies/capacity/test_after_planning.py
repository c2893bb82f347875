"""A planned point is what `memplan.plan` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetError, InputError
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.after_planning import plan_step
from memplan.trace.recording.session import choose_target
from memplan.trace.step import StepOptions


def deep() -> nn.Module:
    return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(32, 32), nn.GELU())])


def test_the_least_budget_is_that_of_plan() -> None:
    subject, target = Subject(deep, StepOptions(("64x32",)).checked()), choose_target("cpu")
    with pytest.raises(BudgetError) as error:
        memplan.plan(deep, "64x32", budget=1, costs="roofline")
    small = plan_step(subject, target, 1)
    assert (small.fits, small.least, small.seconds) == (False, error.value.smallest_budget, None)
    enough = plan_step(subject, target, small.least)
    assert enough.fits
    assert enough.peak == memplan.plan(deep, "64x32", budget=small.least, costs="roofline").peak


@pytest.mark.parametrize("options", [{"train": False}, {"dtype": torch.bfloat16}])
def test_only_training_can_be_planned(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="can be planned"):
        plan_step(Subject(deep, StepOptions(("64x32",), **options).checked()), choose_target("cpu"), 1)  # pyright: ignore[reportArgumentType]
