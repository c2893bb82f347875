"""`memplan.check`: what it takes, what it refuses, and that it changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.checks.registry import IDS
from memplan.errors import InputError, TargetError

ID = "border-erosion"


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Conv2d(1, 1, 3) for _ in range(5)])


def test_a_module_a_maker_a_build_and_a_trace_are_found_alike() -> None:
    def build() -> Any:
        model, x = stack(), torch.randn(1, 1, 32, 32)
        return lambda: model(x).sum().backward()

    found = [
        memplan.check(stack(), "1x1x32x32", device="cpu"),
        memplan.check(stack, "1x1x32x32", device="cpu"),
        memplan.check(build, device="cpu"),
        memplan.check(memplan.record(build, device="cpu")),
    ]
    assert [[f.details["lost"] for f in findings if f.id == ID] for findings in found] == [[[(5, 5), (5, 5)]]] * 4


def test_a_step_of_functions_alone() -> None:
    def build() -> Any:
        weight, x = torch.randn(1, 1, 3, requires_grad=True), torch.randn(1, 1, 20)
        return lambda: nn.functional.conv1d(x, weight).relu().sum().backward()

    (finding,) = [f for f in memplan.check(build, device="cpu") if f.id == ID]
    assert finding.details["lost"] == [(1, 1)]


def test_nothing_of_the_model_changes() -> None:
    model = stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memplan.check(model, "1x1x32x32", device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.padding for module in model.modules() if isinstance(module, nn.Conv2d)] == [(0, 0)] * 5


def test_for_a_card_it_finds_the_same_border() -> None:
    (finding,) = [f for f in memplan.check(stack, "1x1x32x32", device="h100") if f.id == ID]
    assert finding.details["lost"] == [(5, 5), (5, 5)]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"context": -1}, InputError, "whole number of pixels"),
        ({"context": True}, InputError, "whole number of pixels"),
        ({"ignore": ["border"]}, InputError, "border-erosion"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        memplan.check(stack, "1x1x32x32", device="cpu", **given)


def test_a_target_that_is_none() -> None:
    with pytest.raises(TargetError):
        memplan.check(3)


def test_a_trace_takes_no_inputs() -> None:
    trace = memplan.record(lambda: lambda: None, device="cpu")
    with pytest.raises(InputError):
        memplan.check(trace, "1x1x32x32")
    assert memplan.check(trace) == []


def test_what_costs_no_bytes_is_a_note_and_those_of_a_kind_are_one() -> None:
    """Eight of them: layers that pool an odd size, and read none of the last row."""

    def pools() -> nn.ModuleList:
        return nn.ModuleList([nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.MaxPool1d(2)) for _ in range(8)])

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.last = pools(), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.stack([part(x).mean((1, 2)) for part in self.parts]).sum(0)[:, None])

    (finding,) = [f for f in memplan.check(All, "2x1x33", device="cpu") if f.id == "uneven-arithmetic"]
    assert [row["layer"] for row in finding.details["layers"]] == [f"parts.{n}.1" for n in range(8)]
    assert "7 more places" in finding.message
    assert memplan.check(All, "2x1x33", device="cpu", ignore="uneven-arithmetic:parts.*") == []
    some = memplan.check(All, "2x1x33", device="cpu", ignore="uneven-arithmetic:parts.[0-6].1")
    assert [(f.layer, "more place" in f.message) for f in some if f.id == "uneven-arithmetic"] == [("parts.7.1", False)]


def test_a_warning_costs_bytes_or_more_than_that() -> None:
    def build() -> Any:
        x = torch.randn(4, 256, 16, requires_grad=True)
        return lambda: (torch.softmax(x @ x.mT, -1) @ x).sum().backward()

    (finding,) = memplan.check(memplan.record(build, device="cpu"))  # of a recording the bytes are not known
    assert (finding.id, finding.severity, finding.bytes) == ("math-attention", "info", 0)


def test_ids_are_unique() -> None:
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("options", [{"kernel_size": "x"}, {"kernel_size": 3}, {"stride": "a"}, {"padding": ("a", 1)}])
def test_a_trace_whose_ops_cannot_be_is_refused(options: dict[str, Any]) -> None:
    """As an error of memplan's where the trace was given, whatever a check stumbles over."""

    def build() -> Any:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))
        return lambda: model(torch.randn(1, 3, 32, 32)).sum().backward()

    trace = memplan.record(build, device="cpu")
    assert "border-erosion" in [finding.id for finding in memplan.check(trace)]
    forms = [
        dataclasses.replace(form, options=tuple((dict(form.options) | options).items()))
        if "pool" in trace.ops[form.op].name
        else form
        for form in trace.forms
    ]
    damaged = dataclasses.replace(trace, forms=tuple(forms))
    with pytest.raises(InputError, match="cannot follow the trace"):
        memplan.check(damaged)
