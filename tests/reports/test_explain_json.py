from __future__ import annotations

import json

from torch import nn

import memplan
from memplan.reports.explain import dumps


def test_the_text_holds_the_explanation_and_is_the_same_twice() -> None:
    explanation, again = memplan.explain(nn.Linear(4, 3), "2x4"), memplan.explain(nn.Linear(4, 3), "2x4")
    assert json.loads(dumps(explanation)) == explanation.to_dict()
    assert dumps(explanation) == dumps(again)
