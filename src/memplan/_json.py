"""Dataclasses as JSON text, and back by their own type hints. Reading trusts nothing: a file can come from a stranger.

A field with a default may be missing: a file of before it was added is read still. An unknown one is refused by name.
Plain values only: texts, finite numbers, booleans, tuples, sets, mappings by text, dataclasses and named tuples.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

LONGEST = 64 << 20
"""Characters of the longest text that is read."""
DEEPEST = 12
"""Levels of nesting in what has no type of its own."""
_LARGEST = 1 << 63

Json = Any
"""What JSON can hold, with tuples for its lists: the type hint for what is checked for no more than that."""

Signed = Annotated[float, "below 0, too"]
"""The type hint of a number that can be below 0; all others cannot."""


class Unreadable(ValueError):
    """What was found is not what the type hints say; the text names the place."""


def to_plain(value: Any) -> Any:
    """A value as what `json.dumps` takes: dataclasses as mappings by field, tuples as lists, sets as sorted lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [to_plain(part) for part in value]
    return value


def text_of(plain: Mapping[str, Any]) -> str:
    """A mapping as JSON text: a line for each key, and for each row of a list of rows."""
    lines = [f"{_compact(key)}:{_rows(value)}" for key, value in plain.items()]
    return "{" + ",\n".join(lines) + "}\n"


def _rows(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def parse(text: str) -> Any:
    """JSON text as plain values. Raises Unreadable: too long, or not JSON."""
    if len(text) > LONGEST:
        raise Unreadable(f"it has {len(text)} characters, {LONGEST} at most are read")
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON ({error})") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def from_plain(kind: Any, plain: Any, place: str) -> Any:
    """A value of a type out of what `parse` gives.

    Args:
        kind: the type, as type hints write it.
        plain: what was read.
        place: what to call it in an error.

    Raises:
        Unreadable: it is something else.
    """
    if kind is Json:
        return frozen(plain, place)
    if kind == Signed:
        return _scalar(float, plain, place, least=-math.inf)
    if is_dataclass(kind):
        return _from_mapping(kind, plain, place)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(inner, plain, place)
    if origin in (Union, types.UnionType):
        rest = [part for part in inner if part is not type(None)]
        return None if plain is None and len(rest) < len(inner) else from_plain(rest[0], plain, place)
    if origin is tuple:
        return _from_list(inner, plain, place)
    if origin is frozenset:
        return frozenset(_from_list((inner[0], ...), plain, place))
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*_from_list(tuple(get_type_hints(kind).values()), plain, place))
    if origin is Mapping:
        return {key: from_plain(inner[1], part, f"{place}[{key!r}]") for key, part in _mapping(plain, place).items()}
    return _scalar(kind, plain, place)


def frozen(plain: Any, place: str, depth: int = DEEPEST) -> Json:
    """What JSON can hold, checked, with tuples in place of lists. Raises Unreadable."""
    if depth == 0:
        raise Unreadable(f"{place} is nested deeper than {DEEPEST} levels")
    if isinstance(plain, Mapping):
        return {str(key): frozen(part, place, depth - 1) for key, part in plain.items()}
    if isinstance(plain, (tuple, list)):
        return tuple(frozen(part, place, depth - 1) for part in plain)
    if plain is None or isinstance(plain, bool):
        return plain
    return _scalar(type(plain), plain, place, least=-math.inf)


def _from_mapping(kind: Any, plain: Any, place: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    given = _mapping(plain, place)
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    missing, unknown = sorted(needed - given.keys()), given.keys() - hints.keys()
    if missing or unknown:
        raise Unreadable(f"{place} lacks {missing[0]!r}" if missing else f"{place} has an unknown {min(unknown)!r:.40}")
    return kind(**{name: from_plain(hints[name], part, f"{place}.{name}") for name, part in given.items()})


def _from_list(kinds: tuple[Any, ...], plain: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise Unreadable(f"{place} is {_shown(plain)}, not a list")
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = (kinds[0],) * len(plain)
    if len(kinds) != len(plain):
        raise Unreadable(f"{place} has {len(plain)} parts, not {len(kinds)}")
    return tuple(
        from_plain(kind, part, f"{place}[{at}]") for at, (kind, part) in enumerate(zip(kinds, plain, strict=True))
    )


def _mapping(plain: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise Unreadable(f"{place} is {_shown(plain)}, not a mapping")
    return plain


def _one_of(allowed: tuple[Any, ...], plain: Any, place: str) -> Any:
    if not isinstance(plain, str) or plain not in allowed:
        raise Unreadable(f"{place} is {_shown(plain)}, which is none of {', '.join(map(repr, allowed))}")
    return plain


def _scalar(kind: Any, plain: Any, place: str, least: float = 0) -> Any:
    """A text, a boolean or a number, which is 0 or more where nothing else is said."""
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        plain = float(plain) if abs(plain) < _LARGEST else plain
    if type(plain) is not kind or kind not in (str, bool, int, float):
        raise Unreadable(f"{place} is {_shown(plain)}, not {getattr(kind, '__name__', kind)}")
    if kind in (int, float) and not (least <= plain and abs(plain) < (_LARGEST if kind is int else math.inf)):
        raise Unreadable(f"{place} is {_shown(plain)}, which is out of range")
    return plain


def _shown(plain: Any) -> str:
    return f"{plain!r:.40}" if not isinstance(plain, int) or abs(plain) < _LARGEST else "a number of many digits"
