"""JSON Schema, the keywords that SARIF's schema uses and its messages need: slow and obvious."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
}  # fmt: skip
_KEYWORDS = {
    "$ref", "$schema", "$id", "title", "source", "definitions", "type", "properties", "additionalProperties",
    "required", "items", "minItems", "uniqueItems", "enum", "minimum", "maximum", "pattern", "format", "anyOf",
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Yield what a value violates of a schema, with its place."""
    assert set(schema) <= _KEYWORDS, f"no such keyword is known here: {set(schema) - _KEYWORDS}"
    if "$ref" in schema:
        yield from violations(value, root["definitions"][schema["$ref"].rpartition("/")[2]], root, at)
        return
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        yield f"{at} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} is none of {schema['enum']}"
    if "anyOf" in schema and all(any(violations(value, {**one}, root, at)) for one in schema["anyOf"]):
        yield f"{at} is none of {schema['anyOf']}"
    if isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{at} is out of range"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at} does not match {schema['pattern']}"
    if isinstance(value, list):
        yield from _list(value, schema, root, at)
    if isinstance(value, dict):
        yield from _object(value, schema, root, at)


def _list(value: list[Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0) or (
        schema.get("uniqueItems") and any(a in value[:i] for i, a in enumerate(value))
    ):
        yield f"{at} has too few items, or one twice"
    for index, item in enumerate(value):
        yield from violations(item, schema.get("items", {}), root, f"{at}[{index}]")


def _object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{at} lacks {name}" for name in schema.get("required", ()) if name not in value)
    for name, part in value.items():
        if name in known:
            yield from violations(part, known[name], root, f"{at}.{name}")
        elif others is False:
            yield f"{at} has an unknown {name}"
        elif isinstance(others, dict):
            yield from violations(part, others, root, f"{at}.{name}")
