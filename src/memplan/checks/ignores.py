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
    """Parse ``ID`` or ``ID:layer-pattern``.

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


def not_ignored(
    findings: Iterable[Finding], ignores: Sequence[Ignore], created_at: Mapping[str, str | None]
) -> list[Finding]:
    """Return the findings that are not ignored.

    A finding about several layers (``details["layers"]``) is ignored if each of them is. A comment counts where a layer
    is called, and where ``created_at`` says that it was created.
    """
    return [finding for finding in findings if not _is_ignored(finding, ignores, created_at)]


def _is_ignored(finding: Finding, ignores: Sequence[Ignore], created_at: Mapping[str, str | None]) -> bool:
    """Return whether a pattern or a comment ignores the finding for each layer that it is about."""
    rows = finding.details.get("layers") or [{"layer": finding.layer, "where": finding.where}]

    def ignored(layer: str, where: str | None) -> bool:
        by_pattern = any(ignore.id == finding.id and fnmatchcase(layer, ignore.layer) for ignore in ignores)
        return by_pattern or any(_has_comment(line, finding.id) for line in (where, created_at.get(layer)))

    return all(ignored(row["layer"], row["where"]) for row in rows)


def _has_comment(where: str | None, check: str) -> bool:
    """Return whether the line at a ``file:line`` has a comment that ignores this check or all checks."""
    path, number = located(where)
    match = _COMMENT.search(linecache.getline(path, number)) if path else None
    return match is not None and (match[1] is None or check in {name.strip() for name in match[1].split(",")})


def located(where: str | None) -> tuple[str, int]:
    """Return absolute path and line number of a ``file:line`` relative to the working directory or ``sys.path``; ("",
    0) if there is no such file."""
    path, _, line = (where or "").rpartition(":")
    number = whole_number(line)
    if not path or number is None:
        return "", 0
    for folder in (os.curdir, *sys.path):
        if os.path.isfile(os.path.join(folder, path)):
            return os.path.abspath(os.path.join(folder, path)), number
    return "", 0
