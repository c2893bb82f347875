"""Annotations as JUnit XML: a test case for each rule that was looked at, failed where an annotation is an error.

Source: https://github.com/testmoapp/junitxml, which describes what the readers of CI systems have in common. Times are
left out: the same result has the same bytes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from memplan._text import printable
from memplan.reports.ci.annotations import Annotation


def dumps(target: str, rules: Sequence[str], annotations: Sequence[Annotation]) -> str:
    """Return a test suite of a target with a case for each rule; what is no error stands in its output."""
    by_rule = {rule: [one for one in annotations if one.rule == rule] for rule in rules}
    failed = sum(any(one.level == "error" for one in found) for found in by_rule.values())
    counts = {"tests": str(len(rules)), "failures": str(failed), "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": f"memplan {printable(target)}"} | counts)
    for rule, found in by_rule.items():
        case = ElementTree.SubElement(suite, "testcase", {"classname": printable(target), "name": rule})
        errors = [one for one in found if one.level == "error"]
        if errors:
            failure = ElementTree.SubElement(case, "failure", {"type": rule, "message": errors[0].text})
            failure.text = "\n".join(map(_line, found))
        elif found:
            ElementTree.SubElement(case, "system-out").text = "\n".join(map(_line, found))
    ElementTree.indent(suites, " ")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _line(one: Annotation) -> str:
    place = f"{one.place[0]}:{one.place[1]}: " if one.place else ""
    return f"{printable(place)}{one.level}: {one.text}"
