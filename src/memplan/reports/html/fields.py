"""Fields of saved JSON, checked when they are read: a file can come from a stranger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from memplan import _json
from memplan._json import Unreadable

_Kind = TypeVar("_Kind")


class Fields:
    """A mapping of a file, read field by field.

    Args:
        plain: what `json.loads` gave.
        place: how to name it in an error.

    Raises:
        Unreadable: it is no mapping.
    """

    def __init__(self, plain: Any, place: str = "it") -> None:
        if not isinstance(plain, Mapping):
            raise Unreadable(f"{place} is no mapping")
        self.plain, self.place = plain, place

    def get(self, key: str, kind: type[_Kind]) -> _Kind:
        """Return a field of a type. Raises Unreadable: it is missing, or of another type."""
        if key not in self.plain:
            raise Unreadable(f"{self.place} lacks {key!r}")
        return _json.from_plain(kind, self.plain[key], f"{self.place}.{key}")

    def maybe(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return a field of a type; None where it is null or missing."""
        return None if self.plain.get(key) is None else self.get(key, kind)

    def signed(self, key: str) -> int:
        """Return a field that is a number of bytes and may be negative; 0 where it is null or missing."""
        found = self.plain.get(key)
        return 0 if found is None else _json.from_plain(_json.SignedInt, found, f"{self.place}.{key}")

    def inner(self, key: str) -> Fields | None:
        """Return a field that is a mapping; None where it is null or missing."""
        return None if self.plain.get(key) is None else Fields(self.plain[key], f"{self.place}.{key}")

    def part(self, key: str) -> Fields:
        """Return a field that is a mapping. Raises Unreadable: there is none."""
        found = self.inner(key)
        if found is None:
            raise Unreadable(f"{self.place} lacks {key!r}")
        return found

    def rows(self, key: str) -> list[Fields]:
        """Return a field that is a list of mappings; none where it is null or missing."""
        found = self.plain.get(key)
        if found is None:
            return []
        if not isinstance(found, list):
            raise Unreadable(f"{self.place}.{key} is no list")
        return [Fields(row, f"{self.place}.{key}[{place}]") for place, row in enumerate(found)]

    def sizes(self, key: str) -> dict[str, int]:
        """Return a field that maps names to bytes."""
        return dict(self.get(key, Mapping[str, int]))  # pyright: ignore[reportArgumentType, reportAbstractUsage]

    def sizes_of(self, keys: Iterable[str]) -> dict[str, int]:
        """Return fields that are bytes, by their names."""
        return {key: self.get(key, int) for key in keys}

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a field that is a list of texts; none where it is null or missing."""
        return self.maybe(key, tuple[str, ...]) or ()
