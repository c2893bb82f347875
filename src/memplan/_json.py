"""Dataclasses as JSON text, and back by their own type hints; `Saved`, the base class of all results in files.

Reading trusts nothing: a file can come from a stranger. A field with a default may be missing, so that files written
before it was added still load; an unknown field is refused by name. Values are texts, numbers, booleans, lists, tuples,
sets, mappings by text, dataclasses and named tuples.

A dataclass can say more than its fields do:

- ``DERIVED``: names of properties that are written, too, and ignored when read.
- ``AS_ROWS``: whether the dataclasses in its fields are lists of values, without the names of their fields.
- ``to_dict()``: what is written instead of its fields.
- ``_check()``: raises Unreadable if fields contradict each other. It is called after reading.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import reprlib
import stat
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from memplan._bytes import format_bytes
from memplan._text import write_whole
from memplan.errors import FormatError

if TYPE_CHECKING:
    from cattrs import Converter

LONGEST = 256 << 20
"""Bytes of the largest file that is read, and characters of the longest text."""
DEEPEST = 12
"""Levels of nesting in a value without a type of its own."""
_LARGEST = 1 << 63
MOST_BYTES = 1 << 62
"""Bytes that all allocations of a file take at most: rounded to blocks, their sum is still a number of 64 bits."""
_FEW_BYTES = 384 << 20
_TIMES_FILE, _TIMES_TEXT = 2000, 60
"""What a file may take in memory, as multiples of its bytes and of its unpacked bytes. Recorded memory snapshots take
up to 700 and 35 by the bounds here, traces 27 of their text."""

Json = Annotated[Any, "any JSON value"]
"""Type hint of a field that holds any JSON value, with tuples for its lists."""

Signed = Annotated[float, "may be negative"]
SignedInt = Annotated[int, "may be negative"]
"""Type hints of the numbers that may be negative; all others may not."""

Measured = Annotated[float, "may be infinite or no number"]
"""Type hint of an error that was measured: it is a text where JSON has no number for it."""


class Unreadable(ValueError):
    """A value does not match its type hint; the text names the place."""

    place = ""
    """Of the value, within what is read."""

    def within(self, place: str) -> Unreadable:
        """Add the place of the value in an enclosing value, such as ``[3]`` or ``.layers``, and return this error."""
        self.place = place + self.place
        return self


def check_format(plain: Mapping[str, Any], name: str, schema: int = 1) -> None:
    """Check the keys "format" and "schema" of parsed JSON: the format's name, and its version. Raises Unreadable."""
    if plain.get("format") != name:
        raise Unreadable(f"has the format {shown(plain.get('format'))}, not {name}")
    if plain.get("schema") != schema:
        raise Unreadable(f"has schema version {shown(plain.get('schema'))}; this memplan reads {schema}")


class Written:
    """A result that can be written as JSON: a mapping whose first two keys are its format and schema version.

    All sizes in it are bytes, all times seconds.
    """

    __slots__ = ()
    FORMAT: ClassVar[str]
    SCHEMA: ClassVar[int] = 1
    """Version of the format, raised whenever an older or a newer reader would misread it. A new field with a default
    does not raise it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"format": self.FORMAT, "schema": self.SCHEMA, **self._plain()}

    def _plain(self) -> dict[str, Any]:
        return by_field(self)

    def to_json(self) -> str:
        """Return JSON text; equal results give equal texts."""
        return text_of(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to a file. An existing file is replaced only once the new text is complete. Raises OSError."""
        write_whole(path, self.to_json())


