"""Texts: made printable, of seconds, and written to files whole."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Sequence


def printable(text: str) -> str:
    """Return a text with question marks for characters that are not printable, which could steer a terminal.

    Example:
        >>> printable("layer \x1b[31mred")
        'layer ?[31mred'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def printable_lines(text: str) -> str:
    """Return a text made `printable`, with its line breaks.

    Example:
        >>> printable_lines("one\\ntwo\x1b[2J")
        'one\\ntwo?[2J'
    """
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def one_line(text: str) -> str:
    """Return a text made `printable` on a single line: each line break, with the spaces around it, becomes a space.

    A text of more than 1,000 characters is cut in its middle.

    Example:
        >>> one_line("one\\n  two\\x1b[2J")
        'one two?[2J'
    """
    if len(text) > _LONGEST_LINE:
        text = f"{text[: 3 * _LONGEST_LINE // 4]} ... {text[-_LONGEST_LINE // 4 :]}"
    return text if text.isprintable() else printable(_BREAKS.sub(" ", text))


_LONGEST_LINE = 1000
_BREAKS = re.compile(r"\s*[\r\n]\s*")


def inert(line: str) -> str:
    """Return a line of a log that GitHub Actions takes for no command, by a space in each mark of a command.

    The marks are ``::`` at the beginning of a line, also after spaces, and ``##[`` anywhere.

    Example:
        >>> inert("  ::stop-commands::x"), inert("a::b")
        ('  : :stop-commands::x', 'a::b')
    """
    begin = len(line) - len(line.lstrip())
    if line.startswith("::", begin):
        line = f"{line[:begin]}: :{line[begin + 2 :]}"
    return line.replace("##[", "# #[")


def whole_number(text: str) -> int | None:
    """Return the number that a text of ASCII digits names, below 10**18; None for any other text.

    `int` alone accepts digits of other scripts, and raises its own error for some thousand digits.

    Example:
        >>> whole_number("128"), whole_number("-1"), whole_number("²"), whole_number("9" * 5000)
        (128, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


_DIGITS = 18


def counted(number: int, thing: str) -> str:
    """Return a number with what it counts.

    Example:
        >>> counted(1, "step"), counted(1200, "step")
        ('1 step', '1,200 steps')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as people write them.

    Example:
        >>> ranks_text((0, 1, 2, 5)), ranks_text((7,)), ranks_text(range(0, 64, 8))
        ('ranks 0-2, 5', 'rank 7', 'ranks 0-56 by 8')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    if len(ranks) > 2 and step > 1 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"ranks {ranks[0]}-{ranks[-1]} by {step}"
    runs: list[list[int]] = []  # [first, last] of consecutive ranks
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "ranks " + ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def format_share(part: float, whole: float) -> str:
    """Return a percentage such as "12 %"; "<1 %" for small shares."""
    percent = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


_MANY_SECONDS = 1e7


def format_seconds(seconds: float) -> str:
    """Write a time for people, with two digits or more.

    Example:
        >>> format_seconds(0.0412), format_seconds(0.00031), format_seconds(2.5), format_seconds(0)
        ('41 ms', '0.31 ms', '2.5 s', '0 ms')
        >>> format_seconds(1e300), format_seconds(-0.0013)
        ('1e+300 s', '-1.3 ms')
    """
    if seconds < 0:
        return f"-{format_seconds(-seconds)}" if seconds <= -5e-7 else "0 ms"
    if seconds >= _MANY_SECONDS:
        return f"{seconds:.3g} s"
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1000 * seconds, "ms")
    if number == 0:
        return "0 ms"
    if number < 0.0005:
        return f"under 0.001 {unit}"
    # two significant digits, at most three decimals; the limits are those from which rounding carries to a new digit
    decimals = sum(number < limit for limit in (9.95, 0.995, 0.0995))
    return f"{number:.{decimals}f} {unit}"


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, and move it into place once complete: a failed run leaves the old file.

    Of a symbolic link, its target is replaced. The new file has the old file's mode and owner. A device or a pipe is
    written to directly, and so is a file whose owner the user may not set.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    data = content.encode() if isinstance(content, str) else content
    target = os.path.realpath(path)
    try:
        old = os.stat(target) if os.path.lexists(target) else None
        is_other = old is not None and not stat.S_ISREG(old.st_mode)  # /dev/null must stay what it is
        if is_other or not _replace_file(target, data, old):
            with open(target, "wb") as file:
                file.write(data)
    except OSError as error:  # that of a full disk names no file, others name the temporary one
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None


def _replace_file(target: str, data: bytes, old: os.stat_result | None) -> bool:
    """Write a temporary file and rename it to ``target``.

    ``old`` is the stat of the file there, None if there is none. Return False, without a change, if the new file cannot
    have its owner.
    """
    temporary = os.path.join(os.path.dirname(target), f".memplan-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if old is not None and not _copy_owner_and_mode(handle, old):
                os.unlink(temporary)
                return False
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return True


def _copy_owner_and_mode(handle: int, old: os.stat_result) -> bool:
    """Give an open file the owner and the mode of the old one. Return False if the user may not change its owner."""
    new = os.fstat(handle)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(handle, old.st_uid, old.st_gid)
        except PermissionError:
            return False
    os.chmod(handle, stat.S_IMODE(old.st_mode))
    return True
