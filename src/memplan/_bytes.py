"""Texts such as "8 GiB" from and to integers of bytes; everywhere else bytes are integers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import SupportsIndex

from memplan.errors import UnitError

_PREFIXES = "KMGT"
# At most 20 digits on either side: more are no size, and int() refuses some thousand digits in its own words.
_SIZE = re.compile(r"(\d{1,20})(\.\d{1,20})?\s*(?:([kmgt])(i?)b?|b)?", re.ASCII | re.IGNORECASE)
_BITS = re.compile(r"bits?\b|bps\b", re.ASCII | re.IGNORECASE)

ALLOCATOR_BLOCK = 512
"""Smallest block of CUDA's caching allocator, of which all blocks are multiples (``kMinBlockSize`` in torch's
c10/cuda/CUDACachingAllocator.h)."""


def round_to_blocks(size: int) -> int:
    """Return the bytes that CUDA's caching allocator counts for a request: rounded up to a multiple of 512."""
    return -(-size // ALLOCATOR_BLOCK) * ALLOCATOR_BLOCK


def parse_bytes(value: str | SupportsIndex) -> int:
    """Read a number of bytes.

    "KiB", "MiB", "GiB", "TiB" are powers of 1024; "KB", "MB", "GB", "TB" powers of 1000. Case does not matter
    and the "B" may be left out ("8g" is 8 GB); a number alone is in bytes. A fraction of a byte is dropped,
    so that a budget never grows.

    Args:
        value: a text, or an integer of bytes.

    Returns:
        Bytes, 0 or more.

    Raises:
        UnitError: anything else: a negative number, bits, a float, an unknown unit.

    Example:
        >>> parse_bytes("8 GiB"), parse_bytes("8GB"), parse_bytes("1.5MiB"), parse_bytes(512)
        (8589934592, 8000000000, 1572864, 512)
    """
    if isinstance(value, str):
        return _parse_text(value)
    try:
        number = operator.index(value)
    except TypeError:
        raise _not_bytes(value) from None
    if number < 0 or isinstance(value, bool):
        raise _not_bytes(value)
    return number


def _parse_text(text: str) -> int:
    """Return the bytes that a text such as "8 GiB" names. Raises UnitError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _not_bytes(text)
    whole, fraction, prefix, binary = match.groups()
    if prefix is None:
        if fraction is not None:  # a forgotten unit, not half a byte
            raise _not_bytes(text)
        return int(whole)
    unit = (1024 if binary else 1000) ** (_PREFIXES.index(prefix.upper()) + 1)
    return int(Fraction(whole + (fraction or "")) * unit)


def _not_bytes(value: object) -> UnitError:
    """Return the error for a value that is no number of bytes. For a number of bits it advises to divide by 8."""
    if isinstance(value, str) and _BITS.search(value):
        return UnitError(
            f"{value!r} is a number of bits", expected="a number of bytes", do="Divide it by 8 and write it like '1 GB'"
        )
    return UnitError(
        f"{value!r} is not a number of bytes",
        expected="an integer from 0, or a number with one of the units KiB, MiB, GiB, TiB, KB, MB, GB, TB",
        do="Write it like '8 GiB' (8589934592 bytes), '8 GB' (8000000000 bytes) or 8589934592",
    )


def format_bytes(number: int) -> str:
    """Write a number of bytes for people.

    Exact below 1 KiB, else with one decimal in the largest binary unit up to TiB.

    Args:
        number: bytes; a difference may be negative.

    Example:
        >>> format_bytes(512), format_bytes(2_040_109_466), format_bytes(-1536), format_bytes(1024**2 - 1)
        ('512 B', '1.9 GiB', '-1.5 KiB', '1.0 MiB')
    """
    sign, size = ("-" if number < 0 else ""), abs(number)
    if size < 1024:
        return f"{sign}{size} B"
    tenths, name = 0, ""  # tenths of the unit ``name``
    for power, prefix in enumerate(_PREFIXES, start=1):
        unit = 1024**power
        # integer division that rounds half up: exact at any size
        tenths, name = (20 * size + unit) // (2 * unit), f"{prefix}iB"
        if tenths < 10240:  # a size that rounds to 1024.0 is written in the next unit
            break
    return f"{sign}{tenths // 10}.{tenths % 10} {name}"


def format_bytes_as_torch(number: int) -> str:
    """Write a number of bytes as torch's allocator does in its own messages (format_size, c10/cuda).

    Args:
        number: bytes; a difference may be negative.

    Example:
        >>> format_bytes_as_torch(1024), format_bytes_as_torch(-20 << 20), format_bytes_as_torch(66592964608)
        ('1024 bytes', '-20.00 MiB', '62.02 GiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(number) > 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} bytes"


def signed(size: int, show: Callable[[int], str] = format_bytes) -> str:
    """Write a difference in bytes with its sign, none for 0; ``show`` writes sizes.

    Example:
        >>> signed(1536), signed(-1536), signed(0)
        ('+1.5 KiB', '-1.5 KiB', '0 B')
    """
    return f"{'+' if size > 0 else ''}{show(size)}"
