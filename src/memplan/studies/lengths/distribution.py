"""Distributions of batch lengths, and sequences of batches drawn from them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from memplan._text import whole_number
from memplan.errors import InputError

_TOLERANCE = 0.001
"""Difference from 1 that the sum of the shares may have, since users round them."""
_EXPECTED = "LENGTH:SHARE joined by commas, as in 512:0.6,2048:0.4, or a file with a length a line"


def parse_lengths(text: str) -> dict[int, float]:
    """Parse ``512:0.6,2048:0.4``, or a file with the length of a batch in each line; return length -> share. Raises
    InputError if the text is neither of these, a length is 0, or the shares do not add up to 1."""
    if ":" in text and not Path(text).is_file():
        return _from_shares(text)
    return _from_file(text)


def draw(lengths: Mapping[int, float], batches: int, seed: int) -> tuple[int, ...]:
    """Return the lengths of ``batches`` batches, drawn independently; the same for the same seed."""
    return tuple(random.Random(seed).choices(list(lengths), list(lengths.values()), k=batches))


def padded(order: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return the lengths rounded up to multiples of ``multiple``."""
    return tuple(-(-length // multiple) * multiple for length in order)


def _from_shares(text: str) -> dict[int, float]:
    """Parse ``512:0.6,2048:0.4`` into the share of each length. Raises InputError."""
    shares, names_twice = dict[int, float](), False
    for part in text.split(","):
        length, colon, share = part.strip().partition(":")
        try:
            value = float(share)
        except ValueError:
            value = -1.0  # refused below
        if not colon or not 0 < value <= 1:
            raise InputError(f"--lengths {part.strip()!r}", expected=_EXPECTED, do="Write it so")
        tokens = _length(length, part.strip())
        names_twice = names_twice or tokens in shares
        shares[tokens] = value
    total = sum(shares.values())
    if names_twice:
        raise InputError(f"--lengths {text!r} names a length twice", expected=_EXPECTED, do="Add up its shares")
    if abs(total - 1) > _TOLERANCE:
        raise InputError(
            f"--lengths {text!r}: the shares add up to {total:g}", expected="shares of all batches, together 1",
            do="Correct them, or give a file with a length a line",
        )  # fmt: skip
    return shares


def _from_file(path: str) -> dict[int, float]:
    """Return the share of each length in a file with a length a line. Raises InputError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"--lengths {path!r} is no file to read ({error})", expected=_EXPECTED) from None
    counts = Counter(_length(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not counts:
        raise InputError(f"--lengths {path}: it is empty", expected="a file with a length a line", do="Fill it")
    return {length: count / counts.total() for length, count in sorted(counts.items())}


def _length(text: str, source: str) -> int:
    """Return a length. Raises InputError if it is no whole number above 0. ``source``: where the text is from, for the
    error."""
    number = whole_number(text.strip())
    if number is None or number < 1:
        raise InputError(
            f"--lengths {source}: the length {text.strip()!r}", expected="a whole number above 0", do="Correct it"
        )
    return number
