"""Baselines as files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models.guard_figures import MIB, figures

from memplan.errors import BaselineError, FormatError
from memplan.studies.guarding.baseline import Baseline, read_baseline

STEP = figures({("head", "weight"): 3 * MIB, ("head", "saved"): MIB}, {"head": ("linear", "relu")})
BASELINE = Baseline().updated(STEP).updated(figures({("a", "weight"): 5}, device="rtx4090"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    BASELINE.save(tmp_path / "memory.json")
    assert read_baseline(tmp_path / "memory.json") == BASELINE
    assert '\n{"layer":"head","cause":"saved","bytes":1048576},\n' in BASELINE.to_json()  # a line each, for diffs


def test_an_empty_one_is_read() -> None:
    assert Baseline.from_json(Baseline().to_json(), "it") == Baseline()


def test_the_same_steps_have_the_same_text_in_whatever_order_they_were_added() -> None:
    other = Baseline().updated(BASELINE.steps[1]).updated(BASELINE.steps[0])
    assert other.to_json() == BASELINE.to_json()


def test_one_device_is_replaced_and_the_others_stay() -> None:
    new = figures({("head", "weight"): 7}, device="h100")
    found = BASELINE.updated(new)
    assert found.find("net.py:build", "", "h100") == new
    assert found.find("net.py:build", "", "rtx4090") == BASELINE.find("net.py:build", "", "rtx4090")
    assert len(found.steps) == 2


def changed(**more: Any) -> str:
    data = json.loads(BASELINE.to_json())
    data["steps"][0] |= more
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no baseline that can be used: it is not JSON"),
        ("[" * 100_000, "it is nested too deep to be read"),
        ("[]", "is [], not a mapping"),
        ('{"format":"memplan.plan"}', "has the format 'memplan.plan', not memplan.baseline"),
        ('{"format":"memplan.baseline","schema":2}', "has schema version 2; this memplan reads 1"),
        ('{"format":"memplan.baseline","schema":1,"steps":null}', "steps is None, not a list"),
        (changed(peak=1), "holds 4194304 bytes at a peak of 1"),
        (changed(peak=-1), "peak is -1, which is out of range"),
        (changed(peak="4194304"), "peak is '4194304', not int"),
        (changed(held=[{"layer": "head", "cause": "weight"}]), "held[0] lacks 'bytes'"),
        (changed(more=1), "has an unknown 'more'"),
        (changed(device="rtx4090"), "has a step twice for one device"),
        (changed(peak=10**400), "is a number of many digits"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(FormatError) as raised:
        Baseline.from_json(text, "memory.json")
    assert str(raised.value).startswith("memory.json is no baseline that can be used: it")
    assert why in str(raised.value)


def test_a_missing_one_says_how_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match=r"there is no baseline .*none\.json\. .* --update"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(BaselineError, match="Is a directory"):
        read_baseline(tmp_path)
