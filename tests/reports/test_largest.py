"""What `largest` found, in words and as data."""

from __future__ import annotations

import io
import json

from torch import nn

from memplan.reports.largest import dumps, print_largest
from memplan.studies.largest import Largest, find_largest, room_of
from memplan.studies.subject import Subject
from memplan.trace.step import StepOptions


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))


def found(device: str, budget: str, most: int | None = None) -> Largest:
    return find_largest(
        Subject(perceptron, StepOptions(("8x64",)).checked()), "batch", room_of(device, budget), most=most
    )


def printed(one: Largest) -> str:
    out = io.StringIO()
    print_largest(one, out)
    return " ".join(out.getvalue().split())


def test_the_answer_and_every_recording() -> None:
    one = found("cpu", "400KB")
    text = printed(one)
    assert f"perceptron: the largest batch in 390.6 KiB (CPU) is {one.value}; {one.value + 1} does not fit" in text
    assert text.count("KiB fits") + text.count("KiB does not fit") == len(one.tried)
    data = json.loads(dumps(one))
    assert [row["value"] for row in data["tried"]] == [row.value for row in one.tried]


def test_a_card_has_a_context() -> None:
    text = printed(found("t4", "1 GiB", most=64))
    assert "batch 64 fits in 1.0 GiB (NVIDIA T4), and is the most that was to be looked at" in text
    assert "reserved, with context" in text


def test_nothing_fits() -> None:
    assert "not even batch 1 fits in 9.8 KiB (CPU): 16.5 KiB gradients, 16.4 KiB weights, " in printed(
        found("cpu", "10KB")
    )
