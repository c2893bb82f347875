"""Annotations as commands of GitHub Actions, which shows them on the lines of a pull request.

Source: https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands; what is escaped is what
``escapeData`` and ``escapeProperty`` of actions/toolkit (packages/core/src/command.ts) escape.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan._text import printable
from memplan.reports.ci.annotations import Annotation

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def dumps(annotations: Sequence[Annotation]) -> str:
    """Return a line for each annotation."""
    return "".join(f"{_line(one)}\n" for one in annotations)


def _line(one: Annotation) -> str:
    properties = {"title": f"memplan {one.rule}"}
    if one.place is not None:
        properties = {"file": one.place[0], "line": str(one.place[1])} | properties
    named = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{_COMMANDS[one.level]} {named}::{_data(one.text)}"


def _data(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
