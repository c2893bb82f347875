"""Texts from strangers, as they may be printed."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text without what would steer a terminal: such characters become question marks.

    Example:
        >>> printable("layer \x1b[31mred")
        'layer ?[31mred'
    """
    return "".join(one if one.isprintable() else "?" for one in text)
