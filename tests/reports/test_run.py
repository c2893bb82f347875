"""What is printed of a script besides its explanation."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from torch import nn

import memplan
from memplan.explanation.model import Explanation
from memplan.reports.run import dumps, report
from memplan.reports.terminal import text_of
from memplan.trace.program_facts import Batch, Ending, Facts, Held

FACTS = Facts("steps", 2, None, (Batch(8, "8x32", "train.py:9", 2, 40, cut=False),), (), 3)
EVALUATION = Batch(8, "8x32", "train.py:20", 2, 40, cut=True)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return memplan.explain(nn.Linear(32, 4), "8x32", device="cpu")


def _printed(facts: Facts, explanation: Explanation) -> str:
    return " ".join(text_of(report("train.py --batch-size 8", facts, explanation)).split())


@pytest.mark.parametrize(
    ("ending", "updates", "code", "said"),
    [
        ("steps", 2, None, "ran on tensors without values until it had made 2 updates"),
        ("steps", 1, None, "until it had made 1 update;"),
        ("script", 1, None, "to its end, with 1 update."),
        ("script", 0, None, "to its end, without an update: all of it counts as one step"),
        ("exit", 1, 3, "to its end, with exit code 3, with 1 update."),
        ("exit", 1, 0, "to its end, with 1 update."),
        ("no update", 0, None, "over 256 batches, or 4,096 without gradients"),
        ("time", 1, None, "until its time was over (--limit), with 1 update"),
    ],
)
def test_how_it_ended(explanation: Explanation, ending: Ending, updates: int, code: int | None, said: str) -> None:
    assert said in _printed(replace(FACTS, ending=ending, updates=updates, code=code), explanation)


def test_batches_and_lines(explanation: Explanation) -> None:
    text = _printed(replace(FACTS, batches=(*FACTS.batches, EVALUATION)), explanation)
    assert "A loader's batch (train.py:9): 8x32." in text
    assert "(train.py:20): 8x32; 2 of 40 batches were taken, as nothing trains on them." in text
    assert "3 lines that it printed are not shown" in text


def test_what_was_held_back(explanation: Explanation) -> None:
    path = os.path.join(os.getcwd(), "runs", "log.txt")
    held = (Held("file", path, "train.py:3", 4), Held("network", "example.org", None))
    text = _printed(replace(FACTS, held=held, unlisted=1234), explanation)
    assert "At least 1,234 more are not listed." in text
    assert f"{os.path.join('runs', 'log.txt')} written 4 times train.py:3" in text
    assert "example.org connected to -" in text


def test_json_is_the_explanation_with_the_scripts_facts(explanation: Explanation) -> None:
    data = json.loads(dumps("train.py", FACTS, explanation))
    script = data.pop("script")
    assert data == explanation.to_dict()
    assert script["command"] == "train.py"
    assert script["batches"][0]["text"] == "8x32"
