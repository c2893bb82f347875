"""Annotations as SARIF 2.1.0, which code scanning reads.

Source: https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/sarif-v2.1.0-errata01-os-complete.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from memplan._text import printable
from memplan._version import __version__
from memplan.reports.ci.annotations import RULES, Annotation, is_absolute

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def dumps(annotations: Sequence[Annotation]) -> str:
    """Return the text of a log with one run: the same text for the same annotations, on every system."""
    used = list(dict.fromkeys(one.rule for one in annotations))
    rules = [{"id": rule, "shortDescription": {"text": f"{RULES[rule]}."}} for rule in used]
    driver = {"name": "memplan", "semanticVersion": __version__, "rules": rules}
    results = [_result(one, used.index(one.rule)) for one in annotations]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _result(one: Annotation, index: int) -> dict[str, Any]:
    result = {"ruleId": one.rule, "ruleIndex": index, "level": one.level, "message": {"text": one.text}}
    location: dict[str, Any] = {}
    if one.place is not None:
        path, line = one.place
        location["physicalLocation"] = {"artifactLocation": _artifact(path), "region": {"startLine": line}}
    if one.layer:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(one.layer), "kind": "member"}]
    return result | ({"locations": [location]} if location else {}) | {"properties": {"bytes": one.bytes}}


def _artifact(path: str) -> dict[str, str]:
    """Return a URI, relative to the root of the source where it lies in it (section 3.4.3 f.)."""
    if is_absolute(path):
        return {"uri": "file://" + quote(path if path.startswith("/") else f"/{path}", safe="/:")}
    # a colon in the first part of a relative reference would end a scheme (RFC 3986, section 4.2)
    return {"uri": quote(path, safe="/"), "uriBaseId": "%SRCROOT%"}
