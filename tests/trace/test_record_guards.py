"""Values that a recording does not know and that guard a step: taken so that the step does not end in an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from truth.cpu_allocator import measured_peak

import memplan
from memplan.errors import DataDependentError, StepError


def guarded(x: Tensor, labels: Tensor) -> Tensor:
    if labels.max() >= 4:
        raise ValueError("labels are to be under 4")
    return F.cross_entropy(x, labels)


def read_as_a_number(x: Tensor, labels: Tensor) -> Tensor:
    if x.square().sum().item() < 1.5:
        raise ValueError("outputs are to be large")
    return F.cross_entropy(x, labels)


def twice_guarded(x: Tensor, labels: Tensor) -> Tensor:
    if labels.max() >= 4:
        raise ValueError("labels are to be under 4")
    if bool((labels < 0).any()):
        raise ValueError("labels are to be at least 0")
    return F.cross_entropy(x, labels)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a guard": guarded,
    "a guard of a number": read_as_a_number,
    "two guards": twice_guarded,
    "a loss that checks its variances": lambda x, labels: F.gaussian_nll_loss(x, x * 0, x.exp()),
}  # fmt: skip


def step_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        torch.manual_seed(0)
        model, x, labels = nn.Linear(16, 4), torch.randn(8, 16), torch.randn(8).long() * 0 + 2

        def step() -> None:
            model.zero_grad()
            loss(model(x), labels).backward()

        return step

    return build


@pytest.mark.parametrize("name", STEPS)
def test_a_guard_lets_the_step_run_and_the_recording_says_so(name: str) -> None:
    build = step_of(STEPS[name])
    trace = memplan.record(build, device="cpu")
    assert "the other way" in " ".join(one.text for one in trace.assumptions)
    assert memplan.simulate(trace).peak_allocated == pytest.approx(measured_peak(build), rel=0.01)


def test_where_both_ways_raise_the_message_names_the_branch() -> None:
    def either(x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 4:
            raise ValueError("this way")
        raise KeyError("that way")

    with pytest.raises(
        StepError, match=r"this way .*; a value decides at .*test_record_guards.py:\d+ .*that way"
    ) as error:
        memplan.record(step_of(either), device="cpu")
    assert isinstance(error.value.__cause__, ValueError)


def test_a_guard_on_one_line() -> None:
    def guarded(x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 4:
            raise ValueError("no such label")
        return x.sum()

    memplan.record(step_of(guarded), device="cpu")


def test_an_exception_that_no_value_leads_to_stays_as_it_is() -> None:
    def wrong(x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() < 4:
            x = x * 2
        return x @ x  # of 8 x 4

    with pytest.raises(StepError, match="same reduction dim") as error:
        memplan.record(step_of(wrong), device="cpu")
    assert "the other way" not in str(error.value)


def test_a_mistake_within_a_branch_is_not_hidden_by_the_other_way() -> None:
    def wrong(x: Tensor, labels: Tensor) -> Tensor:
        if (labels > 0).all():
            return (x @ x).sum()  # of 8 x 4
        return x.sum()

    with pytest.raises(StepError, match="same reduction dim"):
        memplan.record(step_of(wrong), device="cpu")


def test_an_op_that_refuses_a_stand_in_depends_on_values() -> None:
    """Sizes that are counted from values, as a router of experts does it: ones do not add up."""

    def build() -> Callable[[], Any]:
        weights, x, chosen = nn.Parameter(torch.randn(4, 8, 8)), torch.randn(32, 8), torch.randint(0, 4, (32,))

        def step() -> None:
            counts = torch.zeros(32, 4).scatter(1, chosen[:, None], 1).long().sum(0)
            sizes = counts.tolist()
            parts = x.split_with_sizes(sizes)
            torch.cat([part @ weights[i] for i, part in enumerate(parts)]).sum().backward()

        return step

    with pytest.raises(DataDependentError, match="split_sizes to sum exactly to 32") as caught:
        memplan.record(build, device="cpu")
    assert "memplan.measure" in str(caught.value)
    assert memplan.simulate(memplan.measure(build, device="cpu")).peak_allocated == measured_peak(build)


def test_an_op_that_fails_beside_a_stand_in_is_the_steps_own_mistake() -> None:
    def build() -> Callable[[], Any]:
        x = torch.randn(4)

        def step() -> None:
            shown(x.sum().item())
            x.reshape(3)

        return step

    def shown(value: float) -> float:
        return value + 1

    with pytest.raises(StepError, match="invalid for input of size 4"):
        memplan.record(build, device="cpu")
