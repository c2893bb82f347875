"""Findings to leave out: by layer, or by a comment on the line."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from memplan._text import whole_number
from memplan.checks.finding import Finding
from memplan.errors import InputError

_COMMENT = re.compile(r"#\s*memplan:\s*ignore(?:\[([\w\s,-]*)\])?")


@dataclass(frozen=True, slots=True)
class Ignore:
    """A check, and a pattern of layers such as ``encoder.*``."""

    id: str
    layer: str = "*"


def parse_ignore(text: str, ids: Sequence[str]) -> Ignore:
    """Return an ignore from ``ID`` or ``ID:layer-pattern``.

    Raises:
        InputError: no such check.

    Example:
        >>> parse_ignore("border-erosion:encoder.*", ["border-erosion"])
        Ignore(id='border-erosion', layer='encoder.*')
    """
    name, _, layer = text.partition(":")
    if name not in ids:
        raise InputError(
            f"--ignore {text!r} names no check",
            expected=f"one of {', '.join(ids)}, then a colon and a pattern of layers if wanted",
            do="Choose one of these",
        )
    return Ignore(name, layer or "*")


def kept(findings: Iterable[Finding], ignores: Sequence[Ignore], made: Mapping[str, str | None]) -> list[Finding]:
    """Leave out the findings to be ignored.

    A finding that is about several layers (``details["layers"]``) is ignored once each of them is.

    Args:
        findings: all of them.
        ignores: by layer.
        made: ``file:line`` at which a layer was made: a comment counts there, too.
    """
    return [finding for finding in findings if not _is_ignored(finding, ignores, made)]


def _is_ignored(finding: Finding, ignores: Sequence[Ignore], made: Mapping[str, str | None]) -> bool:
    rows = finding.details.get("layers") or [{"layer": finding.layer, "where": finding.where}]

    def ignored(layer: str, where: str | None) -> bool:
        by_layer = any(one.id == finding.id and fnmatchcase(layer, one.layer) for one in ignores)
        return by_layer or any(_says_so(line, finding.id) for line in (where, made.get(layer)))

    return all(ignored(row["layer"], row["where"]) for row in rows)


def _says_so(where: str | None, check: str) -> bool:
    """Return whether a line carries a comment that ignores a check (or all of them)."""
    match = _COMMENT.search(source_line(where))
    return match is not None and (match[1] is None or check in {name.strip() for name in match[1].split(",")})


def source_line(where: str | None) -> str:
    """Return the text of a ``file:line``; "" where there is none."""
    path, number = located(where)
    return linecache.getline(path, number) if path else ""


def located(where: str | None) -> tuple[str, int]:
    """Return the file and the line of a ``file:line``, whose file may be relative to anything on ``sys.path``."""
    path, _, line = (where or "").rpartition(":")
    number = whole_number(line)
    if not path or number is None:
        return "", 0
    for folder in (os.curdir, *sys.path):
        if os.path.isfile(os.path.join(folder, path)):
            return os.path.abspath(os.path.join(folder, path)), number
    return "", 0