class Saved(Written):
    """A dataclass that can be written as JSON and read again."""

    __slots__ = ()
    AGAIN: ClassVar[str] = "Write it again"
    """What to do about a file that cannot be read."""

    @classmethod
    def from_dict(cls, plain: Any, source: str = "The data") -> Self:
        """Read what `to_dict` returned; ``source`` is its name in errors. Raises FormatError."""
        return cls._read(lambda: plain, source)

    @classmethod
    def from_json(cls, text: str, source: str = "The text") -> Self:
        """Read what `to_json` returned; ``source`` is its name in errors. Raises FormatError."""
        return cls._read(lambda: parse(text), source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote. Raises FormatError, OSError."""
        return cls._read(lambda: parse(read_text(path)), str(path))

    @classmethod
    def _read(cls, plain: Callable[[], Any], source: str) -> Self:
        """Return the result in parsed JSON, which ``plain`` returns.

        Raises FormatError, with the name ``source`` in it, if the JSON is damaged or of another format.
        """
        try:
            content = plain()
            if isinstance(content, dict):
                content = {"format": None, **content}  # so that a missing format is an error
            return from_plain(cls, content, "it")
        except Unreadable as error:
            name = cls.FORMAT.removeprefix("memplan.")
            raise FormatError(
                f"{source} is no {name} that can be used: {error}",
                expected=f"JSON of the format {cls.FORMAT}, schema version {cls.SCHEMA}, as memplan writes it",
                do=f"{cls.AGAIN}, or read it with the memplan that wrote it",
            ) from None

    @classmethod
    def _prepared(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the fields to construct the dataclass from, given a parsed mapping. A subclass can convert them, and
        raises Unreadable if it cannot."""
        return plain


def to_plain(value: Any, *, rows: bool = False) -> Any:
    """Convert a value for `json.dumps`: dataclasses to mappings by field, tuples to lists, sets to sorted lists.

    Fractions become numbers. Infinities, NaN and objects of other types become texts.

    Args:
        value: anything.
        rows: whether dataclasses become lists of their fields' values instead of mappings.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return [to_plain(part, rows=rows) for part in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(part, rows=rows) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if rows and is_dataclass(value):
        return [to_plain(part, rows=True) for part in row_of(value)]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return by_field(value)
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return str(value)


def by_field(record: Any) -> dict[str, Any]:
    """Return a dataclass as a mapping for JSON: its fields, then the properties that its class names in ``DERIVED``."""
    kind: Any = type(record)
    names = (*_names(kind), *getattr(kind, "DERIVED", ()))
    return {name: to_plain(getattr(record, name), rows=getattr(kind, "AS_ROWS", False)) for name in names}


def named(value: Any, *names: str) -> dict[str, Any]:
    """Return some attributes of an object as a mapping for JSON, by their names."""
    return {name: to_plain(getattr(value, name)) for name in names}


def text_of(plain: Mapping[str, Any]) -> str:
    """Write a mapping as JSON text: a line for each key, and for each item of a list of mappings or lists."""
    lines = [f"{compact(key)}:{_rows(value)}" for key, value in plain.items()]
    return "{" + ",\n".join(lines) + "}\n"


def _rows(value: Any) -> str:
    """Write a list of mappings or lists with a line for each item, any other value on a single line."""
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(map(compact, value)) + "\n]"
    return compact(value)


def row_of(record: Any) -> list[Any]:
    """Return the values of a dataclass's fields, in order."""
    return [getattr(record, name) for name in _names(type(record))]


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=row_of).encode
"""Writes JSON without spaces; a dataclass as the list of the values of its fields, in order."""


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a JSON file. Raises OSError, and Unreadable for a device or a file above `LONGEST` bytes."""
    content = read_bytes(path, LONGEST + 1)
    if len(content) > LONGEST:
        raise Unreadable(f"it has more than {LONGEST} bytes, the most that are read")
    return content.decode("utf-8", "replace")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Read at most the first ``most`` bytes of a file or pipe. Raises OSError, and Unreadable for a device, which may
    never end."""
    with open(path, "rb") as file:
        kind = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise Unreadable("it is a device, not a file")
        return file.read(most)


def parse(text: str, *, packed: int | None = None, longest: int | None = None) -> Any:
    """Parse JSON text into plain values.

    Args:
        text: what to parse.
        packed: bytes of the file if the text was unpacked from it; None if the text is the file.
        longest: largest number of characters to parse; `LONGEST` by default.

    Raises:
        Unreadable: the text is too long, could take too much memory, or is not JSON.
    """
    most = LONGEST if longest is None else longest
    if len(text) > most:
        raise Unreadable(f"it has {len(text)} characters, {most} at most are read")
    check_memory(memory_of(text), len(text), len(text) if packed is None else packed)
    try:
        return json.loads(text, parse_constant=_no_number)
    except (json.JSONDecodeError, Unreadable) as error:
        raise Unreadable(f"it is not JSON ({error})") from None
    except RecursionError:
        raise Unreadable("it is nested too deep to be read") from None
    except ValueError:  # Python converts no integer of so many digits; its message advises sys.set_int_max_str_digits
        most = sys.get_int_max_str_digits()
        raise Unreadable(f"it has a number of more than {most} digits; {len(str(_LARGEST))} are read at most") from None


