"""Annotations as JUnit XML: a test case for each rule that ran, failed if an annotation of it is an error.

Source: https://github.com/testmoapp/junitxml, which describes what the readers of CI systems have in common. Times are
left out: the same result has the same bytes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from memplan._text import printable
from memplan.reports.ci.annotations import Annotation


def dumps(target: str, rules: Sequence[str], annotations: Sequence[Annotation]) -> str:
    """Return JUnit XML with a test case for each rule; warnings and notes go to the case's output."""
    by_rule = {rule: [annotation for annotation in annotations if annotation.rule == rule] for rule in rules}
    failed = sum(any(annotation.level == "error" for annotation in group) for group in by_rule.values())
    counts = {"tests": str(len(rules)), "failures": str(failed), "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": f"memplan {printable(target)}"} | counts)
    for rule, group in by_rule.items():
        case = ElementTree.SubElement(suite, "testcase", {"classname": printable(target), "name": rule})
        errors = [annotation for annotation in group if annotation.level == "error"]
        if errors:
            failure = ElementTree.SubElement(case, "failure", {"type": rule, "message": errors[0].text})
            failure.text = "\n".join(map(_line, group))
        elif group:
            ElementTree.SubElement(case, "system-out").text = "\n".join(map(_line, group))
    ElementTree.indent(suites, " ")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _line(annotation: Annotation) -> str:
    """Return an annotation as a line, with its file and line number if they are known."""
    location = f"{annotation.place[0]}:{annotation.place[1]}: " if annotation.place else ""
    return f"{printable(location)}{annotation.level}: {annotation.text}"
