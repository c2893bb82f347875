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
    """Return a SARIF log of a single run; the same text for the same annotations on every system."""
    used = list(dict.fromkeys(annotation.rule for annotation in annotations))
    rules = [{"id": rule, "shortDescription": {"text": f"{RULES[rule]}."}} for rule in used]
    driver = {"name": "memplan", "semanticVersion": __version__, "rules": rules}
    results = [_result(annotation, used.index(annotation.rule)) for annotation in annotations]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _result(annotation: Annotation, index: int) -> dict[str, Any]:
    """Return an annotation as a SARIF result, with its source line and its layer where they are known."""
    result = {
        "ruleId": annotation.rule,
        "ruleIndex": index,
        "level": annotation.level,
        "message": {"text": annotation.text},
    }
    location: dict[str, Any] = {}
    if annotation.place is not None:
        path, line = annotation.place
        location["physicalLocation"] = {"artifactLocation": _artifact(path), "region": {"startLine": line}}
    if annotation.layer:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(annotation.layer), "kind": "member"}]
    return result | ({"locations": [location]} if location else {}) | {"properties": {"bytes": annotation.bytes}}


def _artifact(path: str) -> dict[str, str]:
    """Return the artifactLocation of a path: relative to the source root unless absolute (section 3.4.3 f.)."""
    if is_absolute(path):
        return {"uri": "file://" + quote(path if path.startswith("/") else f"/{path}", safe="/:")}
    # a colon in the first part of a relative reference would end a scheme (RFC 3986, section 4.2)
    return {"uri": quote(path, safe="/"), "uriBaseId": "%SRCROOT%"}