def memory_of(text: str) -> int:
    """Return a bound on the bytes that JSON text and its parsed value take together.

    That is 240 bytes for each mapping, 100 for each list and each comma (a slot and a number), 80 for each text (two
    quotes) besides its characters. CPython stores each character of a text with the width of the widest: 1 to 4 bytes.
    """
    wide = 1 if text.isascii() and "\\u" not in text else 4
    containers = 240 * text.count("{") + 100 * text.count("[")
    return 2 * wide * len(text) + containers + 100 * text.count(",") + 40 * text.count('"')


def check_memory(needed: int, unpacked: int, packed: int) -> None:
    """Refuse a file that would take far more memory than its size explains. Raises Unreadable.

    Args:
        needed: a bound on the bytes of memory that the parsed value takes.
        unpacked: bytes or characters to parse.
        packed: bytes of the file itself, which may be compressed.
    """
    most = max(_FEW_BYTES, min(_TIMES_FILE * packed, _TIMES_TEXT * unpacked))
    if needed > most:
        raise Unreadable(f"reading it could take {format_bytes(needed)} of memory, {format_bytes(most)} at most")


def _no_number(name: str) -> None:
    """Refuse NaN, Infinity and -Infinity, which Python's parser takes for numbers."""
    raise Unreadable(f"{name} is no number")


Reader = Callable[[Any, Any], Any]


def from_plain(kind: Any, plain: Any, place: str, *, rows: bool = False) -> Any:
    """Convert parsed JSON to a type.

    Args:
        kind: the type as a type hint, such as ``tuple[int, ...]`` or a dataclass.
        plain: the parsed value.
        place: name of the value in an error.
        rows: whether dataclasses are lists of their fields' values, as `compact` writes them, instead of mappings.

    Raises:
        Unreadable: the value does not match the type.
    """
    try:
        return _converter(rows).structure(plain, kind)
    except Unreadable as error:
        raise Unreadable(f"{place}{error.place} {error}") from None


def read_part(kind: Any, plain: Any, place: str) -> Any:
    """Convert parsed JSON to the type ``kind`` while a larger value is read, for errors at its ``place``: ``.names``,
    ``[3]``. Raises Unreadable."""
    try:
        return _converter(rows=False).structure(plain, kind)
    except Unreadable as error:
        raise error.within(place) from None


def frozen(plain: Any, place: str) -> Json:
    """Return a copy of any JSON value, with tuples for lists. Raises Unreadable if it is nested too deep or no JSON."""
    try:
        return _frozen(plain, Json)
    except Unreadable as error:
        raise Unreadable(f"{place} {error}") from None


