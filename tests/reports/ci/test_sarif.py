"""SARIF, beside the schema that OASIS publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from reports.ci.hostile_annotations import ANNOTATIONS, HOSTILE
from reports.ci.json_schema import violations

from memplan.reports.ci.annotations import Annotation
from memplan.reports.ci.sarif import dumps

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "sarif-2.1.0.json").read_text(encoding="utf-8"))


def log(annotations: list[Annotation]) -> Any:
    return json.loads(dumps(annotations))


@pytest.mark.parametrize("annotations", [[], ANNOTATIONS, ANNOTATIONS[::-1]], ids=["none", "all", "reversed"])
def test_the_log_is_valid(annotations: list[Annotation]) -> None:
    assert list(violations(log(annotations), SCHEMA, SCHEMA)) == []
    assert dumps(annotations) == dumps(list(annotations))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda run: run.pop("tool"), "$.runs[0] lacks tool"),
        (lambda run: run["results"][0].update(level="fatal"), "$.runs[0].results[0].level is none of"),
        (lambda run: run["results"][0]["message"].update(txt="x"), "$.runs[0].results[0].message has an unknown txt"),
        (lambda run: run["results"][0].update(ruleIndex="0"), "$.runs[0].results[0].ruleIndex is no integer"),
    ],
)
def test_the_schema_refuses_what_is_wrong(change: Any, found: str) -> None:
    wrong = log(ANNOTATIONS)
    change(wrong["runs"][0])
    assert any(one.startswith(found) for one in violations(wrong, SCHEMA, SCHEMA))


def test_each_result_names_its_rule_its_level_and_its_place() -> None:
    (run,) = log(ANNOTATIONS)["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == ["held-graph", "loss-memory", "memory-growth"]
    assert [rules[one["ruleIndex"]] for one in run["results"]] == [one.rule for one in ANNOTATIONS]
    assert [one["level"] for one in run["results"]] == ["error", "note", "warning", "error", "error"]
    places = [one.get("locations", [{}])[0].get("physicalLocation") for one in run["results"]]
    lines = [place and place["region"]["startLine"] for place in places]
    assert lines == [12, 3, 1, 7, None]
    uris = [place and place["artifactLocation"]["uri"] for place in places]
    assert uris == ["src/a%20b%2Cc%3Ad.py", "src/net.py", "models/net.py", "file:///C:/work/net.py", None]
    assert unquote(urlsplit(uris[0]).path) == "src/a b,c:d.py"
    assert ["uriBaseId" in place["artifactLocation"] for place in places if place] == [True, True, True, False]


def test_names_do_not_steer_who_reads_them() -> None:
    text = dumps(ANNOTATIONS)
    assert HOSTILE not in text
    assert text.isascii()
    message = log(ANNOTATIONS)["runs"][0]["results"][0]["message"]["text"]
    assert message.isprintable()
    assert message == ']]><b a="1">&\'?[31m?????::error::%0A, 100 % is held.'.replace("?????", "????")
