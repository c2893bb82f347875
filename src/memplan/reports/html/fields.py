"""Checked access to the fields of saved JSON, which can come from untrusted files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from memplan import _json
from memplan._json import Unreadable

_Kind = TypeVar("_Kind")


class Fields:
    """A JSON object whose fields are checked when they are read. ``place`` is its name in error messages, such as
    "it.rows[3]".

    Raises:
        Unreadable: ``plain`` is no mapping.
    """

    def __init__(self, plain: Any, place: str = "it") -> None:
        """``plain``: the JSON object; ``place``: its path in messages, such as ``it.rows[3]``. Raises Unreadable if it
        is no object."""
        if not isinstance(plain, Mapping):
            raise Unreadable(f"{place} is no mapping")
        self.plain, self.place = plain, place

    def get(self, key: str, kind: type[_Kind]) -> _Kind:
        """Return a field. Raises Unreadable if it is missing or not of type ``kind``."""
        if key not in self.plain:
            raise Unreadable(f"{self.place} lacks {key!r}")
        return _json.from_plain(kind, self.plain[key], f"{self.place}.{key}")

    def maybe(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return a field, None if it is null or missing. Raises Unreadable if it is of another type."""
        return None if self.plain.get(key) is None else self.get(key, kind)

    def signed(self, key: str) -> int:
        """Return an integer field that may be negative, such as a difference of bytes; 0 if it is null or missing."""
        value = self.plain.get(key)
        return 0 if value is None else _json.from_plain(_json.SignedInt, value, f"{self.place}.{key}")

    def inner(self, key: str) -> Fields | None:
        """Return an object field; None if it is null or missing."""
        return None if self.plain.get(key) is None else Fields(self.plain[key], f"{self.place}.{key}")

    def part(self, key: str) -> Fields:
        """Return an object field. Raises Unreadable if it is null or missing."""
        inner = self.inner(key)
        if inner is None:
            raise Unreadable(f"{self.place} lacks {key!r}")
        return inner

    def rows(self, key: str) -> list[Fields]:
        """Return the objects of a list field; [] if it is null or missing."""
        rows = self.plain.get(key)
        if rows is None:
            return []
        if not isinstance(rows, list):
            raise Unreadable(f"{self.place}.{key} is no list")
        return [Fields(row, f"{self.place}.{key}[{index}]") for index, row in enumerate(rows)]

    def sizes(self, key: str) -> dict[str, int]:
        """Return a field that is an object of names and bytes."""
        return dict(self.get(key, Mapping[str, int]))  # pyright: ignore[reportArgumentType, reportAbstractUsage]

    def sizes_of(self, keys: Iterable[str]) -> dict[str, int]:
        """Return several fields in bytes, by name."""
        return {key: self.get(key, int) for key in keys}

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a field that is a list of strings; () if it is null or missing."""
        return self.maybe(key, tuple[str, ...]) or ()
