"""Workflow commands, read back as the runner of GitHub Actions reads them."""

from __future__ import annotations

import re

from reports.ci.hostile_annotations import ANNOTATIONS

from memplan.reports.ci.github import dumps


def unescaped(text: str, names: dict[str, str]) -> str:
    """Undo the escapes as ActionCommand.cs of actions/runner does: each in turn, the per cent sign last."""
    for code, sign in (names | {"%0D": "\r", "%0A": "\n", "%25": "%"}).items():
        text = text.replace(code, sign)
    return text


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """Read a line as TryParseV2 of actions/runner does."""
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match is not None, line
    pairs = (pair.split("=", 1) for pair in match[2].split(","))
    properties = {name: unescaped(value, {"%3A": ":", "%2C": ","}) for name, value in pairs}
    return match[1], properties, unescaped(match[3], {})


def test_each_annotation_is_a_line_that_is_read_as_it_was_meant() -> None:
    lines = dumps(ANNOTATIONS).splitlines()
    found = [parsed(line) for line in lines]
    assert [kind for kind, _, _ in found] == ["error", "notice", "warning", "error", "error"]
    assert [properties.get("file") for _, properties, _ in found] == [
        "src/a b,c:d.py", "src/net.py", "models/net.py", "C:/work/net.py", None,
    ]  # fmt: skip
    assert [properties.get("line") for _, properties, _ in found] == ["12", "3", "1", "7", None]
    assert [properties["title"] for _, properties, _ in found] == [f"memplan {one.rule}" for one in ANNOTATIONS]
    assert [text for _, _, text in found] == [one.text for one in ANNOTATIONS]
    assert found[1][2] == "It could be smaller. Use another one."


def test_none_is_nothing() -> None:
    assert dumps([]) == ""
