"""Mutations of files: of the JSON value that a file holds, and of its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

_TEXTS = (
    "", "\x1b[2J", "\x1b]0;x\x07", "a\nb", "a\x00b", "\x9b31m", "\u202eevil", "\ud800", "[bold red]x[/]", "x" * 300,
    "体" * 50, "%s{}", "nan", "cuda:0", "saved",
)  # fmt: skip
_NUMBERS = (
    -1, 0, 1, 2, 511, 513, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63),
    10**300, 0.5, -0.0, 1e-300, 1e18, 1e300, -1e300, float("nan"), float("inf"),
)  # fmt: skip


def _odd(random: Random) -> Any:
    """Return a value that stands in few files."""
    which = random.randrange(8)
    if which < 3:
        return random.choice(_NUMBERS)
    if which < 5:
        return random.choice(_TEXTS)
    if which == 5:
        return random.choice((None, True, False, [], {}, [[]], {"": {}}, [None]))
    if which == 6:
        nested: Any = random.choice((0, "x"))
        for _ in range(random.choice((3, 15, 200))):
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


class Seed:
    """A file to begin with: the JSON text of a value."""

    def __init__(self, value: Any) -> None:
        self.text = json.dumps(value)
        self.paths = list(paths_of(json.loads(self.text)))

    def changed(self, random: Random) -> Any:
        """Return the value with one to three of its parts changed."""
        value = json.loads(self.text)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            _change(value, random.choice(self.paths), self, random)
        return value

    def part(self, random: Random) -> Any:
        """Return a part of the value."""
        found = json.loads(self.text)
        for key in random.choice(self.paths):
            found = found[key]
        return found


def _change(value: Any, path: Path, seed: Seed, random: Random) -> None:
    *way, last = path
    try:
        for key in way:
            value = value[key]
        old = value[last]
    except (KeyError, IndexError, TypeError):  # an earlier change took it away
        return
    if isinstance(value, str):
        return
    which = random.randrange(10)
    if which < 4:
        value[last] = _odd(random)
    elif which == 4:
        value[last] = seed.part(random)
    elif which == 5:
        del value[last]
    elif which == 6 and isinstance(old, (int, float)) and not isinstance(old, bool):
        value[last] = random.choice((old + 1, old - 1, old * 2, -old, old + 512, old << 40 if type(old) is int else 0))
    elif which == 7 and isinstance(value, list):
        value[:] = value[:last] + [old] * random.choice((2, 2, 3, 500)) + value[last:]
    elif which == 8 and isinstance(value, dict):
        value[random.choice((*_TEXTS, "extra"))] = value.pop(last) if random.random() < 0.5 else old
    elif isinstance(value, list):
        other = random.randrange(len(value))
        value[last], value[other] = value[other], value[last]
    else:
        value[last] = _odd(random)


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
