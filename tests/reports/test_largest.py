"""What `largest` found, in words and as data."""

from __future__ import annotations

import json

import torch
from torch import nn

from memplan.reports.largest import report
from memplan.reports.terminal import text_of
from memplan.studies.axes.subject import Subject
from memplan.studies.capacity.largest import Largest, find_largest
from memplan.studies.capacity.limit import room_of
from memplan.trace.step import StepOptions


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))


def found(device: str, budget: str, most: int | None = None) -> Largest:
    return find_largest(
        Subject(perceptron, StepOptions(("8x64",)).checked()), "batch", room_of(device, budget), most=most
    )


def printed(one: Largest) -> str:
    return " ".join(text_of(report(one)).split())


def test_the_answer_and_every_recording() -> None:
    one = found("cpu", "400KB")
    text = printed(one)
    assert f"perceptron: the largest batch in 390.6 KiB (CPU) is {one.value}; {one.value + 1} does not fit" in text
    held = text.partition(f"At batch {one.value + 1}, what holds it up is ")[2]
    assert f"{(one.value + 1) * 64 * 4 / 1024:.1f} KiB inputs" in held
    assert text.count("KiB fits") + text.count("KiB does not fit") == len(one.tried)
    data = json.loads(one.to_json())
    assert [row["value"] for row in data["tried"]] == [row.value for row in one.tried]


def test_a_card_has_a_context() -> None:
    text = printed(found("t4", "1 GiB", most=64))
    assert "batch 64 fits in 1.0 GiB (NVIDIA T4), and is the largest value to try" in text
    assert "reserved, with context" in text


def test_nothing_fits() -> None:
    assert "not even batch 1 fits in 9.8 KiB (CPU): 16.5 KiB gradients, 16.4 KiB weights, " in printed(
        found("cpu", "10KB")
    )


def test_values_that_failed_are_listed_with_their_reasons() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0], 2, -1).exp() * 2

    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), nn.Flatten(), Halves())

    one = find_largest(Subject(halves, StepOptions(("4x6x1",)).checked()), "sequence", room_of("cpu", 2001))
    text = printed(one)
    assert f"{len(one.tried)} recordings, of which {len(one.failed)} failed" in text
    assert f"Values between the multiples of {one.step} fail, so only these were looked at." in text
    first, *others = sorted(one.failed, key=lambda tried: (tried.value != one.end, tried.value))
    assert others  # of the same kind, at other sizes: told once
    values = ", ".join(str(tried.value) for tried in others)
    assert f"Failed at sequence {first.value}, and so at {values}: step 1 raised RuntimeError: " in text
    assert text.count("raised RuntimeError") == 1
    assert f"{first.value} failed" in text
    rows = {row["value"]: row for row in json.loads(one.to_json())["tried"]}
    assert rows[first.value]["reason"] == first.reason
    assert "need" not in rows[first.value]
    assert rows[one.value] | {"fits": True, "reason": ""} == rows[one.value]
    assert json.loads(one.to_json())["following"] == one.end


def test_a_value_that_fails_can_be_the_end() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.zeros(1, 32, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.places[:, : x.shape[1]]

    text = printed(find_largest(Subject(Short, StepOptions(("2x8x4",)).checked()), "sequence", room_of("cpu", "1MB")))
    assert "is 32; 33 cannot be recorded; " in text
    assert "Failed at sequence 33, and so at " in text
