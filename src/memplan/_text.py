"""Texts: made printable, of seconds, and written to files whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def printable(text: str) -> str:
    """Return a text without what would steer a terminal: such characters become question marks.

    Example:
        >>> printable("layer \x1b[31mred")
        'layer ?[31mred'
    """
    return "".join(one if one.isprintable() else "?" for one in text)


def counted(number: int, thing: str) -> str:
    """Return a number with what it counts.

    Example:
        >>> counted(1, "step"), counted(1200, "step")
        ('1 step', '1,200 steps')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


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


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, and move it into place once complete: a failed run leaves the old file."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only the owner reads
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
