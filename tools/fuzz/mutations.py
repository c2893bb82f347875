"""Mutations of files: of the JSON value that a file holds, and of its bytes.

The value's own structure steers them: fields are given another type, another name, a value of another field; numbers
become indices beyond what they point into, or those of another row, so that references are circular.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, cast

TEXTS = (
    "", " ", "\x1b[2J", "\x1b]0;x\x07", "\x1b]8;;http://x\x07y", "a\nb", "a\rb", "a\x00b", "\x9b31m", "\u202eevil",
    "\u2066x", "\ud800", "\u2028", "\ufeff", "[bold red]x[/]", "::stop-commands::x", "##[error]x", "x" * 300, "体" * 50,
    "</script><script>x", "{{ 7 * 7 }}", "a." * 400, "../" * 40 + "etc/passwd", "%s{}", "%n", "*/ x /*", "??/", "\\",
    '"', "'", "nan", "-1", "9" * 400, "9" * 5000, "a." + "9" * 5000, "1e400", "cuda:0", "saved", "__proto__",
    "__class__", "weight", "aten.mm.default",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 7, 511, 512, 513, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 62) + 1, (1 << 63) - 1, 1 << 63,
    1 << 64,
    -(1 << 31), -(1 << 63), 10**300, 10**4000, 0.5, -0.0, 1e-300, 5e-324, 1e18, 1e300, -1e300, float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip


def odd(random: Random) -> Any:
    """Return a value that stands in few files."""
    which = random.randrange(8)
    if which < 3:
        return random.choice(NUMBERS)
    if which < 5:
        return random.choice(TEXTS)
    if which == 5:
        return random.choice((None, True, False, [], {}, [[]], {"": {}}, [None]))
    if which == 6:
        nested: Any = random.choice((0, "x"))
        for _ in range(random.choice((3, 15, 200, 400))):
            nested = [nested] if random.random() < 0.5 else {"a": nested}
        return nested
    return [random.choice((0, "x", [], {}))] * random.choice((2, 40, 3000))


Path = tuple[int | str, ...]


def paths_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where each part of a JSON value stands, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from paths_of(part, (*path, key))


Repair = Callable[[Any, Random], None]
"""Makes the sums of a changed value right again, so that what is behind their check is reached, too."""


class Seed:
    """A file to begin with: the JSON text of a value, its parts, its keys, and the lengths of its lists."""

    def __init__(self, value: Any, repair: Repair | None = None) -> None:
        self.text = json.dumps(value)
        self.repair = repair
        plain = json.loads(self.text)
        self.paths = list(paths_of(plain))
        by_form: dict[Path, list[Path]] = {}
        for path in self.paths:
            by_form.setdefault(tuple("#" if isinstance(key, int) else key for key in path), []).append(path)
        self.forms = list(by_form.values())
        """Paths by their form: a change chooses a form first, so that long lists do not take them all."""
        self.keys = sorted({key for path in self.paths for key in path if isinstance(key, str)})
        self.lengths = sorted({len(part) for part in map(self._at(plain), self.paths) if isinstance(part, list)})

    @staticmethod
    def _at(plain: Any) -> Callable[[Path], Any]:
        def part(path: Path) -> Any:
            found = plain
            for key in path:
                found = found[key]
            return found

        return part

    def place(self, random: Random) -> Path:
        """Return a path."""
        return random.choice(random.choice(self.forms) if random.random() < 0.7 else self.paths)

    def changed(self, random: Random) -> Any:
        """Return the value with one to three of its parts changed."""
        value = json.loads(self.text)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            _change(value, self.place(random), self, random)
        if self.repair is not None and random.random() < 0.5:
            with suppress(TypeError, KeyError, AttributeError, ValueError, OverflowError, IndexError):
                self.repair(value, random)  # of what it can be made of
        return value

    def part(self, random: Random) -> Any:
        """Return a part of the value."""
        return self._at(json.loads(self.text))(random.choice(self.paths))


def _change(value: Any, path: Path, seed: Seed, random: Random) -> None:
    way, last = path[:-1], cast("Any", path[-1])
    try:
        for key in way:
            value = value[key]
        old = value[last]
    except (KeyError, IndexError, TypeError):  # an earlier change took it away
        return
    if isinstance(value, str):
        return
    which = random.randrange(14)
    is_number = isinstance(old, (int, float)) and not isinstance(old, bool)
    if which < 3:
        value[last] = odd(random)
    elif which == 3:
        value[last] = seed.part(random)
    elif which == 4:
        del value[last]
    elif which == 5:
        value[last] = _as_another_type(old, random)
    elif which == 6 and is_number:
        value[last] = random.choice((old + 1, old - 1, old * 2, -old, old + 512, old << 40 if type(old) is int else 0))
    elif which == 7 and type(old) is int:  # beyond a list, at its end, or another row's
        value[last] = random.choice(seed.lengths or [0]) + random.choice((-1, -1, 0, 0, 1, -2))
    elif which == 8 and isinstance(value, list):
        value[:] = value[:last] + [old] * random.choice((0, 2, 2, 3, 500)) + value[last + 1 :]
    elif which == 9 and isinstance(value, dict):
        name = random.choice((random.choice(TEXTS), random.choice(seed.keys), "extra"))
        value[name] = value.pop(last) if random.random() < 0.5 else old
    elif which == 10 and isinstance(old, (list, dict)):
        value[last] = type(old)()
    elif which == 11 and isinstance(old, str):
        text = random.choice(TEXTS)
        at = random.randrange(len(old) + 1)
        value[last] = random.choice((old + text, text + old, old[:at] + text + old[at:], old[:at], old * 30))
    elif isinstance(value, list) and value:
        other = random.randrange(len(value))
        value[last], value[other] = value[other], value[last]
    else:
        value[last] = odd(random)


def _as_another_type(old: Any, random: Random) -> Any:
    """Return what stands for the same in another type."""
    if isinstance(old, dict):
        return random.choice((list(old.values()), [[key, part] for key, part in old.items()], list(old), [old]))
    if isinstance(old, list):
        return random.choice(
            ({str(at): part for at, part in enumerate(old)}, old[:1] and old[0], [old], str(old)[:200])
        )
    if isinstance(old, str):
        return random.choice(([old], {old: old}, len(old), list(old), True, None))
    if isinstance(old, (int, float)):
        return random.choice((str(old), 0.5, bool(old), [old], {"value": old}, None, -old))
    return random.choice((0, "", [], {}, "null"))


_INSIDE = re.compile(rb"[{,]\s*(?=\")")


def twice(data: bytes, random: Random) -> bytes:
    """Return JSON in which a mapping has one of its keys a second time, with another value."""
    places = [found.end() for found in _INSIDE.finditer(data)]
    if not places:
        return data
    at = random.choice(places)
    key = re.match(rb'"(?:[^"\\]|\\.)*"\s*:', data[at:])
    if key is None:
        return data
    try:
        value = json.dumps(odd(random)).encode()
    except (RecursionError, ValueError):
        value = b"0"
    return data[:at] + key.group() + value + b"," + data[at:]


def damaged(data: bytes, random: Random) -> bytes:
    """Return bytes with one to three places changed."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.randrange(len(found) + 1)
        which = random.randrange(6)
        if which == 0 and place < len(found):
            found[place] = random.randrange(256)
        elif which == 1 and place < len(found):
            found[place] ^= 1 << random.randrange(8)
        elif which == 2:
            del found[place : place + random.choice((1, 2, 8, 200))]
        elif which == 3:
            found[place:place] = random.randbytes(random.choice((1, 2, 8)))
        elif which == 4:
            found[place:place] = found[place : place + random.choice((1, 8, 200))] * random.choice((1, 2, 50))
        else:
            found[place:place] = b"9" * random.choice((1, 20, 400, 5000))
    return bytes(found[: random.randrange(len(found) + 1)] if random.random() < 0.05 else found)
