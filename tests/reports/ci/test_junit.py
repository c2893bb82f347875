"""JUnit XML, read back by Python's parser."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from reports.ci.hostile_annotations import ANNOTATIONS, HOSTILE

from memplan.reports.ci.junit import dumps

RULES = ["held-graph", "idle-state", "loss-memory", "memory-growth"]


def test_each_rule_is_a_case_and_errors_are_failures() -> None:
    suites = ElementTree.fromstring(dumps(f"net.py:make {HOSTILE}", RULES, ANNOTATIONS).encode())
    (suite,) = suites
    for counted in (suites, suite):
        assert {name: counted.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
            "tests": "4", "failures": "2", "errors": "0", "skipped": "0",
        }  # fmt: skip
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == RULES
    assert [bool(case.findall("failure")) for case in suite] == [True, False, False, True]
    assert list(cases["idle-state"]) == []
    assert cases["loss-memory"].findtext("system-out") == "src/net.py:3: note: It could be smaller. Use another one."
    failure = cases["memory-growth"].find("failure")
    assert failure is not None
    assert failure.get("message") == "It grew more."
    assert failure.text == "\n".join(
        ["models/net.py:1: warning: It grew.", "C:/work/net.py:7: error: It grew more.", "error: Nowhere."]
    )


def test_nothing_found_is_no_failure() -> None:
    (suite,) = ElementTree.fromstring(dumps("net.py:make", RULES, []).encode())
    assert [list(case) for case in suite] == [[]] * 4
    assert suite.get("failures") == "0"
