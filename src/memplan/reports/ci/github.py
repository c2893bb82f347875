"""Annotations as commands of GitHub Actions, which shows them on the lines of a pull request.

Source: https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands; escaped as by
``escapeData`` and ``escapeProperty`` of actions/toolkit (packages/core/src/command.ts) escape.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan._text import printable
from memplan.reports.ci.annotations import Annotation

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def dumps(annotations: Sequence[Annotation]) -> str:
    """Return a workflow command line for each annotation."""
    return "".join(f"{_line(annotation)}\n" for annotation in annotations)


def _line(annotation: Annotation) -> str:
    """Return the workflow command for an annotation."""
    properties = {"title": f"memplan {annotation.rule}"}
    if annotation.place is not None:
        properties = {"file": annotation.place[0], "line": str(annotation.place[1])} | properties
    named = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{_COMMANDS[annotation.level]} {named}::{_data(annotation.text)}"


def _data(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
