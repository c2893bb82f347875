"""Texts from strangers, as they may be printed."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text without what would steer a terminal: such characters become question marks.

    Example:
        >>> printable("layer \x1b[31mred")
        'layer ?[31mred'
    """
    return "".join(one if one.isprintable() else "?" for one in text)


def format_seconds(seconds: float) -> str:
    """Write a time for people, with two digits or more.

    Example:
        >>> format_seconds(0.0412), format_seconds(0.00031), format_seconds(2.5), format_seconds(0)
        ('41 ms', '0.31 ms', '2.5 s', '0 ms')
    """
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1000 * seconds, "ms")
    if number == 0:
        return "0 ms"
    digits = 0 if number >= 9.95 else 1 if number >= 0.995 else 2 if number >= 0.0995 else 3
    return f"{number:.{digits}f} {unit}" if number >= 0.0005 else f"under 0.001 {unit}"