@functools.cache
def _converter(rows: bool) -> Converter:
    """Return a strict converter: by default, cattrs would convert a text to a number, and any iterable to a tuple.

    It stops at the first value that does not match: to collect all errors, as cattrs does by default, takes a hundred
    times the memory of the text. With ``rows``, dataclasses are read from lists of their fields' values.

    Each ``*_reader`` in here takes a type hint, and returns the function that reads a parsed value of that type.
    """
    from cattrs import Converter  # imported late: the command line has to answer --help within 0.3 s
    from cattrs.gen import make_dict_structure_fn, override

    converter = Converter(detailed_validation=False)

    def tuple_reader(kind: Any) -> Reader:
        hints = get_args(kind)
        if hints[1:] == (...,):
            return _type_checked(list, "a list", _items_reader(hints[0], converter.get_structure_hook(hints[0])))
        hooks = [converter.get_structure_hook(hint) for hint in hints]
        return _type_checked(list, "a list", _parts_reader(hints, hooks), len(hints))

    def list_reader(kind: Any) -> Reader:
        items = tuple[get_args(kind)[0], ...]
        read = converter.get_structure_hook(items)
        return lambda plain, _: list(read(plain, items))

    def set_reader(kind: Any) -> Reader:
        items = tuple[get_args(kind)[0], ...]
        read = converter.get_structure_hook(items)
        return lambda plain, _: frozenset(read(plain, items))

    def record_reader(kind: Any) -> Reader:
        hints = get_type_hints(kind, include_extras=True)  # cattrs itself drops what Annotated adds
        if not issubclass(kind, tuple):  # a dataclass: class attributes have hints, too
            hints = {name: hints[name] for name in _names(kind)}
        if rows or issubclass(kind, tuple):
            row = tuple[tuple(hints.values())]
            read_row = converter.get_structure_hook(row)
            return lambda plain, _: kind(*read_row(plain, row))
        parts = _converter(rows=True) if getattr(kind, "AS_ROWS", False) else converter
        hooks: dict[str, Any] = {
            name: override(struct_hook=_field_reader(f".{name}", hint, parts.get_structure_hook(hint)))
            for name, hint in hints.items()
        }
        read = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **hooks)
        return _type_checked(dict, "a mapping", _fields_reader(kind, read))

    def mapping_reader(kind: Any) -> Reader:
        hint = get_args(kind)[1]
        return _type_checked(dict, "a mapping", _values_reader(hint, converter.get_structure_hook(hint)))

    factory, hook = converter.register_structure_hook_factory, converter.register_structure_hook_func
    factory(lambda kind: is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, tuple)), record_reader)
    factory(lambda kind: get_origin(kind) is tuple, tuple_reader)
    factory(lambda kind: get_origin(kind) is list, list_reader)
    factory(lambda kind: get_origin(kind) is frozenset, set_reader)
    factory(lambda kind: get_origin(kind) in (Mapping, dict), mapping_reader)
    hook(lambda kind: get_origin(kind) is Literal, _one_of)
    hook(lambda kind: kind in (Any, Json) or (isinstance(kind, types.UnionType) and len(get_args(kind)) > 2), _frozen)
    for scalar in (str, bool, int, float):
        converter.register_structure_hook(scalar, _scalar)
    hook(functools.partial(operator.eq, Measured), _measured)
    for hint, scalar in ((Signed, float), (SignedInt, int)):
        hook(functools.partial(operator.eq, hint), lambda plain, _, kind=scalar: _scalar(plain, kind, -math.inf))
    return converter


def _type_checked(python_type: type, name: str, read: Reader, length: int | None = None) -> Reader:
    """Return ``read``, preceded by a check that the value is of type ``python_type``, called ``name`` in the error, and
    of ``length`` items if that is not None."""

    def checked(plain: Any, kind: Any) -> Any:
        if type(plain) is not python_type:
            raise Unreadable(f"is {shown(plain)}, not {name}")
        if length is not None and len(plain) != length:
            raise Unreadable(f"has {len(plain)} parts, not {length}")
        return read(plain, kind)

    return checked


def _items_reader(hint: Any, hook: Reader) -> Reader:
    """Return a reader of a list whose items have one type; an error names the index of its item."""

    def read(plain: list[Any], _: Any) -> tuple[Any, ...]:
        items = iter(plain)
        try:
            return tuple([hook(item, hint) for item in items])
        except Unreadable as error:
            raise error.within(f"[{_last(plain, items)}]") from None

    return read


def _parts_reader(hints: tuple[Any, ...], hooks: Sequence[Reader]) -> Reader:
    """Return a reader of a list with a type for each item; an error names the index of its item."""

    def read(plain: list[Any], _: Any) -> tuple[Any, ...]:
        items = iter(plain)
        try:
            return tuple([hook(item, hint) for hint, hook, item in zip(hints, hooks, items, strict=True)])
        except Unreadable as error:
            raise error.within(f"[{_last(plain, items)}]") from None

    return read


def _last(plain: list[Any], items: Iterator[Any]) -> int:
    """Return the index of the item of list ``plain`` that the iterator ``items`` over it returned last."""
    return len(plain) - operator.length_hint(items) - 1


def _values_reader(hint: Any, hook: Reader) -> Reader:
    """Return a reader of a mapping whose values have one type; an error names the key of its value."""

    def read(plain: dict[str, Any], _: Any) -> dict[str, Any]:
        values = {}
        for key, part in plain.items():
            try:
                values[key] = hook(part, hint)
            except Unreadable as error:
                raise error.within(f"[{shown(key)}]") from None
        return values

    return read


