from __future__ import annotations

import json

from torch import nn

import memplan


def test_the_text_holds_the_explanation_and_is_the_same_twice() -> None:
    explanation, again = memplan.explain(nn.Linear(4, 3), "2x4"), memplan.explain(nn.Linear(4, 3), "2x4")
    assert json.loads(explanation.to_json()) == explanation.to_dict()
    assert explanation.to_json() == again.to_json()