def _field_reader(place: str, hint: Any, hook: Reader) -> Reader:
    """Return a reader of a dataclass's field; an error names the field."""

    def read(plain: Any, _: Any) -> Any:  # not the hint from cattrs: it has lost the metadata of Annotated
        try:
            return hook(plain, hint)
        except Unreadable as error:
            raise error.within(place) from None

    return read


def _fields_reader(kind: Any, read: Reader) -> Reader:
    """Return a reader of a dataclass from a mapping, of which ``read`` converts the fields.

    It checks format and version, ignores the properties in ``DERIVED``, and calls the dataclass's ``_check``.
    """
    from cattrs import ForbiddenExtraKeysError

    ignored = frozenset(getattr(kind, "DERIVED", ())) | (_HEAD if issubclass(kind, Saved) else frozenset())

    def checked(plain: dict[str, Any], _: Any) -> Any:
        if issubclass(kind, Saved):
            if "format" in plain:
                check_format(plain, kind.FORMAT, kind.SCHEMA)
            plain = kind._prepared({key: part for key, part in plain.items() if key not in ignored})
        elif ignored:
            plain = {key: part for key, part in plain.items() if key not in ignored}
        try:
            record = read(plain, kind)
        except KeyError as error:
            raise Unreadable(f"lacks {error.args[0]!r}") from None
        except ForbiddenExtraKeysError as error:
            raise Unreadable(f"has an unknown {shown(min(error.extra_fields))}") from None
        if hasattr(kind, "_check"):
            record._check()
        return record

    return checked


_HEAD = frozenset({"format", "schema"})


def _frozen(plain: Any, kind: Any, depth: int = DEEPEST) -> Json:
    """Return a copy with tuples for lists. Raises Unreadable for a value that JSON does not have, or that is nested in
    more than ``depth`` levels. ``kind`` is `Json`, or a union of scalars, which allows no mapping."""
    if depth == 0:
        raise Unreadable(f"is nested deeper than {DEEPEST} levels")
    if isinstance(plain, Mapping) and kind in (Any, Json):
        return {str(key): _frozen(part, kind, depth - 1) for key, part in plain.items()}
    if isinstance(plain, (tuple, list)):
        return tuple([_frozen(part, kind, depth - 1) for part in plain])
    return plain if plain is None or isinstance(plain, bool) else _scalar(plain, type(plain), -math.inf, math.inf)


def _one_of(plain: Any, kind: Any) -> Any:
    """Return a text that is among those of ``kind``, a Literal. Raises Unreadable."""
    if not isinstance(plain, str) or plain not in get_args(kind):
        raise Unreadable(f"is {shown(plain)}, which is none of {', '.join(map(repr, get_args(kind)))}")
    return plain


def _scalar(plain: Any, kind: Any, least: float = 0, most: float = _LARGEST) -> Any:
    """Return a text, a boolean, or a number from ``least`` to below ``most``, a whole number below 2**63.

    Raises Unreadable for a value of another type than ``kind``. A float may be written as a whole number.
    """
    if kind is float and type(plain) is int:
        plain = float(plain) if abs(plain) < _LARGEST else plain
    if type(plain) is not kind or kind not in (str, bool, int, float):
        raise Unreadable(f"is {shown(plain)}, not {getattr(kind, '__name__', kind)}")
    if kind in (int, float) and not (least <= plain and abs(plain) < (most if kind is float else _LARGEST)):
        raise Unreadable(f"is {shown(plain)}, which is out of range")
    return plain


def _measured(plain: Any, _: Any) -> float:
    """Read a float of type hint `Measured`, which may be written as "nan", "inf" or "-inf"."""
    if plain in ("nan", "inf", "-inf"):
        return float(plain)
    return _scalar(plain, float, -math.inf, math.inf)


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return the digits of ``x``, unless they are more than Python converts to text."""
        return super().repr_int(x, level) if abs(x) < _LARGEST else _MANY_DIGITS


_MANY_DIGITS = "a number of many digits"
_short_repr = _ShortRepr()


def shown(plain: Any) -> str:
    """Return a parsed value as text for an error: at most 40 characters, with control characters escaped."""
    if isinstance(plain, (Mapping, list, tuple)):  # its repr would be as long as it is
        return f"{_short_repr.repr(plain):.40}"
    return f"{plain!r:.40}" if not isinstance(plain, int) or abs(plain) < _LARGEST else _MANY_DIGITS
